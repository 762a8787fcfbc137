from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.evidence import STALE_S
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict, worst
from pdpool_operator.diagnose.pools import diagnose, subjects_of
from pdpool_operator.diagnose.track import follow
from pdpool_operator.observe.parse import observed_pod

from tests.unit.operator.plan.makers import (
    T0,
    follow_all,
    make_instance,
    make_observed,
    make_pod,
    make_pool,
    make_sample,
    seconds,
)

STUCK_AFTER_S = 30
BOOTSTRAP, INFLIGHT, PREALLOC, TRANSFER = "prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer"


def subject(role: Role, index: int = 0, *, since: float = 0.0, at: float = 0.0, **sample: Any) -> Subject:
    """An instance with two samples of the same counters, at `since` and `at`, in seconds after T0.

    Before that, its queues were empty.
    """
    name = f"chat-{role}-{index}-0"
    uid = f"uid-of-{name}"
    empty = dict.fromkeys(sample.get("queues") or (), (0, None, None))
    before = make_sample(T0 + seconds(since - 1), pod_uid=uid, **{**sample, "queues": empty})
    looks = [make_sample(T0 + seconds(moment), pod_uid=uid, **sample) for moment in (since, at)]
    track = follow_all([before, *looks])
    assert track is not None
    return Subject("chat", role, index, make_pod(name), leaving=False, tracks=(track,))


def prefill(**kwargs: Any) -> Subject:
    return subject(Role.PREFILL, **kwargs)


def decode(index: int = 0, **kwargs: Any) -> Subject:
    return subject(Role.DECODE, index, **kwargs)


def judge(own: Subject, *others: Subject, at: float = 0.0) -> Diagnosis:
    (diagnosis,) = diagnose([own], others, stuck_after_s=STUCK_AFTER_S, now=T0 + seconds(at))
    return diagnosis


def test_an_empty_engine_is_idle() -> None:
    diagnosis = judge(prefill(queues={BOOTSTRAP: (0, None, 5)}))
    assert diagnosis.verdict is Verdict.IDLE
    assert diagnosis.waiting_since is None


def test_running_requests_or_short_waits_are_flowing() -> None:
    assert judge(decode(running=4)).verdict is Verdict.FLOWING
    waits = judge(prefill(at=29.9, queues={BOOTSTRAP: (3, 29.9, 5)}), decode(at=29.9), at=29.9)
    assert waits.verdict is Verdict.FLOWING
    assert waits.waiting_since is None, "the wait in a status may be half a minute old"


def test_long_waits_in_a_queue_that_moves_are_saturated() -> None:
    moving = prefill(since=20, at=40, queues={BOOTSTRAP: (50, 35.0, 5)})
    waits = judge(moving, decode(at=40), at=40)
    assert waits.verdict is Verdict.SATURATED
    assert waits.waiting_since == T0 + seconds(5)


def test_a_queue_that_was_not_watched_for_long_is_not_said_to_move() -> None:
    """After a restart of the operator, requests are old, and it is unknown whether they move."""
    for queues in ({BOOTSTRAP: (14, 92.0, 5)}, {INFLIGHT: (14, 92.0, 5)}):
        track = follow_all([make_sample(T0, queues=queues), make_sample(T0 + seconds(29), queues=queues)])
        assert track is not None
        waiting = replace(prefill(), tracks=(track,))
        diagnosis = judge(waiting, decode(at=29), at=29)
        assert diagnosis.verdict is Verdict.UNKNOWN
        assert "requests wait" in diagnosis.message
        later = follow(track, make_sample(T0 + seconds(30), queues=queues))
        assert judge(replace(waiting, tracks=(later,)), decode(at=30), at=30).verdict is Verdict.STUCK


def test_the_story_of_the_frozen_decode_names_it_in_the_words_of_the_design() -> None:
    waiting = prefill(at=92, queues={BOOTSTRAP: (14, 92.0, 5)})
    frozen, fine = decode(1, at=92, beat_age_s=88.0), decode(0, at=92)
    blocked = judge(waiting, fine, frozen, at=92)
    assert blocked.verdict is Verdict.BLOCKED
    assert blocked.blames == ("chat-decode-1",)
    assert blocked.message == (
        "prefill chat-prefill-0 rank 0: requests wait for bootstrap; "
        "chat-decode-1 engine loop does not run while its connector answers"
    )
    at_fault = judge(frozen, waiting, at=92)
    assert at_fault.verdict is Verdict.STUCK
    assert at_fault.message == "decode chat-decode-1 rank 0: engine loop does not run while its connector answers"
    assert judge(fine, waiting, at=92).verdict is Verdict.IDLE


def test_engine_without_beat_is_not_silent() -> None:
    waiting = prefill(since=35, at=40, queues={BOOTSTRAP: (2, 31.0, 5)})
    assert judge(waiting, decode(0, at=40), decode(1, at=40, beat_age_s=None), at=40).blames == ()


def test_one_frozen_decode_blocks_its_requests_even_while_others_move() -> None:
    waiting = prefill(since=35, at=40, queues={BOOTSTRAP: (2, 31.0, 5)})
    diagnosis = judge(waiting, decode(0, at=40), decode(1, at=40, beat_age_s=33.0), at=40)
    assert diagnosis.verdict is Verdict.BLOCKED
    assert diagnosis.blames == ("chat-decode-1",)


@pytest.mark.parametrize(
    ("oldest_s", "still_s", "verdict"),
    [
        (29.999, 29.999, Verdict.FLOWING),
        (30.0, 29.999, Verdict.SATURATED),
        (30.0, 30.0, Verdict.STUCK),
        (29.999, 30.0, Verdict.FLOWING),
        (None, 29.999, Verdict.FLOWING),
        (None, 30.0, Verdict.STUCK),
    ],
)
def test_the_threshold_holds_to_the_millisecond_for_age_and_for_stillness(
    oldest_s: float | None, still_s: float, verdict: Verdict
) -> None:
    waiting = prefill(at=still_s, queues={BOOTSTRAP: (1, oldest_s, 5)})
    assert judge(waiting, decode(at=still_s), at=still_s).verdict is verdict


@pytest.mark.parametrize(
    ("overdue", "beat_age_s", "verdict"),
    [
        (False, 29.999, Verdict.IDLE),
        (False, 30.0, Verdict.STUCK),
        (True, 14.999, Verdict.IDLE),
        (True, 15.0, Verdict.STUCK),
    ],
)
def test_a_silent_loop_counts_sooner_once_requests_are_overdue(
    overdue: bool, beat_age_s: float, verdict: Verdict
) -> None:
    waiting = prefill(at=40, queues={BOOTSTRAP: (1, 40.0 if overdue else 1.0, 5)})
    assert judge(decode(at=40, beat_age_s=beat_age_s), waiting, at=40).verdict is verdict


def test_prefill_is_stuck_itself_when_its_own_loop_is_silent() -> None:
    waiting = prefill(at=40, queues={BOOTSTRAP: (3, 40.0, 5)}, beat_age_s=38.0)
    diagnosis = judge(waiting, decode(at=40), at=40)
    assert diagnosis.verdict is Verdict.STUCK
    assert diagnosis.blames == ()
    assert "engine loop does not run" in diagnosis.message
    assert "requests wait for bootstrap" in diagnosis.message


@pytest.mark.parametrize(
    ("since_resumed_s", "verdict"), [(0, Verdict.BLOCKED), (29, Verdict.BLOCKED), (30, Verdict.STUCK)]
)
def test_prefill_is_not_at_fault_before_a_decode_that_was_frozen_had_time_to_catch_up(
    since_resumed_s: float, verdict: Verdict
) -> None:
    now = 92.0 + since_resumed_s
    thawed = decode(1, since=91, at=91, beat_age_s=88.0)
    (track,) = thawed.tracks
    for moment in (92.0, now):
        track = follow(track, make_sample(T0 + seconds(moment), pod_uid=track.latest.pod_uid, beat_age_s=0.1))
    waiting = prefill(at=now, queues={BOOTSTRAP: (5, now, 5)})
    diagnosis = judge(waiting, decode(0, at=now), replace(thawed, tracks=(track,)), at=now)
    assert diagnosis.verdict is verdict
    assert diagnosis.blames == (("chat-decode-1",) if verdict is Verdict.BLOCKED else ())


def test_without_any_decode_engine_prefill_is_blocked() -> None:
    waiting = prefill(at=40, queues={BOOTSTRAP: (3, 40.0, 5)})
    diagnosis = judge(waiting, at=40)
    assert diagnosis.verdict is Verdict.BLOCKED
    assert "there is no decode engine" in diagnosis.message
    assert judge(waiting, replace(decode(at=40), leaving=True), at=40).verdict is Verdict.BLOCKED


def test_a_decode_engine_that_cannot_be_asked_is_suspected_and_not_condemned() -> None:
    waiting = prefill(at=40, queues={BOOTSTRAP: (3, 40.0, 5)})
    unseen = decode(1, at=40, connector_error="timeout")
    diagnosis = judge(waiting, decode(0, at=40), unseen, at=40)
    assert diagnosis.verdict is Verdict.BLOCKED
    assert diagnosis.blames == ("chat-decode-1",)
    assert "chat-decode-1 did not answer" in diagnosis.message
    assert judge(unseen, waiting, at=40).verdict is Verdict.UNKNOWN


def test_a_decode_that_has_never_come_up_hides_no_stuck_prefill_and_is_not_blamed() -> None:
    """It has taken no request, so no request waits for it."""
    waiting = prefill(at=40, queues={BOOTSTRAP: (3, 40.0, 5)})
    pending = replace(decode(1), pod=make_pod(phase="Pending", ready=False, ip=None), tracks=())
    stuck = judge(waiting, decode(0, at=40), pending, at=40)
    assert (stuck.verdict, stuck.blames) == (Verdict.STUCK, ())
    alone = judge(waiting, pending, at=40)
    assert (alone.verdict, alone.blames) == (Verdict.BLOCKED, ())
    assert "there is no decode engine" in alone.message


@pytest.mark.parametrize(
    "came_up",
    [
        {"pod": make_pod(ready=False, was_ready=True), "tracks": ()},
        {"pod": make_pod(ready=False)},
    ],
    ids=["Kubernetes remembers", "its connector answered before"],
)
def test_a_decode_that_came_up_once_and_cannot_be_asked_is_suspected(came_up: dict[str, Any]) -> None:
    waiting = prefill(at=40, queues={BOOTSTRAP: (3, 40.0, 5)})
    fallen = replace(decode(1), **came_up)
    diagnosis = judge(waiting, decode(0, at=40), fallen, at=40)
    assert (diagnosis.verdict, diagnosis.blames) == (Verdict.BLOCKED, ("chat-decode-1",))


@pytest.mark.parametrize(("turned_unready", "verdict"), [("09:40:00", Verdict.BLOCKED), ("09:00:00", Verdict.STUCK)])
@pytest.mark.parametrize(
    "state",
    [{"waiting": {"reason": "CrashLoopBackOff"}}, {"running": {"startedAt": "2026-11-21T11:59:00Z"}}],
    ids=["between two runs", "in a run"],
)
def test_a_crash_looping_decode_is_suspected_by_an_operator_that_has_just_come_if_it_was_ready_once(
    state: dict[str, Any], turned_unready: str, verdict: Verdict
) -> None:
    waiting = prefill(at=40, queues={BOOTSTRAP: (3, 40.0, 5)})
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": f"2026-11-21T{turned_unready}Z"}
    started = "2026-11-21T09:00:00Z"
    body = {
        "metadata": {"name": "chat-decode-1-0", "uid": "uid-of-chat-decode-1-0", "creationTimestamp": started},
        "status": {
            "phase": "Running",
            "podIP": "10.0.2.2",
            "startTime": started,
            "conditions": [ready],
            "containerStatuses": [{"name": "engine", "restartCount": 4, "state": state}],
        },
    }
    silent = follow_all([make_sample(T0 + seconds(at), connector_error="refused") for at in (0, 40)])
    assert silent is not None
    looping = replace(decode(1), pod=observed_pod(body), tracks=(silent,))
    diagnosis = judge(waiting, decode(0, at=40), looping, at=40)
    assert (diagnosis.verdict, "chat-decode-1" in diagnosis.blames) == (verdict, verdict is Verdict.BLOCKED)


def test_prefill_waits_for_a_decode_engine_that_has_no_memory_left() -> None:
    waiting = prefill(at=40, queues={BOOTSTRAP: (3, 40.0, 5)})
    full = decode(at=40, queues={PREALLOC: (5, 40.0, 9)}, running=8)
    blocked, saturated = judge(waiting, full, at=40), judge(full, waiting, at=40)
    assert blocked.verdict is Verdict.BLOCKED
    assert blocked.blames == ("chat-decode-0",)
    assert saturated.verdict is Verdict.SATURATED
    assert "requests wait for memory that running requests hold" in saturated.message


@pytest.mark.parametrize(("running", "verdict"), [(8, Verdict.SATURATED), (None, Verdict.UNKNOWN), (0, Verdict.STUCK)])
def test_who_holds_the_memory_that_a_decode_waits_for_is_what_its_engine_says_and_not_a_guess(
    running: int | None, verdict: Verdict
) -> None:
    full = decode(at=40, queues={PREALLOC: (5, 40.0, 9)}, running=running)
    diagnosis = judge(full, prefill(at=40), at=40)
    assert diagnosis.verdict is verdict
    assert ("its engine does not report running requests (timeout)" in diagnosis.message) == (running is None)


@pytest.mark.parametrize(("running", "verdict"), [(8, Verdict.SATURATED), (None, Verdict.UNKNOWN), (0, Verdict.STUCK)])
def test_what_runs_is_counted_at_the_first_of_the_ranks_that_share_a_scheduler_and_holds_for_all(
    running: int | None, verdict: Verdict
) -> None:
    full = decode(at=40, queues={PREALLOC: (5, 40.0, 9)}, running=running)
    (first,) = full.tracks
    uncounted = replace(first.latest, rank=1, engine=None, engine_error="timeout" if running is None else "")
    both = replace(full, tracks=(first, replace(first, latest=uncounted)))
    assert judge(both, prefill(at=40), at=40).verdict is verdict


def test_an_engine_that_hangs_is_stuck_by_its_silent_loop_whether_it_answers_or_not() -> None:
    hung = decode(at=40, queues={PREALLOC: (5, 40.0, 9)}, beat_age_s=39.0, running=None)
    assert judge(hung, prefill(at=40), at=40).verdict is Verdict.STUCK


def test_decode_waits_for_a_silent_prefill() -> None:
    waiting = decode(at=40, queues={TRANSFER: (2, 40.0, 5)})
    frozen = prefill(at=40, beat_age_s=39.0)
    assert judge(waiting, frozen, at=40).blames == ("chat-prefill-0",)
    assert judge(waiting, frozen, at=40).verdict is Verdict.BLOCKED


def test_two_sides_that_wait_for_each_other_are_both_stuck() -> None:
    one = prefill(at=40, queues={BOOTSTRAP: (2, 40.0, 5)})
    other = decode(at=40, queues={TRANSFER: (2, 40.0, 5)})
    assert judge(one, other, at=40).verdict is Verdict.STUCK
    assert judge(other, one, at=40).verdict is Verdict.STUCK


def test_a_transfer_that_stands_still_is_stuck() -> None:
    diagnosis = judge(prefill(at=40, queues={INFLIGHT: (2, 40.0, 5)}), decode(at=40), at=40)
    assert diagnosis.verdict is Verdict.STUCK
    assert "requests wait for the transfer and nothing moves" in diagnosis.message


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"connector_error": "timeout"}, "nothing moves; chat-decode-1 did not answer"),
        ({"beat_age_s": 39.0}, "chat-decode-1 engine loop does not run while its connector answers"),
    ],
)
def test_a_transfer_that_stands_still_as_a_decode_does_is_blocked_by_that_one(other, why) -> None:
    waiting = prefill(at=40, queues={INFLIGHT: (2, 40.0, 5)})
    diagnosis = judge(waiting, decode(0, at=40), decode(1, at=40, **other), at=40)
    assert (diagnosis.verdict, diagnosis.blames) == (Verdict.BLOCKED, ("chat-decode-1",))
    assert why in diagnosis.message


def test_one_that_has_come_just_now_is_said_to_wait_without_an_age() -> None:
    one = decode(at=40, beat_age_s=38.0, queues={TRANSFER: (1, 0.4, 5)})
    assert "; requests wait for the KV cache" in judge(one, prefill(at=40), at=40).message


def test_a_level_without_a_counter_is_no_evidence() -> None:
    assert judge(decode(at=400, queues={PREALLOC: (9, 400.0, None)}), at=400).verdict is Verdict.IDLE


def test_no_answer_is_unknown_and_never_zero() -> None:
    diagnosis = judge(prefill(connector_error="timeout"))
    assert diagnosis.verdict is Verdict.UNKNOWN
    assert diagnosis.waiting_since is None
    assert diagnosis.message == "prefill chat-prefill-0 rank 0: connector does not answer (timeout)"


@pytest.mark.parametrize(("age_s", "verdict"), [(STALE_S, Verdict.IDLE), (STALE_S + 0.001, Verdict.UNKNOWN)])
def test_an_old_look_says_nothing_about_now(age_s: float, verdict: Verdict) -> None:
    assert judge(decode(), at=age_s).verdict is verdict


def test_a_silent_beat_of_an_old_look_blames_nobody() -> None:
    waiting = prefill(since=0, at=60, queues={BOOTSTRAP: (3, 60.0, 5)})
    diagnosis = judge(waiting, decode(at=60 - STALE_S - 1, beat_age_s=50.0), at=60)
    assert "did not answer" in diagnosis.message


def test_the_worst_rank_stands_for_the_instance() -> None:
    fine = decode(at=40)
    silent = follow(None, make_sample(T0 + seconds(40), pod_uid="uid-of-chat-decode-0-0", rank=1, beat_age_s=39.0))
    diagnosis = judge(replace(fine, tracks=(*fine.tracks, silent)), at=40)
    assert diagnosis.verdict is Verdict.STUCK
    assert "rank 1" in diagnosis.message


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"leaving": True}, Verdict.DRAINING),
        ({"pod": make_pod(terminating=True)}, Verdict.DRAINING),
        ({"pod": None, "tracks": ()}, Verdict.STARTING),
        ({"pod": make_pod(phase="Failed", ready=False)}, Verdict.GONE),
        ({"pod": make_pod(phase="Pending", ready=False), "tracks": ()}, Verdict.STARTING),
        ({"pod": make_pod(ready=False)}, Verdict.STARTING),
        ({"tracks": ()}, Verdict.UNKNOWN),
    ],
)
def test_what_kubernetes_says_outranks_the_queues(changes: dict[str, Any], verdict: Verdict) -> None:
    assert judge(replace(prefill(), **changes)).verdict is verdict


def test_a_frozen_engine_stays_stuck_when_its_pod_turns_unready() -> None:
    frozen = replace(decode(at=40, beat_age_s=39.0), pod=make_pod(ready=False))
    assert judge(frozen, at=40).verdict is Verdict.STUCK


def test_an_engine_that_never_answered_and_is_not_ready_starts() -> None:
    silent = replace(decode(connector_error="refused", running=None), pod=make_pod(ready=False))
    assert judge(silent).verdict is Verdict.STARTING
    hangs = judge(replace(silent, pod=replace(silent.pod, was_ready=True)))
    assert hangs.verdict is Verdict.UNKNOWN, "an operator that has just come calls a hanging engine by its name"
    assert "connector does not answer" in hangs.message


def test_subjects_take_the_tracks_of_the_present_pod_of_our_own_instances() -> None:
    pool = make_pool(replicas=3)
    ours, foreign = make_instance(pool), make_instance(pool, 1, controller_uid="somebody-else")
    draining = make_instance(pool, 2, drain_started=T0)
    track = follow(None, make_sample())
    tracks = {"uid-of-chat-prefill-0-0": {0: track}, "an earlier pod": {0: track}}
    found = subjects_of(make_observed(pool, ours, foreign, draining), tracks)
    assert [(s.index, s.leaving, s.tracks) for s in found] == [(0, False, (track,)), (2, True, ())]


def test_the_worst_of_several_is_the_most_severe_and_then_the_lowest() -> None:
    def having(verdict: Verdict, index: int) -> Diagnosis:
        return Diagnosis(decode(index), verdict, "")

    several: Sequence[Diagnosis] = [having(Verdict.IDLE, 0), having(Verdict.STUCK, 2), having(Verdict.STUCK, 1)]
    top = worst(several)
    assert top is not None
    assert (top.verdict, top.subject.index) == (Verdict.STUCK, 1)
    assert worst([]) is None

"""Wrong verdicts that `make queue-sim` showed."""

from dataclasses import replace
from datetime import datetime

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.departures import Departures
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.diagnose.outcomes import OutcomeTrack
from pdpool_operator.diagnose.pools import diagnose
from pdpool_operator.diagnose.standing import Phase, Standing
from pdpool_operator.diagnose.track import RankTrack, follow
from pdpool_operator.diagnose.trials import advance
from pdpool_operator.observe.samples import Tally

from tests.unit.operator.plan.makers import T0, follow_all, make_pod, make_sample, seconds

BOOTSTRAP, INFLIGHT, PREALLOC, TRANSFER = "prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer"
Queues = dict[str, tuple[int, float | None, int | None]]


def subject(
    role: Role, index: int = 0, *, at: float, queues: Queues | None = None, running: int = 0, beat_age_s: float = 0.0
) -> Subject:
    """An instance whose queues were empty one second before T0, and as given since."""
    uid = f"uid-of-chat-{role}-{index}-0"
    empty: Queues = dict.fromkeys(queues or (), (0, None, None))
    looks = [
        make_sample(T0 + seconds(moment), pod_uid=uid, queues=q, running=running, beat_age_s=beat_age_s)
        for moment, q in ((-1, empty), (0, queues), (at, queues))
    ]
    track = follow_all(looks)
    assert track is not None
    return Subject("chat", role, index, make_pod(f"chat-{role}-{index}-0"), leaving=False, tracks=(track,))


def judge(own: Subject, *others: Subject, at: float) -> Diagnosis:
    (diagnosis,) = diagnose([own], others, stuck_after_s=30, now=T0 + seconds(at))
    return diagnosis


def with_track(own: Subject, track: RankTrack) -> Subject:
    return replace(own, tracks=(track,))


@pytest.mark.parametrize("name", [BOOTSTRAP, INFLIGHT])
def test_prefill_that_computes_a_long_prompt_is_saturated(name: str) -> None:
    for at, verdict in ((40.0, Verdict.SATURATED), (299.0, Verdict.SATURATED), (300.0, Verdict.STUCK)):
        own = subject(Role.PREFILL, at=at, queues={name: (2, at, 5)}, running=1)
        assert judge(own, subject(Role.DECODE, at=at), at=at).verdict is verdict


def test_decode_is_saturated_while_prefill_computes() -> None:
    own = subject(Role.DECODE, at=40, queues={TRANSFER: (1, 40.0, 5)})
    busy, idle = (subject(Role.PREFILL, at=40, running=running) for running in (1, 0))
    assert judge(own, busy, at=40).verdict is Verdict.SATURATED
    assert judge(own, idle, at=40).verdict is Verdict.STUCK


def test_decode_has_time_to_show_that_the_long_prompt_arrived() -> None:
    own = subject(Role.DECODE, at=40, queues={TRANSFER: (1, 40.0, 5)})
    prefill = subject(Role.PREFILL, at=38, running=1)
    ended = follow(prefill.tracks[0], make_sample(T0 + seconds(40), pod_uid="uid-of-chat-prefill-0-0", running=0))
    assert judge(own, with_track(prefill, ended), at=40).verdict is Verdict.SATURATED


def test_memory_held_for_a_frozen_prefill_blames_prefill() -> None:
    own = subject(Role.DECODE, at=40, queues={PREALLOC: (3, 40.0, 5), TRANSFER: (8, 45.0, 5)})
    frozen = subject(Role.PREFILL, at=40, beat_age_s=35.0)
    diagnosis = judge(own, frozen, at=40)
    assert (diagnosis.verdict, diagnosis.blames) == (Verdict.BLOCKED, ("chat-prefill-0",))


def test_still_queue_of_a_rank_that_finishes_hand_offs_is_unknown() -> None:
    own = subject(Role.PREFILL, at=40, queues={BOOTSTRAP: (2, 40.0, 5)})
    for done_at, verdict in ((11.0, Verdict.UNKNOWN), (10.0, Verdict.STUCK)):
        ended = OutcomeTrack(Tally(7, 0), ((T0 + seconds(done_at), Tally(7, 0)),))
        flowing = with_track(own, replace(own.tracks[0], ended=ended))
        assert judge(flowing, subject(Role.DECODE, at=40), at=40).verdict is verdict


class TestFailuresAfterSilence:
    """Requests that waited for a frozen decode end at their deadlines, also at an innocent prefill."""

    def phase(self, *decode: Subject, prefill: RankTrack | None = None, departed_at: datetime | None = None) -> Phase:
        now = T0 + seconds(100)
        failing, serving = (
            replace(
                subject(Role.PREFILL, index, at=100),
                routers=(OutcomeTrack(tally, ((now, tally),)),),
                standing=Standing("a" * 32, Phase.SERVING, T0),
            )
            for index, tally in enumerate((Tally(0, 12), Tally(12, 0)))
        )
        failing = replace(failing, tracks=(prefill,)) if prefill is not None else failing
        assert failing.pod is not None
        standings = {s.pod.uid: s.standing for s in (failing, serving) if s.pod and s.standing}
        departures = [Departures(at={"chat-decode-0": departed_at} if departed_at is not None else {})]
        return advance([failing, serving], decode, standings, now, departures)[failing.pod.uid].phase

    def decode(self, *, beat_age_s: float = 0.0) -> Subject:
        own = subject(Role.DECODE, at=100, beat_age_s=beat_age_s)
        return replace(own, standing=Standing("a" * 32, Phase.SERVING, T0))

    def test_healthy_decode_does_not_excuse_prefill(self) -> None:
        assert self.phase(self.decode()) is Phase.OUT
        assert self.phase(self.decode(), departed_at=T0 + seconds(39)) is Phase.OUT

    def test_frozen_decode_excuses_prefill(self) -> None:
        assert self.phase(self.decode(beat_age_s=15.0)) is Phase.SERVING
        assert self.phase(self.decode(beat_age_s=14.9)) is Phase.OUT

    def test_departed_decode_excuses_prefill(self) -> None:
        assert self.phase(self.decode(), departed_at=T0 + seconds(40)) is Phase.SERVING
        assert self.phase(departed_at=T0 + seconds(40)) is Phase.SERVING

    @pytest.mark.parametrize(("gap_s", "phase"), [(15.0, Phase.SERVING), (14.0, Phase.OUT)])
    def test_decode_that_resumed_excuses_prefill_after_a_long_gap(self, gap_s: float, phase: Phase) -> None:
        frozen = self.decode(beat_age_s=gap_s)
        uid = frozen.tracks[0].latest.pod_uid
        thawed = follow(frozen.tracks[0], make_sample(T0 + seconds(100), pod_uid=uid, beat_age_s=0.1))
        assert self.phase(with_track(frozen, thawed)) is phase

    def test_decode_that_answered_lately_and_refuses_excuses_prefill(self) -> None:
        answered = self.decode()
        for at, error, phase in (
            (100, "refused", Phase.SERVING),
            (100, "timeout", Phase.OUT),
            (161, "refused", Phase.OUT),
        ):
            uid = answered.tracks[0].latest.pod_uid
            track = replace(answered.tracks[0], answered_at=T0 + seconds(200 - at))
            ended = follow(track, make_sample(T0 + seconds(100), pod_uid=uid, connector_error=error, running=None))
            assert self.phase(with_track(answered, ended)) is phase

    @pytest.mark.parametrize(
        ("waited_s", "done_at", "running", "phase"),
        [
            pytest.param(15.0, 71, 0, Phase.SERVING, id="overloaded"),
            pytest.param(15.0, 70, 0, Phase.OUT, id="finishes nothing lately"),
            pytest.param(15.0, 0, 1, Phase.SERVING, id="computes a long prompt"),
            pytest.param(15.0, 0, 0, Phase.OUT, id="nothing goes on"),
            pytest.param(14.0, 100, 1, Phase.OUT, id="nothing waits long"),
        ],
    )
    def test_deadlines_of_overload_are_no_failures(
        self, waited_s: float, done_at: float, running: int, phase: Phase
    ) -> None:
        (track,) = subject(Role.PREFILL, at=100, queues={BOOTSTRAP: (2, waited_s, 5)}, running=running).tracks
        recent = ((T0 + seconds(done_at), Tally(1, 0)),) if done_at else ()
        track = replace(track, ended=OutcomeTrack(Tally(1, 0), recent))
        assert self.phase(self.decode(), prefill=track) is phase


@pytest.mark.parametrize(
    ("phase", "failed", "verdict"),
    [(Phase.OUT, 0, Verdict.BLOCKED), (Phase.TRIAL, 0, Verdict.SATURATED), (Phase.TRIAL, 1, Verdict.BLOCKED)],
)
def test_engine_on_trial_is_not_blamed_before_it_fails(phase: Phase, failed: int, verdict: Verdict) -> None:
    own = subject(Role.DECODE, at=40, queues={TRANSFER: (1, 40.0, 5)})
    outcomes = OutcomeTrack(Tally(0, failed), ((T0 + seconds(30), Tally(0, failed)),))
    standing = Standing("a" * 32, phase, T0 + seconds(10), times=1)
    prefill = replace(subject(Role.PREFILL, at=40, running=1), standing=standing, routers=(outcomes,))
    assert judge(own, prefill, at=40).verdict is verdict


@pytest.mark.parametrize(
    ("done", "beat_age_s", "verdict"),
    [(0, 22.0, Verdict.SATURATED), (0, 30.0, Verdict.STUCK), (1, 22.0, Verdict.STUCK), (1, 14.0, Verdict.SATURATED)],
)
def test_new_process_has_time_to_compile(done: int, beat_age_s: float, verdict: Verdict) -> None:
    own = subject(Role.PREFILL, at=40, queues={BOOTSTRAP: (2, 40.0, 5)}, running=1, beat_age_s=beat_age_s)
    own = with_track(own, replace(own.tracks[0], ended=OutcomeTrack(Tally(done, 0))))
    assert judge(own, subject(Role.DECODE, at=40), at=40).verdict is verdict

"""Engines that are paused on request, for example for new weights. Nothing moves in them, and nothing is at fault."""

from dataclasses import replace

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.diagnose.pools import diagnose
from pdpool_operator.diagnose.standing import Phase
from pdpool_operator.diagnose.trials import advance
from pdpool_operator.observe.samples import QueueSample, RankSample, Tally

from tests.unit.operator.plan.makers import T0, follow_all, make_pod, make_sample, seconds

BOOTSTRAP, INFLIGHT, TRANSFER = "prefill_bootstrap", "prefill_inflight", "decode_transfer"
PAUSED_AT = 30
Queues = dict[str, tuple[int, float | None, int | None]]


def look(role: Role, at: float, queues: Queues, *, paused: bool, beat_age_s: float = 0.05) -> RankSample:
    sample = make_sample(T0 + seconds(at), pod_uid=f"uid-of-chat-{role}-0-0", queues=queues, beat_age_s=beat_age_s)
    assert sample.connector is not None
    return replace(sample, connector=replace(sample.connector, paused=paused))


def waits(queue: str, at: float) -> Queues:
    """Two requests that began to wait when the other side's engine, or its own, was paused."""
    return {queue: (2, at - PAUSED_AT, 5) if at > PAUSED_AT else (0, None, 5)}


def subject(role: Role, samples: list[RankSample]) -> Subject:
    track = follow_all(samples)
    assert track is not None
    return Subject("chat", role, 0, make_pod(f"chat-{role}-0-0"), leaving=False, tracks=(track,))


def pair(at: int, *, until: float = 1e9, beat_age_s: float = 0.05) -> tuple[Subject, Subject]:
    """A prefill that is paused from 30 s to `until`, and its decode, both at `at`."""
    looks = [0, *range(PAUSED_AT, at + 1, 3)]
    prefill = [
        look(
            Role.PREFILL,
            m,
            waits(BOOTSTRAP, m),
            paused=PAUSED_AT <= m < until,
            beat_age_s=beat_age_s if PAUSED_AT < m < until else 0.05,
        )
        for m in looks
    ]
    decode = [look(Role.DECODE, m, waits(TRANSFER, m), paused=False) for m in looks]
    return subject(Role.PREFILL, prefill), subject(Role.DECODE, decode)


def judge(own: Subject, other: Subject, at: int) -> Diagnosis:
    (diagnosis,) = diagnose([own], [other], stuck_after_s=30, now=T0 + seconds(at))
    return diagnosis


@pytest.mark.parametrize("at", [63, 90, 600, 3600])
@pytest.mark.parametrize("beat_age_s", [0.05, 300.0])
def test_paused_engine_is_never_at_fault(at: int, beat_age_s: float) -> None:
    """Its loop may also hang, while it loads new weights."""
    prefill, decode = pair(at, beat_age_s=beat_age_s)
    found = judge(prefill, decode, at)
    assert (found.verdict, found.message) == (
        Verdict.UNKNOWN,
        "prefill chat-prefill-0 rank 0: its engine is paused on request",
    )


@pytest.mark.parametrize("at", [63, 90, 600, 3600])
def test_engine_that_waits_for_a_paused_one_is_blocked(at: int) -> None:
    prefill, decode = pair(at)
    found = judge(decode, prefill, at)
    assert (found.verdict, found.blames) == (Verdict.BLOCKED, ("chat-prefill-0",))
    assert found.message.endswith("requests wait for the KV cache; chat-prefill-0 engine is paused on request")


@pytest.mark.parametrize("at", [93, 102, 117])
def test_nobody_is_at_fault_just_after_a_pause(at: int) -> None:
    prefill, decode = pair(at, until=91)
    assert judge(decode, prefill, at).verdict is Verdict.BLOCKED
    found = judge(prefill, decode, at)
    assert found.verdict is Verdict.UNKNOWN
    assert found.message.endswith("its engine was paused until recently")


def test_engine_that_hangs_after_its_pause_is_stuck() -> None:
    prefill, decode = pair(180, until=91)
    assert judge(prefill, decode, 180).verdict is Verdict.STUCK


def test_short_pause_changes_no_verdict() -> None:
    prefill, decode = pair(33)
    assert judge(prefill, decode, 33).verdict is Verdict.FLOWING


def test_paused_engine_has_no_leak() -> None:
    """Transfers end at the connector. The engine notices that when it goes on."""
    looks = []
    for at in range(0, 300, 3):
        sample = look(Role.PREFILL, at, {INFLIGHT: (0, None, 5)}, paused=True)
        assert sample.connector is not None
        shown = {INFLIGHT: QueueSample(3, float(at), 5)}
        looks.append(replace(sample, connector=replace(sample.connector, engine_queues=shown)))
    own = subject(Role.PREFILL, looks)
    assert own.tracks[0].leaked == {}
    assert judge(own, subject(Role.DECODE, [look(Role.DECODE, 297, {}, paused=False)]), 297).verdict is Verdict.UNKNOWN


def test_pause_excuses_failures_of_the_other_side() -> None:
    """Requests that waited for the paused engine ended at their deadlines."""

    def ended(index: int, done: int, failed: int, at: float) -> RankSample:
        sample = make_sample(T0 + seconds(at), pod_uid=f"uid-of-chat-decode-{index}-0")
        assert sample.connector is not None
        return replace(sample, connector=replace(sample.connector, ended=Tally(done, failed)))

    own = []
    for index, (done, failed) in enumerate(((20, 0), (0, 12))):
        track = follow_all([ended(index, 0, 0, 60), ended(index, done, failed, 90)])
        assert track is not None
        name = f"chat-decode-{index}-0"
        own.append(Subject("chat", Role.DECODE, index, make_pod(name), leaving=False, tracks=(track,)))
    uid = "uid-of-chat-decode-1-0"
    works, _ = pair(90, until=PAUSED_AT)
    paused, _ = pair(90)

    def phase(other: Subject) -> Phase:
        before = advance(own, [other], {}, T0 + seconds(60))
        return advance(own, [other], before, T0 + seconds(90))[uid].phase

    assert phase(works) is Phase.OUT
    assert phase(paused) is Phase.SERVING

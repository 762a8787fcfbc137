"""Numbers to scale by: sums over a pool, and their absence while more instances would not help."""

from datetime import timedelta

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.demand import Demand, demand
from pdpool_operator.diagnose.evidence import STALE
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.diagnose.track import RankTrack, follow
from pdpool_operator.observe.samples import ConnectorSample, EngineSample, QueueSample, RankSample

from ..plan.makers import T0, make_pod

WAITS = {"decode_prealloc": QueueSample(3, 7.5, 1), "decode_transfer": QueueSample(0, None, 1)}


def track(
    queues: dict[str, QueueSample] | None = None, engine: EngineSample | None = None, *, native: bool = False
) -> RankTrack:
    connector = ConnectorSample("life", 0.0, queues) if queues is not None else None
    return follow(None, RankSample(0, "uid", T0, T0, connector, engine, has_connector=not native))


def judged(verdict: Verdict, *tracks: RankTrack) -> Diagnosis:
    return Diagnosis(Subject("chat", Role.DECODE, 0, make_pod(), False, tracks), verdict, "why")


def test_queues_of_a_pool_are_summed():
    other = track({"decode_prealloc": QueueSample(2, 9.0, 1)})
    found = demand([judged(Verdict.SATURATED, track(WAITS), other), judged(Verdict.FLOWING, track(WAITS))], T0)
    assert set(found) == {Demand("decode_prealloc", 8, 9.0), Demand("decode_transfer", 0, 0.0)}


@pytest.mark.parametrize("verdict", Verdict)
def test_one_verdict_vetoes_the_whole_pool(verdict: Verdict):
    found = demand([judged(Verdict.SATURATED, track(WAITS)), judged(verdict, track(WAITS))], T0)
    vetoes = {Verdict.STUCK, Verdict.FAILING, Verdict.NOTHING_FINISHES, Verdict.BLOCKED}
    assert (found == ()) is (verdict in vetoes)


def test_sum_without_a_silent_instance_is_no_number():
    seen, silent = judged(Verdict.FLOWING, track(WAITS)), judged(Verdict.UNKNOWN, track())
    assert demand([seen, silent], T0) == ()
    assert demand([seen, judged(Verdict.STARTING, track())], T0) != ()
    assert demand([seen], T0 + STALE + timedelta(seconds=1)) == ()


def test_engine_without_ages_still_has_a_length():
    waits, idle = ({"decode_prealloc": reqs} for reqs in (4, 0))
    for queues, expected in ((waits, Demand("decode_prealloc", 4, None)), (idle, Demand("decode_prealloc", 0, 0.0))):
        native = track(engine=EngineSample(0, 0, queues), native=True)
        assert demand([judged(Verdict.UNKNOWN, native)], T0) == (expected,)


def test_unknown_age_of_one_rank_hides_the_age_of_the_pool():
    tracks = [track(WAITS), track({"decode_prealloc": QueueSample(1, None, 1)})]
    for order in (tracks, tracks[::-1]):
        found = {one.queue: one for one in demand([judged(Verdict.FLOWING, *order)], T0)}
        assert found["decode_prealloc"] == Demand("decode_prealloc", 4, None)

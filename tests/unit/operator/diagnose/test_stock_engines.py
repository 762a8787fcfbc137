"""Verdicts on engines that only stock SGLang's own reports show."""

import json
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose.evidence import waits_of
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.diagnose.pools import diagnose
from pdpool_operator.diagnose.track import PROBE_TOKENS
from pdpool_operator.engines import EngineType
from pdpool_operator.engines.metric_names import SGLANG
from pdpool_operator.observe.engine_metrics import Sieve, joined, parse_metrics
from pdpool_operator.observe.http import Unanswered
from pdpool_operator.observe.pod_reader import parse_loads
from pdpool_operator.observe.samples import RankSample

from tests.stock_sglang import Stock
from tests.unit.operator.plan.makers import T0, follow_all, make_pod, seconds

STUCK_AFTER_S = 30
BOOTSTRAP, INFLIGHT, PREALLOC, TRANSFER = "prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer"

Life = Callable[[int], Stock]
"""What an engine shows at each sample, by the number of the sample."""


def look(stock: Stock, number: int, *, metrics: bool = True, loads: bool = True) -> RankSample:
    """One sample of the engine's own answers, every 3 s."""
    role, at, error = Role(stock.role), T0 + seconds(3 * number), ""
    listed = parse_loads(json.dumps(stock.loads()).encode(), role, EngineType.SGLANG) if loads else {}
    try:
        text = Sieve(SGLANG.all())(stock.metrics().encode()) if metrics else b""
        counted = parse_metrics(text, SGLANG, role)
    except Unanswered as reason:
        counted, error = {}, str(reason) if metrics else "http 404"
    engine = joined(listed, counted, SGLANG).get(0)
    return RankSample(0, f"uid-{role}", at, at, None, engine, "", "" if engine else "http 404", False, error)


def subject(life: Life, numbers: Iterable[int], *, uncounted: Container[int] = (), **answers: bool) -> Subject:
    """The instance after these samples. `/metrics` does not answer at those in `uncounted`."""
    samples = [look(life(number), number, **{"metrics": number not in uncounted} | answers) for number in numbers]
    track = follow_all(samples)
    assert track is not None
    role = Role(life(0).role)
    return Subject("service/x", role, 0, make_pod(f"{role}-0"), leaving=False, tracks=(track,), watched_pod=f"{role}-0")


def judge(
    prefill: Life, decode: Life, samples: int = 15, *, uncounted: Container[int] = (), **answers: bool
) -> dict[str, Diagnosis]:
    """Judge both sides after so many samples, 3 s apart."""
    one, two = (subject(life, range(samples), uncounted=uncounted, **answers) for life in (prefill, decode))
    now = T0 + seconds(3 * (samples - 1))
    pairs = ((one, two), (two, one))
    found = [diagnose([own], [other], stuck_after_s=STUCK_AFTER_S, now=now)[0] for own, other in pairs]
    return {str(diagnosis.subject.role): diagnosis for diagnosis in found}


def still(role: str, **shown: Any) -> Life:
    """An engine that shows the same at every sample."""
    return lambda _: Stock(role, **shown)


def working(role: str, **shown: Any) -> Life:
    """An engine that finishes a request between two samples."""
    return lambda number: Stock(role, tokens=1000 + 400 * number, finished=10 + number, **shown)


def verdicts(found: dict[str, Diagnosis]) -> tuple[Verdict, Verdict]:
    return found["prefill"].verdict, found["decode"].verdict


class TestHealthy:
    def test_empty_engines_are_idle(self):
        assert verdicts(judge(still("prefill"), still("decode"))) == (Verdict.IDLE, Verdict.IDLE)

    def test_engine_with_running_requests_flows(self):
        assert judge(still("prefill"), working("decode", running=5))["decode"].verdict is Verdict.FLOWING

    def test_long_queues_that_move_are_not_stuck(self):
        def prefill(number: int) -> Stock:
            return Stock("prefill", {BOOTSTRAP: 90}, {BOOTSTRAP: 200 + number}, 0, 10**6 + 900 * number, 300 + number)

        def decode(number: int) -> Stock:
            moved = {PREALLOC: 200 + number, TRANSFER: 190 + number}
            return Stock("decode", {PREALLOC: 60, TRANSFER: 20}, moved, 30, 10**5 + 400 * number, 150 + number)

        assert verdicts(judge(prefill, decode, samples=60)) == (Verdict.FLOWING, Verdict.FLOWING)

    def test_queue_that_is_short_of_the_limit_flows(self):
        prefill = still("prefill", queues={BOOTSTRAP: 4})
        assert judge(prefill, working("decode"), samples=10)["prefill"].verdict is Verdict.FLOWING

    def test_prefill_that_computes_a_long_prompt_is_saturated(self):
        def prefill(number: int) -> Stock:
            return Stock("prefill", {BOOTSTRAP: 4}, running=0, tokens=2048 * number)

        found = judge(prefill, working("decode"), samples=30)["prefill"]
        assert (found.verdict, "computes prompts" in found.message) == (Verdict.SATURATED, True)


class TestStuck:
    def test_bootstrap_queue_beside_a_decode_that_works_is_prefills_fault(self):
        found = judge(still("prefill", queues={BOOTSTRAP: 4}), working("decode", running=3))
        assert verdicts(found) == (Verdict.STUCK, Verdict.FLOWING)
        assert "requests wait for bootstrap and nothing moves" in found["prefill"].message

    def test_requests_that_stand_still_on_both_sides_are_decodes_fault(self):
        found = judge(still("prefill", queues={BOOTSTRAP: 4}), still("decode", queues={PREALLOC: 4}))
        assert verdicts(found) == (Verdict.BLOCKED, Verdict.STUCK)
        assert found["prefill"].blames == ("decode-0",)
        assert "for memory or the handshake and nothing moves" in found["decode"].message

    def test_decode_that_runs_requests_without_a_token_is_silent(self):
        found = judge(still("prefill", queues={BOOTSTRAP: 4}), still("decode", running=3), samples=16)
        assert verdicts(found) == (Verdict.BLOCKED, Verdict.STUCK)
        assert found["prefill"].blames == ("decode-0",)
        assert "computes no token while requests run" in found["decode"].message

    def test_transfers_that_stand_still_are_prefills_fault(self):
        found = judge(still("prefill", queues={INFLIGHT: 2}), still("decode", queues={TRANSFER: 2}))
        assert verdicts(found) == (Verdict.STUCK, Verdict.BLOCKED)
        assert found["decode"].blames == ("prefill-0",)

    def test_decode_queue_that_waits_for_a_silent_prefill_pod_is_blocked(self):
        one = subject(still("decode", queues={PREALLOC: 4}), range(15))
        gone = Subject("service/x", Role.PREFILL, 0, make_pod("prefill-0"), leaving=False, tracks=(), watched_pod="p")
        (found,) = diagnose([one], [gone], stuck_after_s=STUCK_AFTER_S, now=T0 + seconds(42))
        assert (found.verdict, found.blames) == (Verdict.BLOCKED, ("p",))

    def test_memory_that_running_requests_hold_is_saturated(self):
        found = judge(still("prefill"), working("decode", queues={PREALLOC: 9}, running=30))
        assert found["decode"].verdict is Verdict.SATURATED

    def test_health_probes_do_not_count_as_movement(self):
        def prefill(number: int) -> Stock:
            return Stock("prefill", {BOOTSTRAP: 4}, {BOOTSTRAP: 210 + number}, 0, 1000 + number * (PROBE_TOKENS // 4))

        assert judge(prefill, working("decode", running=3))["prefill"].verdict is Verdict.STUCK

    def test_counter_that_restarts_begins_anew(self):
        def prefill(number: int) -> Stock:
            new = number >= 10
            return Stock("prefill", {BOOTSTRAP: 4}, {BOOTSTRAP: 1 if new else 210}, 0, 50 if new else 5000)

        assert judge(prefill, working("decode", running=3), samples=15)["prefill"].verdict is Verdict.FLOWING
        assert judge(prefill, working("decode", running=3), samples=21)["prefill"].verdict is Verdict.STUCK


class TestUnknown:
    def test_idle_decode_may_be_hung_so_no_side_is_named(self):
        found = judge(still("prefill", queues={BOOTSTRAP: 4}), still("decode"))
        assert verdicts(found) == (Verdict.UNKNOWN, Verdict.IDLE)
        assert found["prefill"].message.endswith("and nothing moves; nothing shows whether decode-0 runs")

    def test_without_metrics_a_level_is_no_evidence(self):
        found = judge(still("prefill", queues={BOOTSTRAP: 4}), still("decode"), metrics=False)
        assert found["prefill"].verdict is Verdict.UNKNOWN
        assert found["prefill"].message.endswith("nothing shows whether the queue moves (/metrics: http 404)")

    def test_engine_with_neither_report_is_unknown(self):
        found = judge(still("prefill"), still("decode"), metrics=False, loads=False)
        assert verdicts(found) == (Verdict.UNKNOWN, Verdict.UNKNOWN)
        assert "does not report its queues (http 404; /metrics: http 404)" in found["decode"].message

    def test_half_an_answer_leaves_the_queue_unknown(self):
        found = judge(still("prefill", queues={BOOTSTRAP: 4}, left={BOOTSTRAP: None}), working("decode"))
        assert found["prefill"].verdict is Verdict.UNKNOWN

    @pytest.mark.parametrize("absurd", ["NaN", "-3", "+Inf", "1e300"])
    def test_absurd_counter_is_no_movement_and_no_stillness(self, absurd):
        found = judge(still("prefill", queues={BOOTSTRAP: 4}, left={BOOTSTRAP: absurd}), working("decode"))
        assert found["prefill"].verdict is Verdict.UNKNOWN


class TestMetricsHang:
    """`/metrics` stops to answer while `/v1/loads` answers and the engine serves."""

    def test_busy_prefill_is_never_stuck(self):
        def prefill(number: int) -> Stock:
            return Stock("prefill", {BOOTSTRAP: 4}, {BOOTSTRAP: 200 + number}, 0, 900 * number, 300 + number)

        found = []
        for samples in range(11, 60):
            one = subject(prefill, range(samples), uncounted=range(10, 60))
            other = subject(working("decode", running=3), range(samples))
            found += diagnose([one], [other], stuck_after_s=STUCK_AFTER_S, now=T0 + seconds(3 * (samples - 1)))
        assert [one.verdict for one in found] == [Verdict.FLOWING] * 9 + [Verdict.UNKNOWN] * 40
        assert "nothing shows whether the queue moves" in found[-1].message

    def test_decode_that_runs_requests_is_never_silent(self):
        for samples in range(11, 60):
            found = judge(still("prefill"), working("decode", running=5), samples, uncounted=range(10, 60))
            assert verdicts(found) == (Verdict.IDLE, Verdict.FLOWING), samples

    def test_engine_that_stood_still_before_stays_stuck_for_a_while(self):
        prefill, decode = still("prefill", queues={BOOTSTRAP: 4}), working("decode", running=3)
        for samples, verdict in ((16, Verdict.STUCK), (20, Verdict.STUCK), (21, Verdict.UNKNOWN)):
            one, other = subject(prefill, range(samples), uncounted=range(15, 60)), subject(decode, range(samples))
            (found,) = diagnose([one], [other], stuck_after_s=STUCK_AFTER_S, now=T0 + seconds(3 * (samples - 1)))
            assert found.verdict is verdict, samples

    def test_counter_that_was_lost_while_the_queue_was_empty_does_not_count(self):
        def prefill(number: int) -> Stock:
            return Stock("prefill", {BOOTSTRAP: 4 if number > 3 else 0})

        one = subject(prefill, range(6), uncounted=range(2, 9))
        (wait,) = waits_of(one.tracks[0], T0 + seconds(15))
        assert (wait.name, wait.counted) == (BOOTSTRAP, False)

    def test_gap_in_the_answers_counts_once_the_counter_is_read_again(self):
        prefill, decode = still("prefill", queues={BOOTSTRAP: 4}), working("decode", running=3)
        assert judge(prefill, decode, samples=20, uncounted=range(5, 19))["prefill"].verdict is Verdict.STUCK


class TestGauges:
    """Without `/v1/loads`, lengths are gauges that may be old."""

    @pytest.mark.parametrize(("samples", "verdict"), [(20, Verdict.FLOWING), (21, Verdict.STUCK)])
    def test_age_of_a_gauge_is_taken_off_its_stillness(self, samples, verdict):
        prefill, decode = still("prefill", queues={BOOTSTRAP: 4}), working("decode", running=3)
        assert judge(prefill, decode, samples=samples, loads=False)["prefill"].verdict is verdict

    def test_counter_that_is_missing_for_a_while_does_not_restart_the_clock(self):
        def prefill(number: int) -> Stock:
            return Stock("prefill", {BOOTSTRAP: 4}, {BOOTSTRAP: None if 5 <= number < 9 else 210})

        assert judge(prefill, working("decode", running=3))["prefill"].verdict is Verdict.STUCK

    def test_old_gauge_of_running_requests_does_not_make_decode_silent(self):
        def decode(number: int) -> Stock:
            worked = min(number, 20)
            return Stock("decode", running=3, tokens=400 * worked, finished=worked)

        prefill = still("prefill", queues={BOOTSTRAP: 4})
        assert judge(prefill, decode, samples=40, loads=False)["decode"].verdict is Verdict.FLOWING
        assert judge(prefill, decode, samples=41, loads=False)["decode"].verdict is Verdict.STUCK

    def test_frozen_gauge_of_an_engine_that_works_is_not_stuck(self):
        def prefill(number: int) -> Stock:
            return Stock(
                "prefill",
                {BOOTSTRAP: 4, INFLIGHT: 2},
                {BOOTSTRAP: 200 + number, INFLIGHT: 190 + number},
                0,
                900 * number,
                300 + number,
            )

        def decode(number: int) -> Stock:
            moved = {PREALLOC: 200 + number, TRANSFER: 190 + number}
            return Stock("decode", {PREALLOC: 6, TRANSFER: 2}, moved, 3, 400 * number, 150 + number)

        assert verdicts(judge(prefill, decode, samples=200, loads=False)) == (Verdict.FLOWING, Verdict.FLOWING)

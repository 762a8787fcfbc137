"""The scheduler's thread: commands in, futures out, idle without spinning, and what happens when it fails."""

import threading
import time

import pytest
from pdpool_reference import tokenizer as tokenizers
from pdpool_reference import weights
from pdpool_reference.disaggregation import UnifiedSide
from pdpool_reference.kv import PageAllocator, PagedKV
from pdpool_reference.metrics import Counters
from pdpool_reference.model import Model
from pdpool_reference.request import Failure, GenerationRequest, RequestError, SamplingParams
from pdpool_reference.scheduler import IDLE_BEAT_S, Scheduler
from pdpool_reference.scheduler_core import Core, Limits
from prometheus_client import CollectorRegistry

from tests.waiting import until

TOKENIZER = tokenizers.load("tiny")
PAGES = 64
WAIT_S = 20.0


class CountingSide(UnifiedSide):
    beats = 0

    def beat(self, now):
        del now
        self.beats += 1


class Bench:
    def __init__(self, max_queued=8):
        config, loaded = weights.tiny()
        kv = PagedKV(config, PAGES)
        self.model = Model(config, loaded, kv)
        self.crashed = threading.Event()

        def make_core(on_end):
            core = Core(
                pages=PageAllocator(PAGES),
                aux=PageAllocator(4),
                detokenizer=TOKENIZER.stream,
                eos_ids=frozenset(),
                limits=Limits(),
                counters=Counters(CollectorRegistry(), "tiny", "unified"),
                on_end=on_end,
                side=CountingSide,
            )
            self.side = core.side
            return core

        self.scheduler = Scheduler(
            mode="unified",
            model=self.model,
            total_pages=PAGES,
            max_queued=max_queued,
            make_core=make_core,
            on_crash=self.crashed.set,
        )

    def request(self, max_new_tokens=3, watch=lambda _output: None):
        ended, outputs = threading.Event(), []

        def sink(output):
            outputs.append(output)
            watch(output)
            if isinstance(output, Failure) or output.finish is not None:
                ended.set()

        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        request = GenerationRequest("r", (1, 2, 3), params, sink, None, time.monotonic() + 100)
        return request, ended, outputs


@pytest.fixture
def bench():
    made = Bench()
    made.scheduler.start()
    yield made
    made.scheduler.stop()
    assert made.scheduler.join(WAIT_S)


def test_a_submitted_request_runs_and_frees_its_place(bench):
    for _ in range(20):
        request, ended, outputs = bench.request()
        bench.scheduler.submit([request])
        assert ended.wait(WAIT_S)
    assert outputs[-1].finish.reason == "length"
    assert bench.scheduler.open_sequences == 0


def test_answered_sequence_is_counted_nowhere(bench):
    seen = []

    def count_at_the_end(output):
        if output.finish is not None:
            seen.append((bench.scheduler.report.running, bench.scheduler.report.used_tokens))

    for _ in range(3):
        request, ended, _ = bench.request(watch=count_at_the_end)
        bench.scheduler.submit([request])
        assert ended.wait(WAIT_S)
    assert seen == [(0, 0)] * 3


def test_sequences_are_taken_all_or_none(bench):
    bench.scheduler.freeze(True)
    bench.scheduler.submit([bench.request()[0] for _ in range(5)])
    with pytest.raises(RequestError, match="holds 5 sequences; 4 more would exceed 8") as caught:
        bench.scheduler.submit([bench.request()[0] for _ in range(4)])
    assert caught.value.status == 503
    assert bench.scheduler.open_sequences == 5
    bench.scheduler.submit([bench.request()[0] for _ in range(3)])


def test_an_idle_scheduler_beats_and_does_not_spin(bench):
    bench.scheduler.loads().result(WAIT_S)
    begun, before = time.monotonic(), bench.side.beats
    time.sleep(3 * IDLE_BEAT_S)
    until(lambda: bench.side.beats > before + 1)
    assert bench.side.beats - before <= (time.monotonic() - begun) / IDLE_BEAT_S + 2


@pytest.fixture
def long_beat(monkeypatch):
    """An idle scheduler sleeps for longer than a test lasts."""
    monkeypatch.setattr("pdpool_reference.scheduler.IDLE_BEAT_S", 600.0)


def test_a_wake_makes_it_turn_at_once(long_beat, bench):
    bench.scheduler.loads().result(WAIT_S)
    for _ in range(3):  # the first turn may be that of the question
        before = bench.side.beats
        bench.scheduler.wake()
        until(lambda before=before: bench.side.beats > before)


def test_frozen_scheduler_does_not_answer(bench):
    bench.scheduler.freeze(True)
    answer = bench.scheduler.loads()
    with pytest.raises(TimeoutError):
        answer.result(0.3)
    bench.scheduler.freeze(False)
    assert answer.result(WAIT_S).running == 0


def test_cancelled_call_is_not_run(bench):
    bench.scheduler.freeze(True)
    computed = []
    assert bench.scheduler.call(lambda core: computed.append(core)).cancel()
    bench.scheduler.freeze(False)
    bench.scheduler.loads().result(WAIT_S)
    assert computed == []


def test_stop_fails_sequences_of_frozen_scheduler():
    bench = Bench()
    bench.scheduler.start()
    bench.scheduler.freeze(True)
    request, ended, outputs = bench.request()
    bench.scheduler.submit([request])
    bench.scheduler.stop()
    assert bench.scheduler.join(WAIT_S)
    assert ended.is_set()
    assert (outputs[-1].status, outputs[-1].code) == (503, "shutting_down")
    assert not bench.crashed.is_set()
    with pytest.raises(RequestError, match="shutting down"):
        bench.scheduler.submit([bench.request()[0]])


def test_a_crash_fails_every_request_and_is_told(caplog):
    bench = Bench()

    def broken(steps):
        raise ZeroDivisionError("a fault in the model")

    bench.model.forward = broken
    bench.scheduler.start()
    request, ended, outputs = bench.request()
    bench.scheduler.submit([request])
    assert ended.wait(WAIT_S)
    assert (outputs[-1].status, outputs[-1].code) == (500, "engine_crashed")
    assert bench.crashed.wait(WAIT_S)
    assert "a fault in the model" in caplog.text
    with pytest.raises(RequestError):
        bench.scheduler.submit([bench.request()[0]])


class Step:
    """A step of the model that lasts until it is let go."""

    def __init__(self, bench):
        self.begun, self.over = threading.Event(), threading.Event()
        self._forward, bench.model.forward = bench.model.forward, self

    def __call__(self, steps):
        self.begun.set()
        assert self.over.wait(WAIT_S)
        return self._forward(steps)


def test_stop_fails_sequences_during_a_step():
    bench = Bench()
    step = Step(bench)
    bench.scheduler.start()
    asked = [bench.request() for _ in range(2)]
    bench.scheduler.submit([asked[0][0]])
    assert step.begun.wait(WAIT_S)
    bench.scheduler.submit([asked[1][0]])
    bench.scheduler.stop()
    assert [outputs[-1].code for _, _, outputs in asked] == ["shutting_down"] * 2
    step.over.set()
    assert bench.scheduler.join(WAIT_S)
    assert bench.scheduler.open_sequences == 0


def test_step_aborted_by_stop_is_no_crash(caplog):
    bench = Bench()
    step = Step(bench)
    bench.scheduler.start()
    request, _, outputs = bench.request()
    bench.scheduler.submit([request])
    assert step.begun.wait(WAIT_S)
    step._forward = None  # what raises when the step goes on
    bench.scheduler.stop()
    step.over.set()
    assert bench.scheduler.join(WAIT_S)
    assert not bench.crashed.is_set()
    assert {output.code for output in outputs} == {"shutting_down"}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def raising(*_args):
    raise ZeroDivisionError("a rank is gone")


@pytest.mark.parametrize("member", ["enter", "abandon"])
def test_crash_fails_every_client(member):
    bench = Bench()
    setattr(bench.side, member, raising)
    bench.scheduler.freeze(True)
    bench.scheduler.start()
    asked = [bench.request() for _ in range(3)]
    bench.scheduler.submit([request for request, _, _ in asked])
    bench.scheduler.crash(RuntimeError("a rank is gone"))
    bench.scheduler.freeze(False)
    assert bench.crashed.wait(WAIT_S)
    assert [(outputs[0].status, outputs[0].code) for _, _, outputs in asked] == [(500, "engine_crashed")] * 3


def test_crash_ends_idle_engine_at_once(long_beat):
    bench = Bench()
    bench.scheduler.start()
    bench.scheduler.loads().result(WAIT_S)
    bench.scheduler.crash(RuntimeError("a rank is gone"))
    assert bench.crashed.wait(WAIT_S)

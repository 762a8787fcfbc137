"""Admission by pages, continuous batching and ends, turn by turn, over the tiny model."""

import numpy as np
import pytest
from pdpool_reference import tokenizer as tokenizers
from pdpool_reference import weights
from pdpool_reference.disaggregation import UnifiedSide
from pdpool_reference.kv import PAGE_TOKENS, PageAllocator, PagedKV
from pdpool_reference.metrics import Counters
from pdpool_reference.model import Model
from pdpool_reference.request import Failure, Finish, GenerationRequest, SamplingParams, Tokens
from pdpool_reference.scheduler_batch import admit, compute
from pdpool_reference.scheduler_core import Core, Limits
from pdpool_reference.scheduler_queues import State
from prometheus_client import CollectorRegistry

TOKENIZER = tokenizers.load("tiny")


class Bench:
    """A core with the tiny model. The test runs its turns and sets its clock."""

    def __init__(self, pages=64, **limits):
        config, loaded = weights.tiny()
        kv = PagedKV(config, pages)
        self.model = Model(config, loaded, kv)
        self.now = 1000.0
        self.ended = 0
        self.pages = PageAllocator(pages)
        self.core = Core(
            pages=self.pages,
            aux=PageAllocator(kv.memory.aux_rows),
            detokenizer=TOKENIZER.stream,
            eos_ids=frozenset(config.eos_ids),
            limits=Limits(**limits),
            counters=Counters(CollectorRegistry(), "tiny", "unified"),
            on_end=self._count_end,
            side=UnifiedSide,
        )

    def _count_end(self, _request):
        self.ended += 1

    def ask(self, prompt, *, rid="r", deadline=2000.0, **sampling):
        """Submit a request. Returns the list that its outputs go to."""
        outputs = []
        params = SamplingParams(**{"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True, **sampling})
        tokens = tuple(TOKENIZER.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        request = GenerationRequest(rid, tokens, params, outputs.append, None, deadline)
        self.core.submit(request, self.now)
        return request, outputs

    def turn(self):
        self.core.advance(self.now)
        admit(self.core, self.now)
        return compute(self.core, self.model, self.now)

    def run(self):
        turns = 0
        while self.turn():
            turns += 1
            assert turns < 5000
        return turns

    def counts(self):
        return {state: self.core.queues.count(state) for state in State if self.core.queues.count(state)}


def ids(outputs):
    return [token for output in outputs if isinstance(output, Tokens) for token in output.ids]


def alone(prompt, **sampling):
    bench = Bench(pages=512)
    _, outputs = bench.ask(prompt, **sampling)
    bench.run()
    return ids(outputs)


def test_request_runs_to_length_and_frees_all():
    bench = Bench()
    _, outputs = bench.ask("hello", max_new_tokens=5)
    assert bench.run() == 5, "one turn for the prompt and the first token, one for each other token"
    assert len(ids(outputs)) == 5
    assert outputs[-1].finish == Finish("length")
    assert bench.counts() == {}
    assert bench.pages.available == 64
    assert bench.ended == 1


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48, 100])
def test_tokens_do_not_depend_on_chunks_or_company(length):
    prompt = [(7 * i) % 256 for i in range(length)]
    bench = Bench(pages=512, chunk_tokens=16)
    mine = bench.ask(prompt, max_new_tokens=6)[1]
    others = [bench.ask([(11 * i + k) % 256 for i in range(5 + 9 * k)], max_new_tokens=3 + k)[1] for k in range(5)]
    bench.run()
    assert ids(mine) == alone(prompt, max_new_tokens=6)
    assert all(len(ids(other)) == 3 + k for k, other in enumerate(others))


def test_admission_is_in_order_of_arrival():
    bench = Bench(pages=4)
    big = bench.ask("x" * 40, max_new_tokens=9)[1]
    second = bench.ask("y" * 40, max_new_tokens=9)[1]
    small = bench.ask("z", max_new_tokens=1)[1]
    bench.turn()
    assert bench.counts() == {State.WAITING: 2, State.RUNNING: 1}
    bench.run()
    assert [len(ids(outputs)) for outputs in (big, second, small)] == [9, 9, 1]
    assert bench.pages.available == 4


def test_pages_cover_exactly_prompt_and_answer():
    bench = Bench(pages=3)
    _, outputs = bench.ask("x" * PAGE_TOKENS, max_new_tokens=2 * PAGE_TOKENS + 1)
    bench.turn()
    assert bench.pages.available == 0
    bench.run()
    assert len(ids(outputs)) == 2 * PAGE_TOKENS + 1


def test_running_request_continues_beside_long_prompt():
    bench = Bench(pages=512, chunk_tokens=32)
    running = bench.ask("abc", max_new_tokens=50)[1]
    bench.turn()
    bench.ask("x" * 320, max_new_tokens=1)
    for turn in range(8):
        bench.turn()
        assert len(ids(running)) == 2 + turn
    assert bench.counts()[State.COMPUTING] == 1


def test_no_more_run_at_a_time_than_allowed():
    bench = Bench(max_running=2)
    for _ in range(5):
        bench.ask("abc", max_new_tokens=3)
    bench.turn()
    assert bench.counts() == {State.RUNNING: 2, State.WAITING: 3}


def test_the_end_token_ends_an_answer_unless_ignored():
    tokens = alone("hello", max_new_tokens=8)
    bench = Bench()
    bench.core.eos_ids = frozenset(tokens[3:4])
    _, outputs = bench.ask("hello", max_new_tokens=8, ignore_eos=False)
    bench.run()
    assert ids(outputs) == tokens[: tokens.index(tokens[3]) + 1]
    assert outputs[-1].finish == Finish("stop", tokens[3])


def test_stop_tokens_end_an_answer():
    tokens = alone("hello", max_new_tokens=8)
    bench = Bench()
    _, outputs = bench.ask("hello", max_new_tokens=8, stop_token_ids=frozenset(tokens[2:3]))
    bench.run()
    assert outputs[-1].finish == Finish("stop", tokens[2])


def test_abort_in_any_queue_frees_pages():
    bench = Bench(pages=4)
    running, one = bench.ask("x" * 40, max_new_tokens=9)
    waiting, two = bench.ask("y" * 40, max_new_tokens=9)
    bench.turn()
    bench.core.abort(waiting, bench.now)
    bench.core.abort(running, bench.now)
    assert one[-1].finish == two[-1].finish == Finish("abort")
    assert bench.pages.available == 4
    bench.core.abort(running, bench.now)
    assert bench.ended == 2, "a second abort changes nothing"


def test_aborts_by_id_match_it_exactly():
    bench = Bench()
    for rid in ("req-1", "req-10", "req-1"):
        bench.ask("abc", rid=rid)
    assert bench.core.abort_rid("req-1", bench.now) == 2
    assert bench.core.abort_rid("req", bench.now) == 0
    assert bench.core.abort_rid(None, bench.now) == 1


def test_overdue_request_fails_and_names_its_queue():
    bench = Bench(pages=4)
    bench.ask("x" * 40, max_new_tokens=9)
    _, late = bench.ask("y" * 40, max_new_tokens=9, deadline=1010.0)
    bench.turn()
    bench.now = 1010.0
    bench.core.advance(bench.now)
    assert isinstance(late[-1], Failure)
    assert late[-1].status == 504
    assert "waiting" in late[-1].message


def test_request_with_a_token_has_no_deadline():
    bench = Bench()
    _, outputs = bench.ask("abc", max_new_tokens=6, deadline=1010.0)
    bench.turn()
    bench.now = 5000.0
    bench.run()
    assert outputs[-1].finish == Finish("length")


def test_leaked_request_keeps_queue_and_pages():
    bench = Bench()
    bench.core.leak_next = True
    _, outputs = bench.ask("abc")
    bench.run()
    assert outputs[-1].finish == Finish("length"), "the client is served"
    assert bench.counts() == {State.RUNNING: 1}
    assert bench.pages.available < 64
    bench.core.purge_leaked(bench.now)
    assert bench.counts() == {}
    assert bench.pages.available == 64


def test_queues_know_their_oldest_and_how_many_left():
    bench = Bench(pages=4)
    bench.ask("x" * 40, max_new_tokens=9)
    bench.now = 1001.0
    bench.ask("y" * 40, max_new_tokens=9)
    bench.turn()
    queues = bench.core.queues
    assert queues.oldest_since(State.WAITING) == 1001.0
    assert queues.oldest_since(State.INFLIGHT) is None
    assert queues.moved_total(State.WAITING) == 1
    bench.run()
    assert queues.moved_total(State.WAITING) == 2


def test_choice_depends_on_seed_and_position():
    together = Bench(pages=512)
    drawn = [together.ask("abc", temperature=1.0, seed=5, max_new_tokens=8)[1] for _ in range(3)]
    together.run()
    assert len({tuple(ids(outputs)) for outputs in drawn}) == 1
    assert ids(drawn[0]) == alone("abc", temperature=1.0, seed=5, max_new_tokens=8)
    assert ids(drawn[0]) != alone("abc", temperature=1.0, seed=6, max_new_tokens=8)


def test_page_ids_are_never_shared():
    bench = Bench(pages=64)
    for k in range(6):
        bench.ask("x" * (10 + k), max_new_tokens=9)
    bench.turn()
    pages = np.concatenate([seq.pages for seq in bench.core.queues.of(State.RUNNING)])
    assert len(set(pages.tolist())) == len(pages)

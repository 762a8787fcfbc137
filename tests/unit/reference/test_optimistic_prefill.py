"""Prompts that prefill computes before decode has come for them: a gain if it comes, nothing but compute if not."""

from pdpool_connector import Cause, Phase, TransferStatus
from pdpool_reference.disaggregation import PrefillSide
from pdpool_reference.request import Finish
from pdpool_reference.scheduler_queues import State

from tests.unit.reference.scripted import DONE, READY, Bench, failed


def sends(transfer):
    return [(start, len(pages), last) for start, pages, last, _ in transfer.sends]


def run_dry(bench):
    while bench.turn():
        pass


def plain_answer(tokens):
    bench = Bench(PrefillSide)
    asked = bench.ask(tokens)
    bench.connector.transfers[0].status = READY
    run_dry(bench)
    bench.connector.transfers[0].status = DONE
    bench.turn()
    return asked.outputs[-1].ids


def test_a_prompt_computed_ahead_is_sent_as_a_whole_when_decode_comes():
    bench = Bench(PrefillSide, chunk_tokens=32, max_ahead=1)
    asked = bench.ask(70)
    run_dry(bench)
    transfer = bench.connector.transfers[0]
    assert (bench.counts(), transfer.sends) == ({State.AHEAD: 1}, []), "nothing is said before decode is there"
    transfer.status = READY
    assert not bench.turn(), "nothing is left to compute"
    assert sends(transfer) == [(0, 5, True)]
    assert bench.counts() == {State.INFLIGHT: 1}
    transfer.status = DONE
    bench.turn()
    assert asked.outputs[-1].ids == plain_answer(70)
    assert asked.outputs[-1].finish == Finish("length")
    assert (bench.pages.available, bench.aux.available) == (64, 4)


def test_decode_that_comes_half_way_gets_what_is_there_at_once_and_the_rest_by_chunks():
    bench = Bench(PrefillSide, chunk_tokens=32, max_ahead=1)
    bench.ask(70)
    bench.turn()
    transfer = bench.connector.transfers[0]
    transfer.status = READY
    run_dry(bench)
    assert sends(transfer) == [(0, 2, False), (2, 2, False), (4, 1, True)]


def test_no_more_prompts_are_computed_ahead_than_is_allowed_and_by_default_none():
    for max_ahead in (0, 2):
        bench = Bench(PrefillSide, max_ahead=max_ahead)
        for _ in range(4):
            bench.ask(20)
        run_dry(bench)
        assert bench.counts().get(State.AHEAD, 0) == max_ahead
        assert bench.pages.available == 64 - 2 * max_ahead


def test_a_prompt_that_decode_waits_for_goes_before_those_computed_ahead():
    bench = Bench(PrefillSide, chunk_tokens=32, max_ahead=1)
    bench.ask(64)
    bench.turn()
    bench.ask(64)
    early, awaited = bench.connector.transfers
    awaited.status = READY
    bench.turn()
    bench.turn()
    assert sends(awaited) == [(0, 2, False), (2, 2, True)]
    assert (bench.metric("prompt_tokens_total"), early.sends) == (32 + 64, [])


def test_a_prompt_that_decode_waits_for_takes_the_pages_of_one_computed_ahead_which_starts_over():
    bench = Bench(PrefillSide, pages=4, max_ahead=2)
    first = bench.ask(40)
    run_dry(bench)
    assert (bench.counts(), bench.pages.available) == ({State.AHEAD: 1}, 1)
    bench.ask(40)
    early, awaited = bench.connector.transfers
    awaited.status = READY
    run_dry(bench)
    assert sends(awaited) == [(0, 3, True)]
    assert bench.counts() == {State.BOOTSTRAP: 1, State.INFLIGHT: 1}
    assert bench.metric("num_prefill_retries_total") == 1
    awaited.status = DONE
    run_dry(bench)
    early.status = READY
    run_dry(bench)
    early.status = DONE
    bench.turn()
    assert first.outputs[-1].ids == plain_answer(40)
    assert (bench.pages.available, bench.aux.available) == (4, 4)


def test_no_prompt_computed_ahead_goes_where_that_would_not_do_and_no_more_than_must():
    bench = Bench(PrefillSide, pages=10, max_ahead=4)
    for tokens in (64, 32):
        bench.ask(tokens)
    run_dry(bench)
    bench.ask(80)
    bench.connector.transfers[2].status = READY
    run_dry(bench)
    assert (bench.counts()[State.AHEAD], bench.metric("num_prefill_retries_total")) == (1, 1), "the four pages stay"
    bench.ask(128)
    bench.connector.transfers[3].status = READY
    run_dry(bench)
    assert bench.counts()[State.AHEAD] == 1, "eight pages are not to be had while five are being sent"


def test_a_long_prompt_without_room_does_not_hold_up_short_ones_behind_it():
    bench = Bench(PrefillSide, pages=4, max_ahead=2)
    for tokens in (33, 33, 16):
        bench.ask(tokens)
    run_dry(bench)
    assert (bench.counts()[State.AHEAD], bench.pages.available) == (2, 0)


def test_prompts_computed_ahead_take_no_place_among_those_that_run():
    bench = Bench(PrefillSide, max_running=1, max_ahead=1)
    bench.ask(40)
    run_dry(bench)
    bench.ask(40)
    bench.connector.transfers[1].status = READY
    run_dry(bench)
    assert sends(bench.connector.transfers[1]) == [(0, 3, True)]


def test_a_decode_that_never_comes_costs_prefill_no_page():
    ends = (
        lambda bench, asked: bench.core.abort(asked.request, bench.now),
        lambda bench, _: setattr(bench.connector.transfers[0], "status", failed(Cause.TIMED_OUT, releasable=True)),
        lambda bench, _: setattr(bench, "now", bench.now + 100),
    )
    for end in ends:
        bench = Bench(PrefillSide, max_ahead=1)
        asked = bench.ask(40)
        run_dry(bench)
        end(bench, asked)
        bench.turn()
        bench.connector.transfers[0].status = TransferStatus(Phase.FAILED, Cause.ABORTED, releasable=True)
        bench.turn()
        assert bench.counts() == {}
        assert (bench.pages.available, bench.aux.available) == (64, 4)
        assert bench.core.side._first_token == {}

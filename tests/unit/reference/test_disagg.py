"""The scheduler's side of a hand-off turn by turn, with transfers whose status the test sets."""

import pytest
from pdpool_connector import Cause, Phase, TransferStatus
from pdpool_connector.protocol.http_errors import ANSWERS
from pdpool_reference.disaggregation import DecodeSide, PrefillSide
from pdpool_reference.kv import AuxRow
from pdpool_reference.request import Finish, SamplingParams, prompt_of
from pdpool_reference.scheduler_queues import State

from tests.unit.reference.scripted import DONE, READY, Bench, failed

# ---------------------------------------------------------------------- prefill


def test_prefill_computes_nothing_before_decode_offers():
    bench = Bench(PrefillSide)
    bench.ask(40)
    assert not bench.turn()
    assert bench.counts() == {State.BOOTSTRAP: 1}
    assert bench.pages.available == 64


def test_prefill_sends_whole_pages_chunk_by_chunk():
    bench = Bench(PrefillSide, chunk_tokens=32)
    asked = bench.ask(70)
    transfer = bench.connector.transfers[0]
    transfer.status = READY
    while bench.turn():
        pass
    starts = [(start, len(pages), last) for start, pages, last, _ in transfer.sends]
    assert starts == [(0, 2, False), (2, 2, False), (4, 1, True)]
    slot = transfer.sends[-1][3]
    row = bench.kv.read_aux(slot)
    assert row.prompt_tokens == 70
    assert bench.counts() == {State.INFLIGHT: 1}
    assert asked.outputs == [], "nothing is answered before all has arrived"
    transfer.status = DONE
    bench.turn()
    assert asked.outputs[-1].ids == (row.first_token,)
    assert asked.outputs[-1].finish == Finish("length")
    assert (bench.pages.available, bench.aux.available) == (64, 4)
    assert transfer.aborts == [], "what has ended is not aborted"


def test_chunk_that_shares_a_turn_ends_at_page():
    bench = Bench(PrefillSide, chunk_tokens=32)
    bench.ask(20)
    bench.ask(100)
    for transfer in bench.connector.transfers:
        transfer.status = READY
    while bench.turn():
        pass
    sends = [(start, len(pages)) for start, pages, _, _ in bench.connector.transfers[1].sends]
    assert sends == [(0, 2), (2, 2), (4, 2), (6, 1)]


def test_pages_of_failed_request_wait_for_release():
    bench = Bench(PrefillSide)
    asked = bench.ask(40)
    transfer = bench.connector.transfers[0]
    transfer.status = READY
    bench.turn()
    transfer.status = failed(Cause.PEER_LOST, releasable=False)
    bench.turn()
    assert asked.outputs[-1].status == 502
    assert bench.counts() == {}
    assert len(bench.core.held) == 1
    assert (bench.pages.available, bench.aux.available) == (61, 3)
    assert bench.core.used_pages() == 3
    transfer.status = failed(Cause.PEER_LOST, releasable=True)
    bench.turn()
    assert bench.core.held == []
    assert (bench.pages.available, bench.aux.available) == (64, 4)


@pytest.mark.parametrize("state", [State.BOOTSTRAP, State.WAITING, State.INFLIGHT])
def test_abort_reaches_connector_from_every_queue(state):
    bench = Bench(PrefillSide, max_running=0 if state is State.WAITING else 8)
    asked = bench.ask(40)
    transfer = bench.connector.transfers[0]
    if state is not State.BOOTSTRAP:
        transfer.status = READY
    bench.turn()
    bench.turn()
    assert bench.counts() == {state: 1}
    bench.core.abort(asked.request, bench.now)
    assert len(transfer.aborts) == 1
    assert asked.outputs[-1].finish == Finish("abort")
    transfer.status = failed(Cause.ABORTED, releasable=True)
    bench.turn()
    assert bench.pages.available == 64


@pytest.mark.parametrize("side", [PrefillSide, DecodeSide])
def test_failures_before_and_after_match_count_apart(side):
    bench = Bench(side)
    bench.ask(8)
    bench.turn()
    bench.connector.transfers[0].status = failed(Cause.TIMED_OUT, releasable=True)
    bench.turn()
    assert bench.metric("num_bootstrap_failed_reqs_total") == 1
    assert bench.metric("num_transfer_failed_reqs_total") == 0
    bench.ask(8)
    bench.turn()
    bench.connector.transfers[1].status = TransferStatus(Phase.TRANSFERRING)
    bench.turn()
    bench.connector.transfers[1].status = failed(Cause.TRANSFER_FAILED, releasable=True)
    bench.turn()
    assert bench.metric("num_transfer_failed_reqs_total") == 1


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_a_status_and_message(cause):
    bench = Bench(PrefillSide)
    asked = bench.ask(8)
    bench.connector.transfers[0].status = failed(cause, releasable=True)
    bench.turn()
    failure = asked.outputs[-1]
    assert (failure.status, failure.code) == ANSWERS[cause]
    assert failure.status >= 400
    assert "because" in failure.message


# ---------------------------------------------------------------------- decode


def land(bench, number, first_token, prompt_tokens):
    transfer = bench.connector.transfers[number]
    bench.kv.write_aux(transfer.aux_slot, AuxRow(first_token, prompt_tokens))
    transfer.status = DONE


def test_decode_offers_prompt_pages_and_runs():
    bench = Bench(DecodeSide)
    asked = bench.ask(33, max_new_tokens=3)
    bench.turn()
    assert bench.counts() == {State.TRANSFER: 1}
    transfer = bench.connector.transfers[0]
    assert len(transfer.pages) == 3
    land(bench, 0, first_token=65, prompt_tokens=33)
    while bench.turn():
        pass
    assert asked.outputs[0].ids == (65,)
    assert sum(len(output.ids) for output in asked.outputs) == 3
    assert (bench.pages.available, bench.aux.available) == (64, 4)


def test_decode_waits_in_prealloc_while_pages_are_short():
    bench = Bench(DecodeSide, pages=4)
    bench.ask(40, max_new_tokens=9)
    bench.ask(40, max_new_tokens=9)
    bench.now += 2
    bench.turn()
    assert bench.counts() == {State.TRANSFER: 1, State.PREALLOC: 1}
    assert bench.connector.queues == {"decode_prealloc": (1, 2.0, 1), "decode_transfer": (1, 0.0, 0)}
    land(bench, 0, 65, 40)
    while bench.turn():
        pass
    bench.turn()
    assert bench.counts() == {State.TRANSFER: 1}
    assert bench.connector.queues["decode_prealloc"] == (0, None, 2)


def test_cache_of_another_prompt_is_refused():
    bench = Bench(DecodeSide)
    asked = bench.ask(33, max_new_tokens=3)
    bench.turn()
    land(bench, 0, 65, prompt_tokens=34)
    bench.turn()
    assert (asked.outputs[-1].status, asked.outputs[-1].code) == ANSWERS[Cause.INVALID]
    assert bench.pages.available == 64


def test_row_of_former_owner_is_refused():
    bench = Bench(DecodeSide)
    for slot in range(4):
        bench.kv.write_aux(slot, AuxRow(65, 33))
    asked = bench.ask(33, max_new_tokens=3)
    bench.turn()
    bench.connector.transfers[0].status = DONE
    bench.turn()
    assert asked.outputs[-1].code == "handoff_invalid"


def test_pages_in_flight_are_not_reused():
    bench = Bench(DecodeSide, pages=4)
    first = bench.ask(40, max_new_tokens=9)
    bench.turn()
    bench.core.abort(first.request, bench.now)
    transfer = bench.connector.transfers[0]
    transfer.status = failed(Cause.ABORTED, releasable=False)
    bench.ask(40, max_new_tokens=9)
    bench.turn()
    assert bench.counts() == {State.PREALLOC: 1}
    transfer.status = failed(Cause.ABORTED, releasable=True)
    bench.turn()
    assert bench.counts() == {State.TRANSFER: 1}


def test_overdue_request_fails_and_holds_its_pages():
    bench = Bench(DecodeSide)
    asked = bench.ask(33, max_new_tokens=3)
    bench.turn()
    bench.now += 100
    bench.turn()
    assert asked.outputs[-1].status == 504
    assert len(bench.connector.transfers[0].aborts) == 1
    assert bench.pages.available < 64


def test_request_that_fails_in_prealloc_ends_without_pages():
    bench = Bench(DecodeSide, pages=1)
    blocked, failing = bench.ask(40), bench.ask(40)
    bench.turn()
    bench.connector.transfers[1].status = failed(Cause.PEER_ABORTED, releasable=True)
    bench.turn()
    assert blocked.outputs == []
    assert (failing.outputs[-1].status, failing.outputs[-1].code) == ANSWERS[Cause.PEER_ABORTED]
    assert bench.counts() == {State.PREALLOC: 1}
    assert bench.core.held == []
    assert bench.metric("num_bootstrap_failed_reqs_total") == 1


def test_client_that_leaves_prealloc_ends_hand_off():
    bench = Bench(DecodeSide, pages=1)
    asked = bench.ask(40)
    bench.turn()
    bench.core.abort(asked.request, bench.now)
    assert bench.connector.transfers[0].aborts == [("the request ended: abort", Cause.ABORTED)]
    assert bench.connector.transfers[0].pages is None
    assert bench.core.held == []


def test_prompt_digest_covers_how_first_token_is_drawn():
    greedy, warm = (SamplingParams(max_new_tokens=1, temperature=heat) for heat in (0.0, 1.0))
    assert prompt_of((1, 2), greedy) == prompt_of((1, 2), SamplingParams(max_new_tokens=9, temperature=0.0))
    assert len({prompt_of((1, 2), greedy), prompt_of((1, 2), warm), prompt_of((1, 3), greedy)}) == 3

"""A hand-off of several ranks, with a connector and ranks whose statuses the test sets."""

import numpy as np
import pytest
from pdpool_connector import Cause, Phase, TransferStatus
from pdpool_reference.kv import AuxRow
from pdpool_reference.rank_handoffs import RankedDecode, RankedPrefill, together
from pdpool_reference.rank_orders import Abort, Changed, Drain, Offer, Open, Send

from tests.unit.reference.scripted import DONE, READY, WAITING, ScriptedDecode, ScriptedPrefill, failed

PAGES = np.array([3, 1], np.int32)


class ScriptedConnector:
    def __init__(self, kind):
        self.kind, self.opened, self.transfers, self.draining, self.beats = kind, [], [], False, 0

    def open(self, *where, prompt, deadline_s, traceparent=None):
        self.opened.append((where, prompt, deadline_s, traceparent))
        self.transfers.append(self.kind())
        return self.transfers[-1]

    def beat(self):
        self.beats += 1


class ScriptedRanks:
    """Records the orders to ranks 1 and 2."""

    numbers = (1, 2)

    def __init__(self):
        self.orders = []

    def order_all(self, order):
        self.orders.append(order)


class RowKV:
    def read_aux(self, slot):
        return AuxRow(first_token=slot, prompt_tokens=9)


@pytest.fixture
def wakes():
    return []


def ranked(side, kind, wakes):
    connector, ranks = ScriptedConnector(kind), ScriptedRanks()
    made = side(connector, ranks, RowKV(), lambda: wakes.append(None))
    return made, connector, ranks


@pytest.fixture
def prefill(wakes):
    return ranked(RankedPrefill, ScriptedPrefill, wakes)


@pytest.fixture
def decode(wakes):
    return ranked(RankedDecode, ScriptedDecode, wakes)


def report(ranks, status, *numbers, handle=1):
    for number in numbers:
        ranks.on_change(number, Changed(handle, status))


def test_prefill_opens_and_sends_at_every_rank(prefill):
    made, connector, ranks = prefill
    transfer = made.open(7, "rid", prompt=b"p", deadline_s=9.0, traceparent="00")
    transfer.send(PAGES, start=2, last=False)
    transfer.send(PAGES, start=4, last=True, aux_slot=5)
    assert connector.opened == [((7, "rid"), b"p", 9.0, "00")]
    assert ranks.orders[0] == Open(1, None, 7, "rid", b"p", 9.0)
    first, second = ranks.orders[1:]
    assert isinstance(first, Send)
    assert (first.start, first.last, first.aux) == (2, False, None)
    assert (second.start, second.last, second.aux_slot, second.aux) == (4, True, 5, AuxRow(5, 9))
    assert connector.transfers[0].sends == [(2, [3, 1], False, None), (4, [3, 1], True, 5)]


def test_decode_opens_and_offers_at_every_rank(decode):
    made, connector, ranks = decode
    transfer = made.open("h:1", 7, "rid", prompt=b"p", deadline_s=9.0)
    transfer.offer(PAGES, aux_slot=5)
    assert connector.opened == [(("h:1", 7, "rid"), b"p", 9.0, None)]
    assert ranks.orders[0] == Open(1, "h:1", 7, "rid", b"p", 9.0)
    assert isinstance(ranks.orders[1], Offer)
    assert (connector.transfers[0].pages, connector.transfers[0].aux_slot) == ([3, 1], 5)


def test_status_waits_for_the_last_rank(decode, wakes):
    made, connector, ranks = decode
    transfer = made.open("h:1", 7, "rid", prompt=b"", deadline_s=9.0)
    connector.transfers[0].status = DONE
    report(ranks, DONE, 1)
    assert transfer.status.phase is Phase.WAITING
    assert not transfer.status.releasable
    report(ranks, DONE, 2)
    assert transfer.status == TransferStatus(Phase.DONE, releasable=True)
    assert len(wakes) == 2


def test_failure_of_one_rank_aborts_all_ranks_once(prefill):
    made, connector, ranks = prefill
    transfer = made.open(7, "rid", prompt=b"", deadline_s=9.0)
    report(ranks, failed(Cause.TRANSFER_FAILED, releasable=True), 2)
    made.beat()
    made.beat()
    assert transfer.status.message == "rank 2: because"
    assert connector.transfers[0].aborts == [("rank 2: because", Cause.ABORTED)]
    assert [order for order in ranks.orders if isinstance(order, Abort)] == [Abort(1, "rank 2: because", Cause.ABORTED)]


def test_refusal_reaches_every_rank_with_its_cause(decode):
    made, connector, ranks = decode
    made.open("h:1", 7, "rid", prompt=b"", deadline_s=9.0).abort("too long", Cause.TOO_LONG)
    assert connector.transfers[0].aborts == [("too long", Cause.TOO_LONG)]
    assert ranks.orders[1:] == [Abort(1, "too long", Cause.TOO_LONG)]


def test_hand_off_released_by_all_ranks_is_forgotten(decode, wakes):
    made, connector, ranks = decode
    made.open("h:1", 7, "rid", prompt=b"", deadline_s=9.0)
    connector.transfers[0].status = failed(Cause.PEER_LOST, releasable=True)
    report(ranks, failed(Cause.PEER_LOST, releasable=False), 1)
    report(ranks, failed(Cause.PEER_LOST, releasable=True), 2)
    made.beat()
    report(ranks, failed(Cause.PEER_LOST, releasable=True), 1)
    assert len(wakes) == 3
    made.beat()
    report(ranks, READY, 1)
    assert len(wakes) == 3


def test_drain_of_rank_zero_drains_the_others_once(prefill):
    made, connector, ranks = prefill
    made.beat()
    connector.draining = True
    made.beat()
    made.beat()
    assert ranks.orders == [Drain()]
    assert connector.beats == 3


def test_bytes_of_all_ranks_add_up():
    statuses = [
        TransferStatus(Phase.TRANSFERRING, bytes_moved=3, prefix_pages=2),
        TransferStatus(Phase.READY, bytes_moved=4, prefix_pages=1),
        WAITING,
    ]
    assert together(statuses[:2]) == TransferStatus(Phase.READY, bytes_moved=7, prefix_pages=1)
    assert together(statuses).phase is Phase.WAITING

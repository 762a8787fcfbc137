"""How a rank reports the hand-offs of its connector to rank 0."""

import multiprocessing
import threading

import pytest
from pdpool_connector import Cause
from pdpool_reference import weights
from pdpool_reference.rank_orders import Changed, RankSpec
from pdpool_reference.rank_process import Follower
from pdpool_reference.shard import shards_of

from tests.unit.reference.scripted import DONE, READY, ScriptedTransfer, failed

WAIT_S = 20.0


class Polled:
    """A connector whose `poll` returns what the test has put in."""

    def __init__(self):
        self.changed = []

    def poll(self):
        changed, self.changed = self.changed, []
        return changed


@pytest.fixture
def rank():
    shard = shards_of(weights.tiny()[0], 2)[1]
    ours, theirs = multiprocessing.Pipe()
    follower = Follower(RankSpec(1, 0, shard, "decode", "tiny", 4), theirs, theirs)
    connector = Polled()
    threading.Thread(target=follower._report, args=(connector,), daemon=True).start()

    def report(handle, transfer, status):
        transfer.status = status
        follower._transfers.setdefault(handle, transfer)
        follower._handles.setdefault(transfer, handle)
        connector.changed.append(transfer)
        follower._changed.set()

    yield follower, connector, ours, report
    ours.close()


def received(ours):
    assert ours.poll(WAIT_S)
    return ours.recv()


def test_each_change_is_reported_with_its_handle(rank):
    follower, _, ours, report = rank
    report(5, transfer := ScriptedTransfer(), READY)
    assert received(ours) == Changed(5, READY)
    report(5, transfer, failed(Cause.PEER_LOST, releasable=False))
    assert received(ours).status.cause is Cause.PEER_LOST
    assert follower._transfers == {5: transfer}


def test_change_after_final_report_is_dropped(rank):
    follower, connector, ours, report = rank
    report(5, transfer := ScriptedTransfer(), DONE)
    assert received(ours) == Changed(5, DONE)
    connector.changed.append(transfer)
    report(6, ScriptedTransfer(), READY)
    assert received(ours) == Changed(6, READY)
    assert list(follower._transfers) == [6]

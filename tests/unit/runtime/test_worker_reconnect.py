"""A worker whose connection has broken while both processes live: the next job has it made again."""

import pytest
from pdpool_connector.backends.base import Poll, UnknownPeerError
from pdpool_connector.protocol.events import WriteResult

from tests.unit.runtime.scripted import Bench

BROKEN = UnknownPeerError("peer d is not connected: reset by peer")


@pytest.fixture
def broken(bench):
    """A worker whose backend refuses these submissions, counted from 1, for want of a connection."""

    def make(*numbers: int) -> Bench:
        return bench(lambda backend: backend.refusals.update(dict.fromkeys(numbers, BROKEN)))

    return make


def test_broken_connection_is_made_again(broken) -> None:
    one = broken(1)
    one.write(1, 3, aux=True)
    one.next_submit().outcome = Poll.DONE
    end = one.next_end()
    assert end.result is WriteResult.LANDED
    assert one.backend.connects == 2


def test_each_job_asks_for_one_new_connection(broken) -> None:
    one = broken(1, 2, 3)
    one.write(1, 1)
    end = one.next_end()
    assert (end.result, end.message) == (WriteResult.FAILED, str(BROKEN))
    one.write(2, 1)
    one.next_submit().outcome = Poll.DONE
    assert one.next_end().result is WriteResult.LANDED
    assert one.backend.connects == 3


def test_jobs_fail_at_once_while_nothing_connects(broken) -> None:
    one = broken(1, 2, 3)
    one.backend.connect_error = UnknownPeerError("nobody answers")
    for number in (1, 2):
        one.write(number, 1)
        end = one.next_end()
        assert (end.result, end.message) == (WriteResult.FAILED, "nobody answers")
    assert one.backend.connects == 2


def test_connection_with_bytes_under_way_is_kept(broken) -> None:
    one = broken(2)
    one.write(1, 1)
    flying = one.next_submit()
    one.write(2, 1)
    assert one.next_end().write == 2
    assert not one.backend.disconnected.is_set()
    flying.outcome = Poll.DONE
    assert one.next_end().result is WriteResult.LANDED


def test_job_stopped_while_connecting_is_not_sent(broken) -> None:
    one = broken(1)
    one.backend.on_connect = lambda: one.worker.stop({1})
    one.write(1, 1)
    assert one.next_end().result is WriteResult.STOPPED
    assert one.backend.submitted.empty()

"""A peer's worker: chunks in turn, stops between them, and what it reports as settled."""

import pytest
from pdpool_connector.backends.base import BackendError, InvalidChunkError, Poll
from pdpool_connector.protocol.events import WriteResult
from pdpool_connector.runtime.worker import IN_FLIGHT

from tests.unit.runtime.scripted import PAGE


def test_write_is_cut_and_ends_once(bench) -> None:
    one = bench()
    one.write(1, 10, aux=True)
    sizes = []
    for _ in range(3):
        transfer = one.next_submit()
        sizes.append(len(transfer.chunk.local_pages))
        transfer.outcome = Poll.DONE
    end = one.next_end()
    assert sum(sizes) == 10
    assert (end.result, end.bytes_moved) == (WriteResult.LANDED, 10 * PAGE + 64)
    assert one.ended.empty()


def order_of(one, count: int) -> list[int]:
    """Whose chunks are submitted next, each of them done at once."""
    order = []
    for _ in range(count):
        transfer = one.next_submit()
        transfer.outcome = Poll.DONE
        order.append(int(transfer.chunk.local_pages[0]) // 32)
    return order


def test_chunks_in_flight_are_bounded_and_jobs_alternate(bench) -> None:
    one = bench()
    one.write(1, 4)
    first = one.next_submit()
    one.write(2, 4)
    second = one.next_submit()
    assert IN_FLIGHT == 2
    one.write(3, 16)
    one.write(4, 16)
    assert one.backend.submitted.empty()
    first.outcome = second.outcome = Poll.DONE
    assert order_of(one, 8) == [3, 4, 3, 4, 3, 4, 3, 4]
    assert {one.next_end().write for _ in range(4)} == {1, 2, 3, 4}


def test_chunks_begun_alone_count_as_turns(bench) -> None:
    one = bench()
    one.write(1, 16)
    alone = [one.next_submit(), one.next_submit()]
    for job in (2, 3):
        one.write(job, 16)
    for transfer in alone:
        transfer.outcome = Poll.DONE
    order = order_of(one, 10)
    assert order == [2, 3, 2, 3, 1, 2, 3, 1, 2, 3], "it ends with the others, and has a turn in each round again"


def test_stop_submits_no_chunk_and_waits(bench) -> None:
    one = bench()
    one.write(1, 40)
    flying = [one.next_submit(), one.next_submit()]
    one.worker.stop({1})
    assert one.ended.empty()
    flying[0].outcome = Poll.DONE
    flying[1].outcome = Poll.DONE
    end = one.next_end()
    assert end.result is WriteResult.STOPPED
    assert end.bytes_moved == 8 * PAGE
    assert one.backend.submitted.empty()


@pytest.mark.parametrize(
    ("outcome", "result"),
    [(Poll.FAILED_SETTLED, WriteResult.FAILED), (Poll.FAILED_UNSETTLED, WriteResult.UNSETTLED)],
)
def test_failure_ends_write_after_its_other_chunks(bench, outcome: Poll, result: WriteResult) -> None:
    one = bench()
    one.write(1, 40)
    first, second = one.next_submit(), one.next_submit()
    first.failure = "link down"
    first.outcome = outcome
    assert one.ended.empty()
    second.outcome = Poll.DONE
    end = one.next_end()
    assert (end.result, end.message) == (result, "link down")
    assert one.ended.empty()


def test_unsettled_outweighs_an_earlier_settled_failure(bench) -> None:
    one = bench()
    one.write(1, 8)
    first, second = one.next_submit(), one.next_submit()
    first.outcome = Poll.FAILED_SETTLED
    second.outcome = Poll.FAILED_UNSETTLED
    assert one.next_end().result is WriteResult.UNSETTLED


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (InvalidChunkError("page 999"), WriteResult.INVALID),
        (BackendError("not connected"), WriteResult.FAILED),
        (RuntimeError("a bug"), WriteResult.UNSETTLED),
    ],
)
def test_submit_that_raises_ends_the_write_alone(bench, error: Exception, result: WriteResult) -> None:
    one = bench(lambda backend: backend.refusals.update({1: error}))
    one.write(1, 1)
    assert one.next_end().result is result
    one.write(2, 1)
    one.next_submit().outcome = Poll.DONE
    assert one.next_end().result is WriteResult.LANDED


def test_failed_connection_ends_the_worker(bench) -> None:
    one = bench(lambda backend: setattr(backend, "connect_error", BackendError("no route")))
    assert one.gone.wait(30)


def test_close_waits_for_chunks_in_flight(bench) -> None:
    one = bench()
    one.write(1, 40)
    flying = [one.next_submit(), one.next_submit()]
    one.worker.close()
    assert not one.backend.disconnected.wait(0.1)
    for transfer in flying:
        transfer.outcome = Poll.DONE
    assert one.next_end().result is WriteResult.STOPPED
    assert one.backend.disconnected.wait(30)


def test_rank_without_pages_gets_the_aux_row_alone(bench) -> None:
    one = bench(kv=False)
    one.write(1, 2, aux=True)
    one.next_submit().outcome = Poll.DONE
    end = one.next_end()
    assert (end.result, end.bytes_moved) == (WriteResult.LANDED, 64)

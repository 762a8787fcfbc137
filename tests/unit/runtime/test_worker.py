"""A peer's worker: chunks in turn, stops between them, and never calls unsettled what is settled or the reverse."""

import pytest
from msgspec import structs
from pdpool_connector.backends.base import BackendError, InvalidChunkError, Poll
from pdpool_connector.layout.memory import Region, StateCut
from pdpool_connector.protocol.events import WriteResult
from pdpool_connector.runtime.worker import IN_FLIGHT

from tests.unit.runtime.scripted import MEMORY, PAGE


def test_a_write_is_cut_and_ends_once_with_all_its_bytes(bench) -> None:
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


def test_no_more_chunks_are_in_flight_than_told_and_jobs_take_turns(bench) -> None:
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


def test_what_a_job_began_while_it_was_alone_counts_as_its_turns_once_others_come(bench) -> None:
    one = bench()
    one.write(1, 16)
    alone = [one.next_submit(), one.next_submit()]
    for job in (2, 3):
        one.write(job, 16)
    for transfer in alone:
        transfer.outcome = Poll.DONE
    order = order_of(one, 10)
    assert order == [2, 3, 2, 3, 1, 2, 3, 1, 2, 3], "it ends with the others, and has a turn in each round again"


def test_stop_cuts_at_the_next_chunk_and_waits_for_what_is_in_flight(bench) -> None:
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
def test_a_failure_ends_the_write_after_its_other_chunks_settled(bench, outcome: Poll, result: WriteResult) -> None:
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
def test_what_submit_raises_ends_the_write_and_not_the_worker(bench, error: Exception, result: WriteResult) -> None:
    one = bench(lambda backend: backend.refusals.update({1: error}))
    one.write(1, 1)
    assert one.next_end().result is result
    one.write(2, 1)
    one.next_submit().outcome = Poll.DONE
    assert one.next_end().result is WriteResult.LANDED


def test_a_failed_connection_is_told_and_ends_the_worker(bench) -> None:
    one = bench(lambda backend: setattr(backend, "connect_error", BackendError("no route")))
    assert one.gone.wait(30)


def test_close_waits_for_what_is_in_flight_and_then_disconnects(bench) -> None:
    one = bench()
    one.write(1, 40)
    flying = [one.next_submit(), one.next_submit()]
    one.worker.close()
    assert not one.backend.disconnected.wait(0.1)
    for transfer in flying:
        transfer.outcome = Poll.DONE
    assert one.next_end().result is WriteResult.STOPPED
    assert one.backend.disconnected.wait(30)


STATEFUL = structs.replace(
    MEMORY,
    state=(Region(1 << 21, 24, 4), Region(1 << 22, 8, 4)),
    state_cuts=(StateCut(1, (2,)), None),
    state_ranks=1,
)


@pytest.mark.parametrize(
    ("duty", "nbytes"),
    [
        ({"kv": True, "shares": True}, 2 * PAGE + 32 + 64),
        ({"kv": True, "shares": False}, 2 * PAGE + 8 + 64),
        ({"kv": False, "shares": True}, 24 + 64),
        ({"kv": False, "shares": False}, 64),
    ],
)
def test_only_what_a_rank_has_to_move_is_moved(bench, duty: dict, nbytes: int) -> None:
    one = bench(memory=STATEFUL, theirs=STATEFUL, **duty)
    one.write(1, 2, aux=True, state=b"\2\0\0\0")
    moved = 0
    while moved < nbytes:
        transfer = one.next_submit()
        moved += one.worker._plan.nbytes(transfer.chunk)
        transfer.outcome = Poll.DONE
    end = one.next_end()
    assert (end.result, end.bytes_moved, moved) == (WriteResult.LANDED, nbytes, nbytes)


def test_a_share_asked_of_a_rank_whose_state_is_not_cut_is_nothing(bench) -> None:
    whole = structs.replace(STATEFUL, state_cuts=(), state_ranks=0)
    one = bench(memory=whole, theirs=whole, kv=False, shares=True)
    one.write(1, 2, state=b"\2\0\0\0")
    end = one.next_end()
    assert (end.result, end.bytes_moved) == (WriteResult.LANDED, 0)

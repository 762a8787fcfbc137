"""Small moves: several in one transfer, made by the calling thread where that does not block, and ending apart."""

import threading
import time

import pytest
from msgspec import structs
from pdpool_connector.backends.base import BackendError, InvalidChunkError, Poll, UnknownPeerError
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.protocol.events import WriteResult
from pdpool_connector.runtime.worker import SMALL

from tests.unit.runtime.scripted import MEMORY, Bench, ScriptedBackend, Transfer

LITTLE = structs.replace(MEMORY, kv=tuple(structs.replace(region, item_bytes=512) for region in MEMORY.kv))
"""1 KiB and two pieces a page."""


class PromptBackend(ScriptedBackend):
    """Ends what it is given at once with `outcome`; None: it would have to wait."""

    def __init__(self, outcome: Poll | None) -> None:
        super().__init__()
        self.outcome = outcome
        self.threads: list[str] = []

    def submit_at_once(self, peer, chunk) -> Transfer | None:
        self.threads.append(threading.current_thread().name)
        if self.outcome is None:
            return None
        transfer = self.submit(peer, chunk)
        transfer.outcome = self.outcome
        return transfer


class FailingSums:
    """Gives no checksum of page 32."""

    def of_chunk(self, _remote):
        return self.chunk_sum

    def chunk_sum(self, chunk: Chunk) -> int:
        if pages_of(chunk) == [32]:
            raise MemoryError("no room")
        return 7


@pytest.fixture
def prompt():
    """A worker that sleeps, over a `PromptBackend`."""
    made: list[Bench] = []

    def make(outcome: Poll | None, **options) -> Bench:
        one = Bench(PromptBackend(outcome), LITTLE, LITTLE, **options)
        made.append(one)
        assert one.connected.get(timeout=30) is None
        # The worker's own thread holds its lock from before it reports an end until it sleeps. It reports that it is
        # connected before it has taken the lock.
        one.write(0, 200)
        one.next_submit().outcome = Poll.DONE
        assert one.next_end().result is WriteResult.LANDED
        while one.worker._hands.locked():
            time.sleep(0.001)
        one.worker.forget(0)
        one.backend.count = 0
        return one

    yield make
    for one in made:
        one.worker.close()
        assert one.worker.join(30)


def pages_of(chunk: Chunk) -> list[int]:
    return chunk.local_pages.tolist()


def results(one: Bench, count: int) -> dict[int, WriteResult]:
    ends = [one.next_end() for _ in range(count)]
    assert one.ended.empty()
    return {end.write: end.result for end in ends}


def test_small_write_is_made_by_the_caller(prompt) -> None:
    one = prompt(Poll.DONE)
    one.write(1, 1, aux=True)
    one.turn()
    assert one.ended.get_nowait().result is WriteResult.LANDED
    assert one.backend.threads == [threading.current_thread().name]


def test_small_writes_share_a_transfer(prompt) -> None:
    one = prompt(Poll.DONE)
    one.write(1, 2)
    one.write(2, 1)
    one.turn()
    assert pages_of(one.backend.submitted.get_nowait().chunk) == [32, 33, 64]
    assert one.backend.count == 1
    ends = [one.ended.get_nowait() for _ in range(2)]
    assert [(end.write, end.result, end.bytes_moved) for end in ends] == [
        (1, WriteResult.LANDED, 2048),
        (2, WriteResult.LANDED, 1024),
    ]


def test_shared_transfer_is_bounded(prompt) -> None:
    one = prompt(Poll.DONE)
    for number in range(1, 6):
        one.write(number, 10)
    one.turn()
    pieces = [2 * len(one.backend.submitted.get_nowait().chunk.local_pages) for _ in range(one.backend.count)]
    assert pieces == [60, 40]
    assert max(pieces) <= SMALL[1]
    assert set(results(one, 5).values()) == {WriteResult.LANDED}


@pytest.mark.parametrize(
    ("outcome", "result"),
    [(Poll.FAILED_SETTLED, WriteResult.FAILED), (Poll.FAILED_UNSETTLED, WriteResult.UNSETTLED)],
)
def test_failed_shared_transfer_fails_each_write(prompt, outcome, result) -> None:
    one = prompt(outcome)
    one.write(1, 1)
    one.write(2, 1)
    one.turn()
    assert results(one, 2) == {1: result, 2: result}


def test_broken_connection_is_left_to_the_worker(prompt) -> None:
    one = prompt(Poll.DONE)
    one.backend.refusals[1] = UnknownPeerError("not connected")
    for number in (1, 2):
        one.write(number, 1)
    one.turn()
    one.next_submit().outcome = Poll.DONE
    assert results(one, 2) == {1: WriteResult.LANDED, 2: WriteResult.LANDED}
    assert one.backend.connects == 2


def test_write_that_does_not_fit_fails_alone(prompt) -> None:
    one = prompt(Poll.DONE)
    one.backend.refusals = {1: InvalidChunkError("page 999"), 3: InvalidChunkError("page 999")}
    for number in (1, 2, 3):
        one.write(number, 1)
    one.turn()
    assert results(one, 3) == {1: WriteResult.LANDED, 2: WriteResult.INVALID, 3: WriteResult.LANDED}


def test_page_written_twice_is_left_to_the_backend(prompt) -> None:
    one = prompt(Poll.DONE)
    one.write(1, 1)
    one.worker.submit(structs.replace(next(iter(one.worker.unended())), write=2))
    one.turn()
    assert results(one, 2) == {1: WriteResult.LANDED, 2: WriteResult.LANDED}


@pytest.mark.parametrize(
    ("error", "result"),
    [(BackendError("not connected"), WriteResult.FAILED), (RuntimeError("a bug"), WriteResult.UNSETTLED)],
)
def test_submit_that_raises_ends_all(prompt, error: Exception, result: WriteResult) -> None:
    one = prompt(Poll.DONE)
    one.backend.refusals = {1: error}
    one.write(1, 1)
    one.write(2, 1)
    one.turn()
    assert results(one, 2) == {1: result, 2: result}


def test_checksum_fault_fails_its_write_alone(prompt) -> None:
    one = prompt(Poll.PENDING, sums=FailingSums())
    one.write(1, 1)
    one.write(2, 1)
    one.turn()
    flying = one.next_submit()
    assert one.ended.empty()
    flying.outcome = Poll.DONE
    failed, landed = one.next_end(), one.next_end()
    assert (failed.result, failed.message) == (WriteResult.FAILED, "MemoryError: no room")
    assert (landed.result, landed.checksum) == (WriteResult.LANDED, 7)


def test_write_stopped_in_turn_is_not_made(prompt) -> None:
    one = prompt(Poll.DONE)
    one.write(1, 1)
    one.write(2, 1)
    one.worker.stop({1})
    one.turn()
    assert results(one, 2) == {1: WriteResult.STOPPED, 2: WriteResult.LANDED}
    assert pages_of(one.backend.submitted.get_nowait().chunk) == [64]


def test_worker_finishes_pending_writes(prompt) -> None:
    one = prompt(Poll.PENDING)
    one.write(1, 1)
    one.write(2, 1)
    one.turn()
    assert one.ended.empty()
    one.next_submit().outcome = Poll.DONE
    assert results(one, 2) == {1: WriteResult.LANDED, 2: WriteResult.LANDED}
    assert one.backend.count == 1


def test_worker_makes_writes_that_must_wait(prompt) -> None:
    one = prompt(None)
    one.write(1, 1)
    one.write(2, 1)
    one.turn()
    one.next_submit().outcome = Poll.DONE
    assert results(one, 2) == {1: WriteResult.LANDED, 2: WriteResult.LANDED}
    assert len(one.backend.threads) == 1


def test_worker_makes_large_and_queued_writes(prompt) -> None:
    one = prompt(Poll.PENDING)
    one.write(1, 200)
    first = one.next_submit()
    one.write(2, 1)
    one.turn()
    assert one.backend.threads == []
    first.outcome = Poll.DONE
    while pages_of((transfer := one.next_submit()).chunk)[0] != 64:
        transfer.outcome = Poll.DONE
    transfer.outcome = Poll.DONE
    assert set(results(one, 2)) == {1, 2}


def test_caller_never_waits_for_a_large_write(prompt) -> None:
    one = prompt(Poll.PENDING)
    one.write(1, 200)
    first = one.next_submit()
    one.write(2, 1)
    owner = threading.Thread(target=one.turn, daemon=True)
    owner.start()
    owner.join(5)
    held_up = owner.is_alive()
    first.outcome = Poll.DONE
    while pages_of((transfer := one.next_submit()).chunk)[0] != 64:
        transfer.outcome = Poll.DONE
    transfer.outcome = Poll.DONE
    assert set(results(one, 2)) == {1, 2}
    assert not held_up


def test_close_in_turn_stops_unbegun_writes(prompt) -> None:
    one = prompt(Poll.DONE)
    one.write(1, 1)
    one.worker.close()
    one.turn()
    assert results(one, 1) == {1: WriteResult.STOPPED}
    assert one.backend.count == 0


def test_queued_small_writes_go_together(bench) -> None:
    one = bench(memory=LITTLE, theirs=LITTLE)
    one.write(1, 1)
    first = one.next_submit()
    one.write(2, 1)
    second = one.next_submit()
    for number in (3, 4, 5):
        one.write(number, 1, aux=number == 4)
    while not one.worker._inbox.empty():
        time.sleep(0.001)
    first.outcome = Poll.DONE
    third = one.next_submit()
    assert pages_of(third.chunk) == [96, 128, 160]
    assert third.chunk.aux == ((1, 2),)
    second.outcome = third.outcome = Poll.DONE
    assert set(results(one, 5).values()) == {WriteResult.LANDED}


def test_large_write_goes_alone_in_turn(bench) -> None:
    one = bench(memory=LITTLE, theirs=LITTLE)
    flying = []
    for number in (1, 2):
        one.write(number, 1)
        flying.append(one.next_submit())
    one.write(3, 1)
    one.write(4, 100)  # 100 KiB in 200 pieces
    one.write(5, 1)
    while not one.worker._inbox.empty():
        time.sleep(0.001)
    order = []
    for _ in range(3):
        flying.pop(0).outcome = Poll.DONE
        flying.append(one.next_submit())
        order.append(len(flying[-1].chunk.local_pages))
    for transfer in flying:
        transfer.outcome = Poll.DONE
    assert order == [1, 100, 1]
    assert set(results(one, 5).values()) == {WriteResult.LANDED}

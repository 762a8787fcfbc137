"""A peer's worker: chunks in turn, stops between them, and never calls unsettled what is settled or the reverse."""

import threading
import time
from collections.abc import Callable
from queue import Queue

import numpy as np
import pytest
from msgspec import structs
from pdpool_connector.engines.base import EngineError, InvalidChunkError, Poll
from pdpool_connector.layout.checksum import PageSums
from pdpool_connector.layout.memory import KVMemory, Region, RemoteMemory
from pdpool_connector.layout.plan import Chunk
from pdpool_connector.layout.staging import Reservation, Staging
from pdpool_connector.protocol.events import Write, WriteEnded, WriteResult
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.runtime.worker import IN_FLIGHT, PeerWorker

PAGE = (4 << 20) - 64  # so that four pages and an aux row make a chunk
MEMORY = KVMemory(
    kv=(Region(1 << 30, PAGE // 2, 256), Region(1 << 34, PAGE // 2, 256)),
    aux=Region(1 << 20, 64, 16),
    page_tokens=16,
    layers=1,
    kv_heads=1,
    head_dim=1,
    dtype="float32",
    model="m",
)


class Transfer:
    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.outcome = Poll.PENDING
        self.failure = ""


class ScriptedEngine:
    """Submits go into a list; the test decides when and how each ends."""

    name = "scripted"

    def __init__(self) -> None:
        self.submitted: Queue[Transfer] = Queue()
        self.refusals: dict[int, Exception] = {}
        self.count = 0
        self.poked = threading.Event()
        self.connect_error: Exception | None = None
        self.disconnected = threading.Event()

    def connect(self, *_) -> None:
        if self.connect_error is not None:
            raise self.connect_error

    def submit(self, _, chunk, _op) -> Transfer:
        self.count += 1
        if self.count in self.refusals:
            raise self.refusals[self.count]
        transfer = Transfer(chunk)
        self.submitted.put(transfer)
        return transfer

    def poll(self, handle: Transfer) -> Poll:
        if handle.outcome is Poll.PENDING:
            self.poked.wait(0.002)
        return handle.outcome

    def disconnect(self, _) -> None:
        self.disconnected.set()


class Bench:
    def __init__(
        self, engine: ScriptedEngine, memory: KVMemory = MEMORY, theirs: KVMemory = MEMORY, staging=None
    ) -> None:
        self.engine = engine
        self.kept: Queue[tuple[AttemptId, Reservation]] = Queue()
        self.connected: Queue[EngineError | None] = Queue()
        self.ended: Queue[WriteEnded] = Queue()
        self.gone = threading.Event()
        remote = RemoteMemory(engine="scripted", memory=theirs, descriptor=b"")
        self.worker = PeerWorker(
            engine,
            memory,
            "d" * 32,
            remote,
            sums=PageSums(memory),
            checksum_rate=0.0,
            staging=staging,
            connected=self.connected.put,
            ended=self.ended.put,
            kept=lambda *entry: self.kept.put(entry),
            gone=self.gone.set,
        )

    def write(self, number: int, pages: int, *, aux: bool = False) -> None:
        ids = (32 * number + np.arange(pages, dtype="<i4")).tobytes()
        attempt = AttemptId("d" * 32, number)
        self.worker.submit(Write(attempt, number, "d" * 32, ids, ids, (1, 2) if aux else None))

    def next_submit(self) -> Transfer:
        return self.engine.submitted.get(timeout=5)

    def next_end(self) -> WriteEnded:
        return self.ended.get(timeout=5)


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(prepare: Callable[[ScriptedEngine], None] = lambda _: None, **memories) -> Bench:
        engine = ScriptedEngine()
        prepare(engine)
        made.append(Bench(engine, **memories))
        assert made[-1].connected.get(timeout=5) is engine.connect_error
        return made[-1]

    yield make
    for one in made:
        one.worker.close()
        while not one.worker.join(0.05):
            while not one.engine.submitted.empty():
                one.engine.submitted.get().outcome = Poll.DONE
        assert one.gone.is_set()


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


SMALL = structs.replace(MEMORY, kv=tuple(structs.replace(region, item_bytes=512) for region in MEMORY.kv))


class PromptEngine(ScriptedEngine):
    """Ends what it is given at once in the way that `outcome` tells; None: it would have to wait."""

    outcome: Poll | None = Poll.DONE

    def submit_at_once(self, peer, chunk, op) -> Transfer | None:
        self.threads.append(threading.current_thread().name)
        if self.outcome is None:
            return None
        transfer = self.submit(peer, chunk, op)
        transfer.outcome = self.outcome
        return transfer


def small_bench(outcome: Poll | None) -> Bench:
    engine = PromptEngine()
    engine.outcome, engine.threads = outcome, []
    one = Bench(engine, SMALL, SMALL)
    assert one.connected.get(timeout=5) is None
    while not one.worker._inbox.empty() or one.worker._hands.locked():
        time.sleep(0.001)  # until the worker sleeps
    return one


def end(one: Bench) -> None:
    one.worker.close()
    assert one.worker.join(5)


def test_a_small_move_is_made_by_whoever_brings_it_while_the_worker_sleeps() -> None:
    one = small_bench(Poll.DONE)
    one.write(1, 1, aux=True)
    assert one.ended.get_nowait().result is WriteResult.LANDED
    assert one.engine.threads == [threading.current_thread().name]
    end(one)


def test_a_failed_small_move_says_whether_bytes_may_still_land() -> None:
    for outcome, result in ((Poll.FAILED_SETTLED, WriteResult.FAILED), (Poll.FAILED_UNSETTLED, WriteResult.UNSETTLED)):
        one = small_bench(outcome)
        one.write(1, 1)
        assert one.ended.get_nowait().result is result
        end(one)


def test_the_worker_goes_on_with_a_small_move_that_is_not_over_at_once() -> None:
    one = small_bench(Poll.PENDING)
    one.write(1, 1)
    assert one.ended.empty()
    one.next_submit().outcome = Poll.DONE
    assert one.next_end().result is WriteResult.LANDED
    assert one.engine.count == 1
    end(one)


def test_the_worker_makes_a_small_move_that_would_have_to_wait() -> None:
    one = small_bench(None)
    one.write(1, 1)
    one.next_submit().outcome = Poll.DONE
    assert one.next_end().result is WriteResult.LANDED
    assert len(one.engine.threads) == 1
    end(one)


def test_large_moves_and_those_behind_others_are_the_workers() -> None:
    one = small_bench(Poll.PENDING)
    one.write(1, 200)
    first = one.next_submit()
    one.write(2, 1)
    assert one.engine.threads == []
    first.outcome = Poll.DONE
    while (transfer := one.next_submit()).chunk.local_pages[0] != 64:
        transfer.outcome = Poll.DONE
    transfer.outcome = Poll.DONE
    assert {one.next_end().write, one.next_end().write} == {1, 2}
    end(one)


def test_no_more_chunks_are_in_flight_than_told_and_jobs_take_turns(bench) -> None:
    one = bench()
    one.write(1, 16)
    first, second = one.next_submit(), one.next_submit()
    one.write(2, 16)
    assert one.engine.submitted.empty()
    assert IN_FLIGHT == 2
    order = []
    for transfer in (first, second):
        transfer.outcome = Poll.DONE
    for _ in range(6):
        transfer = one.next_submit()
        transfer.outcome = Poll.DONE
        order.append(int(transfer.chunk.local_pages[0]) // 32)
    assert order == [1, 2, 1, 2, 2, 2]
    assert [one.next_end().write, one.next_end().write] == [1, 2]


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
    assert one.engine.submitted.empty()


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
        (EngineError("not connected"), WriteResult.FAILED),
        (RuntimeError("a bug"), WriteResult.UNSETTLED),
    ],
)
def test_what_submit_raises_ends_the_write_and_not_the_worker(bench, error: Exception, result: WriteResult) -> None:
    one = bench(lambda engine: engine.refusals.update({1: error}))
    one.write(1, 1)
    assert one.next_end().result is result
    one.write(2, 1)
    one.next_submit().outcome = Poll.DONE
    assert one.next_end().result is WriteResult.LANDED


def test_a_failed_connection_is_told_and_ends_the_worker(bench) -> None:
    one = bench(lambda engine: setattr(engine, "connect_error", EngineError("no route")))
    assert one.gone.wait(5)


def test_close_waits_for_what_is_in_flight_and_then_disconnects(bench) -> None:
    one = bench()
    one.write(1, 40)
    flying = [one.next_submit(), one.next_submit()]
    one.worker.close()
    assert not one.engine.disconnected.wait(0.1)
    for transfer in flying:
        transfer.outcome = Poll.DONE
    assert one.next_end().result is WriteResult.STOPPED
    assert one.engine.disconnected.wait(5)


# --- Staging: our pages have two heads, the peer's one of them ---

TOKENS, HEAD_BYTES, POOL = 16, 256, 256
SOURCE = np.random.default_rng(0).integers(0, 256, (2, POOL, TOKENS, 2, HEAD_BYTES), np.uint8)


def tensor_parallel(address: int, heads: int) -> KVMemory:
    item = TOKENS * HEAD_BYTES * heads
    return KVMemory(
        kv=tuple(Region(address + index * item * POOL, item, POOL) for index in (0, 1)),
        aux=Region(1 << 20, 64, 16),
        page_tokens=TOKENS,
        layers=1,
        kv_heads=heads,
        total_heads=2,
        head_dim=HEAD_BYTES,
        dtype="uint8",
        model="m",
    )


@pytest.fixture
def staged(bench):
    """A worker whose peer takes one head of ours, and the slots it has for that."""

    def make(slots: int, **options) -> tuple[Bench, Staging]:
        staging = Staging(slots)
        memories = {"memory": tensor_parallel(SOURCE.ctypes.data, 2), "theirs": tensor_parallel(1 << 40, 1)}
        return bench(**memories, staging=staging, **options), staging

    return make


def test_pages_are_gathered_and_their_slot_is_given_back_when_the_chunk_has_settled(staged) -> None:
    one, staging = staged(2)
    one.write(1, 3, aux=True)
    transfer = one.next_submit()
    slot = transfer.chunk.staged
    gathered = slot.bytes[: 2 * 3 * TOKENS * HEAD_BYTES].reshape(2, 3, TOKENS, HEAD_BYTES)
    assert np.array_equal(gathered, SOURCE[:, 32:35, :, 0])
    assert staging.reserved == 1
    transfer.outcome = Poll.DONE
    assert one.next_end().bytes_moved == 2 * 3 * TOKENS * HEAD_BYTES + 64
    assert staging.reserved == 0


@pytest.mark.parametrize(
    ("outcome", "refusal", "keeps"),
    [
        (Poll.FAILED_SETTLED, None, False),
        (Poll.FAILED_UNSETTLED, None, True),
        (None, EngineError("not connected"), False),
        (None, InvalidChunkError("page 999"), False),
        (None, RuntimeError("a bug"), True),
    ],
)
def test_a_slot_is_kept_with_the_attempt_only_while_it_may_still_be_read(staged, outcome, refusal, keeps) -> None:
    one, staging = staged(2, prepare=lambda engine: engine.refusals.update({1: refusal} if refusal else {}))
    one.write(1, 3)
    if refusal is None:
        one.next_submit().outcome = outcome
    assert one.next_end().result is not WriteResult.LANDED
    assert staging.reserved == keeps
    if keeps:
        attempt, slot = one.kept.get(timeout=5)
        assert attempt == AttemptId("d" * 32, 1)
        slot.release()
        assert staging.reserved == 0
    assert one.kept.empty()


def test_without_a_free_slot_strips_go_out_and_no_room_waits_or_fails(staged) -> None:
    one, staging = staged(1)
    taken = staging.reserve()
    one.write(1, 100)
    one.write(2, 3)
    pages = 0
    for _ in range(5):
        transfer = one.next_submit()
        assert transfer.chunk.staged is None
        assert len(transfer.chunk.local_pages) <= 31, "1023 // (2 regions * 16 strips)"
        pages += len(transfer.chunk.local_pages)
        transfer.outcome = Poll.DONE
    assert pages == 103
    assert {one.next_end().result, one.next_end().result} == {WriteResult.LANDED}
    taken.release()
    one.write(3, 3)
    transfer = one.next_submit()
    assert transfer.chunk.staged is not None
    transfer.outcome = Poll.DONE
    assert one.next_end().result is WriteResult.LANDED


def test_rooms_that_end_differently_leave_each_others_slots_alone(staged) -> None:
    one, staging = staged(2)
    one.write(1, 3)
    one.write(2, 3)
    first, second = one.next_submit(), one.next_submit()
    assert first.chunk.staged.address != second.chunk.staged.address
    content = second.chunk.staged.bytes.copy()
    first.outcome = Poll.FAILED_SETTLED
    assert one.next_end().write == 1
    assert staging.reserved == 1
    one.write(3, 3)
    third = one.next_submit()
    assert third.chunk.staged.address == first.chunk.staged.address
    assert np.array_equal(second.chunk.staged.bytes, content)
    for transfer in (second, third):
        transfer.outcome = Poll.DONE
    assert {one.next_end().result, one.next_end().result} == {WriteResult.LANDED}
    assert staging.reserved == 0


def test_ids_outside_our_memory_are_refused_before_they_are_gathered(staged) -> None:
    one, staging = staged(1)
    one.write(8, 3)  # pages 256..258 of 256
    assert one.next_end().result is WriteResult.INVALID
    assert (staging.reserved, one.engine.count) == (0, 0)


def test_without_staging_pages_go_out_as_strips(bench) -> None:
    one = bench(memory=tensor_parallel(SOURCE.ctypes.data, 2), theirs=tensor_parallel(1 << 40, 1))
    one.write(1, 3)
    transfer = one.next_submit()
    assert transfer.chunk.staged is None
    transfer.outcome = Poll.DONE
    assert one.next_end().result is WriteResult.LANDED

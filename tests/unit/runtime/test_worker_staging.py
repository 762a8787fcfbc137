"""A worker that gathers pages before it writes them: our pages have two heads, the peer's one of them."""

import numpy as np
import pytest
from pdpool_connector.backends.base import BackendError, InvalidChunkError, Poll, UnknownPeerError
from pdpool_connector.layout.memory import KVMemory, Region
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.staging import Staging
from pdpool_connector.protocol.events import WriteResult
from pdpool_connector.protocol.frames import AttemptId

from tests.unit.runtime.scripted import Bench

TOKENS, HEAD_BYTES, POOL = 16, 256, 256
SOURCE = np.random.default_rng(0).integers(0, 256, (2, POOL, TOKENS, 2, HEAD_BYTES), np.uint8)


def tensor_parallel(address: int, heads: int) -> KVMemory:
    item = TOKENS * HEAD_BYTES * heads
    return KVMemory(
        kv=tuple(Region(address + index * item * POOL, item, POOL) for index in (0, 1)),
        aux=(Region(1 << 20, 64, 16),),
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


def test_slot_is_given_back_when_chunk_settles(staged) -> None:
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
        (None, BackendError("not connected"), False),
        (None, InvalidChunkError("page 999"), False),
        (None, RuntimeError("a bug"), True),
    ],
)
def test_slot_is_kept_while_it_may_be_read(staged, outcome, refusal, keeps) -> None:
    one, staging = staged(2, prepare=lambda backend: backend.refusals.update({1: refusal} if refusal else {}))
    one.write(1, 3)
    if refusal is None:
        one.next_submit().outcome = outcome
    assert one.next_end().result is not WriteResult.LANDED
    assert staging.reserved == keeps
    if keeps:
        attempt, slot = one.kept.get(timeout=30)
        assert attempt == AttemptId("d" * 32, 1)
        slot.release()
        assert staging.reserved == 0
    assert one.kept.empty()


def test_reconnecting_keeps_no_slot(staged) -> None:
    one, staging = staged(1, prepare=lambda backend: backend.refusals.update({1: UnknownPeerError("not connected")}))
    one.backend.on_connect = lambda: reserved.append(staging.reserved)
    reserved: list[int] = []
    one.write(1, 3)
    transfer = one.next_submit()
    assert (reserved, staging.reserved) == ([0], 1)
    assert transfer.chunk.staged is not None
    transfer.outcome = Poll.DONE
    assert one.next_end().result is WriteResult.LANDED
    assert staging.reserved == 0


def test_worker_fault_keeps_slots_under_way(staged, monkeypatch) -> None:
    one, staging = staged(2)

    def fault(*_: object, **__: object) -> None:
        raise MemoryError

    one.write(1, 3)
    flying = one.next_submit()
    monkeypatch.setattr(PairPlan, "cut", fault)
    one.write(2, 3)
    assert one.gone.wait(30)
    assert one.backend.disconnected.is_set()
    assert staging.reserved == 1
    assert one.kept.get_nowait() == (AttemptId("d" * 32, 1), flying.chunk.staged)


def test_strips_go_out_without_free_slot(staged) -> None:
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


def test_slots_of_rooms_are_separate(staged) -> None:
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


def test_ids_outside_memory_are_not_gathered(staged) -> None:
    one, staging = staged(1)
    one.write(8, 3)  # pages 256..258 of 256
    assert one.next_end().result is WriteResult.INVALID
    assert (staging.reserved, one.backend.count) == (0, 0)


def test_without_staging_pages_go_out_as_strips(bench) -> None:
    one = bench(memory=tensor_parallel(SOURCE.ctypes.data, 2), theirs=tensor_parallel(1 << 40, 1))
    one.write(1, 3)
    transfer = one.next_submit()
    assert transfer.chunk.staged is None
    transfer.outcome = Poll.DONE
    assert one.next_end().result is WriteResult.LANDED

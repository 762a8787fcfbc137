"""Equal pages have equal sums on both sides, and misplaced pages do not; the checked share is as configured."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec import structs
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.checksum import MASK, PageSums, sampled
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.layout.plan import PairPlan

PAGES, ITEM, AUX = 16, 256, 64


@dataclass
class Rank:
    memory: KVMemory
    bytes: np.ndarray


@pytest.fixture
def rank() -> Iterator[Callable[..., Rank]]:
    """Make memories of 4 layers (or some of them); a page has 2 tokens, `heads` heads, 8 elements of 4 bytes."""
    arenas = []

    def make(first: int = 0, layers: int = 4, *, first_head: int = 0, heads: int = 4, layout: str = "NHD") -> Rank:
        item = ITEM * heads // 4
        size = 2 * layers * PAGES * item
        arena = HostArena(size + AUX)
        arenas.append(arena)
        memory = KVMemory(
            kv=tuple(arena.region(i * PAGES * item, item, PAGES) for i in range(2 * layers)),
            aux=(arena.region(size, AUX, 1),),
            page_tokens=2,
            layers=layers,
            kv_heads=heads,
            head_dim=8,
            dtype="float32",
            model="m",
            first_layer=first,
            total_layers=4,
            first_head=first_head,
            total_heads=4,
            layout=layout,
        )
        return Rank(memory, arena.array(0, (2 * layers, PAGES, item), np.uint8))

    yield make
    for arena in arenas:
        arena.close()


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def fill(rank: Rank, seed: int = 0) -> None:
    rank.bytes[:] = np.random.default_rng(seed).integers(0, 256, rank.bytes.shape, dtype=np.uint8)


def sent(source: Rank, target: Rank, ours: np.ndarray, theirs: np.ndarray) -> int:
    """The sum that a writer tells; the bytes are moved as well."""
    chunk_sum = PageSums(source.memory).of_chunk(target.memory)
    total = sum(chunk_sum(chunk) for chunk in PairPlan(source.memory, target.memory).cut(ours, theirs))
    at = 2 * (source.memory.first_layer - target.memory.first_layer)
    target.bytes[at : at + len(source.bytes), theirs] = source.bytes[:, ours]
    return total & MASK


def test_what_is_sent_in_any_order_and_chunks_has_the_sum_of_what_landed(rank, monkeypatch) -> None:
    monkeypatch.setattr("pdpool_connector.layout.pool.MAX_CHUNK_BYTES", 3 * ITEM)
    source, target = rank(), rank()
    fill(source)
    total = sent(source, target, ids(3, 1, 2, 9), ids(8, 0, 5, 6))
    assert total == PageSums(target.memory).whole([0, 5, 6, 8])


def test_sums_of_writers_of_different_layers_add_up(rank) -> None:
    first, last, target = rank(0, 1), rank(1, 3), rank()
    fill(first, 1)
    fill(last, 2)
    total = sent(first, target, ids(1, 2), ids(4, 7)) + sent(last, target, ids(5, 0), ids(4, 7))
    assert total & MASK == PageSums(target.memory).whole([4, 7])


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda b: b.__setitem__((3, 5, 17), b[3, 5, 17] ^ 1), id="one bit"),
        pytest.param(lambda b: b.__setitem__((0, [5, 8]), b[0, [8, 5]]), id="two pages swapped"),
        pytest.param(lambda b: b.__setitem__(([0, 1], 5), b[[1, 0], 5]), id="K and V swapped"),
        pytest.param(lambda b: b.__setitem__(([0, 2], 5), b[[2, 0], 5]), id="two layers swapped"),
        pytest.param(lambda b: b.__setitem__((2, 8), 0), id="a page that did not land"),
        pytest.param(lambda b: b.__setitem__((2, 8), np.roll(b[2, 8], 64)), id="heads swapped"),
    ],
)
def test_whatever_goes_astray_changes_the_sum(rank, harm) -> None:
    source, target = rank(), rank()
    fill(source)
    total = sent(source, target, ids(1, 2), ids(5, 8))
    harm(target.bytes)
    assert PageSums(target.memory).whole([5, 8]) != total


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("tps", [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_sums_of_ranks_with_other_heads_add_up(rank, layout, tps) -> None:
    sources, targets = (
        [rank(first_head=4 // tp * number, heads=4 // tp, layout=layout) for number in range(tp)] for tp in tps
    )
    for seed, source in enumerate(sources):
        fill(source, seed)
    for target in targets:
        told = sum(moved(source, target, ids(1, 2, 9), ids(5, 8, 0)) for source in sources)
        assert told & MASK == PageSums(target.memory).whole([0, 8, 5])
        target.bytes[1, 8, 3] ^= 128
        assert told & MASK != PageSums(target.memory).whole([0, 8, 5])


def moved(source: Rank, target: Rank, ours: np.ndarray, theirs: np.ndarray) -> int:
    """As `sent`, by the byte ranges of the plan."""
    plan, chunk_sum = PairPlan(source.memory, target.memory), PageSums(source.memory).of_chunk(target.memory)
    total = 0
    for chunk in plan.cut(ours, theirs):
        for local, remote, count in zip(*(column.tolist() for column in plan.runs(chunk)), strict=True):
            ctypes.memmove(remote, local, count)
        total += chunk_sum(chunk)
    return total


def test_ranks_with_nothing_in_common_add_nothing(rank) -> None:
    front, back = rank(0, 2), rank(2, 2)
    assert sent(front, rank(0, 2), ids(), ids()) == 0
    assert PageSums(front.memory).of_chunk(back.memory)(Chunk(ids(1), ids(2))) == 0


def test_every_bit_of_a_page_counts(rank) -> None:
    target = rank(0, 1)
    fill(target)
    sums = PageSums(target.memory)
    before, seen = sums.whole([3]), set()
    for byte in range(ITEM):
        for bit in range(8):
            target.bytes[1, 3, byte] ^= 1 << bit
            seen.add(sums.whole([3]))
            target.bytes[1, 3, byte] ^= 1 << bit
    assert len(seen | {before}) == 8 * ITEM + 1


def test_pages_of_a_device_are_summed_through_the_engines_copy(rank) -> None:
    source, target = rank(), rank()
    fill(source)
    on_device = structs.replace(
        source.memory, kv=tuple(structs.replace(region, device=0) for region in source.memory.kv)
    )
    asked = []

    def copy_pages(region: int, pages: list[int]) -> bytes:
        asked.append(region)
        return source.bytes[region, pages].tobytes()

    sums = PageSums(on_device, copy_pages)
    chunk = Chunk(ids(1, 2), ids(5, 8))
    assert sums.possible
    assert sums.of_chunk(target.memory)(chunk) == PageSums(source.memory).of_chunk(target.memory)(chunk)
    assert asked == list(range(8))
    assert not PageSums(on_device).possible
    assert PageSums(on_device).of_chunk(target.memory) is None


@pytest.mark.parametrize("rate", [0.0, 1 / 64, 0.25, 1.0])
def test_the_share_that_is_sampled_is_the_rate_and_spread_evenly(rate) -> None:
    count = 64_000
    chosen = [number for number in range(count) if sampled(number, rate)]
    assert abs(len(chosen) - rate * count) <= 0.01 * count + 1
    for stride in (2, 8, 64):  # a pattern of the callers' must not hide from it
        assert abs(sum(number % stride == 0 for number in chosen) - len(chosen) / stride) <= 0.02 * count / stride + 2

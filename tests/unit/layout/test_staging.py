"""Slots have one owner at a time; pages gathered into one arrive as if they had been sent as strips."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from pdpool_connector.layout import pool
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import LayoutError
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.staging import SLOT_BYTES, Staging

from tests.unit.layout.model import Rank, apply_runs, moved_by_hand
from tests.unit.layout.test_plan import big, id_lists, ids, sizes

parts = settings(deadline=None, derandomize=True, max_examples=200)


def test_a_slot_has_one_owner_and_none_is_given_when_all_are_taken():
    staging = Staging(2)
    first, second = staging.reserve(), staging.reserve()
    assert (staging.reserve(), staging.reserved) == (None, 2)
    assert {len(slot.bytes) for slot in (first, second)} == {SLOT_BYTES}
    assert {first.address, second.address} == {staging.region.address, staging.region.address + SLOT_BYTES}
    assert staging.region.end == staging.region.address + 2 * SLOT_BYTES
    first.release()
    assert staging.reserve().address == first.address


def test_a_slot_given_back_twice_is_not_taken_from_its_next_owner():
    staging = Staging(1)
    former = staging.reserve()
    former.release()
    latter = staging.reserve()
    former.release()
    assert (staging.reserve(), staging.reserved) == (None, 1)
    latter.release()
    latter.release()
    assert staging.reserved == 0


def test_threads_never_share_a_slot():
    staging, clashes = Staging(3), []

    def work(number):
        for _ in range(300):
            if (slot := staging.reserve()) is not None:
                slot.bytes[:8] = number
                threading.Event().wait(0)
                if (slot.bytes[:8] != number).any():
                    clashes.append(number)
                slot.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (clashes, staging.reserved) == ([], 0)


def test_a_pool_without_slots_is_refused():
    with pytest.raises(ValueError, match="slots is 0, must be at least 1"):
        Staging(0)


def whole(local, remote, aux):
    return Chunk(local, remote, () if aux is None else (aux,))


@st.composite
def scattered(draw):
    """A source with more heads than the target, which lie in the midst of them, and a chunk between the two."""
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    order = draw(st.sampled_from([("separate", (2, 2)), ("separate", (3, 1)), ("interleaved", (3, 3))]))
    shape = {"page_tokens": draw(st.integers(1, 4)), "kv_order": order[0], "head_bytes": order[1]}
    shape["layout"] = draw(st.sampled_from(["NHD", "HND"]))
    total = heads + before + after + (not before and not after)
    source = Rank(pages=5, layers=layers, kv_heads=total, seed=0, **shape)
    theirs = {"total_heads": total, "first_head": before, "kv_heads": heads}
    held = draw(st.integers(1, layers))
    place = {"layers": held, "first_layer": layers - held, "total_layers": layers}
    target = Rank(pages=7, seed=1, **theirs, **place, **shape)
    aux = draw(st.none() | st.tuples(st.integers(0, 2), st.integers(0, 2)))
    return source, target, (*draw(id_lists(5, 7)), aux)


@parts
@given(scattered())
def test_gathered_pages_arrive_as_strips_would_and_nothing_else_is_touched(pair):
    source, target, request = pair
    plan = PairPlan(source.memory, target.memory)
    assert plan.can_stage
    wanted, before = moved_by_hand(source, target, whole(*request)), source.space.copy()
    slot = Staging(1).reserve()
    for chunk in plan.cut(*request, gather=True):
        slot.bytes[:4096] = 0xA5
        staged = plan.stage(chunk, slot) if len(chunk.local_pages) else chunk
        plan.check(staged)
        target.space = apply_runs(source, target, plan.runs(staged), slot)
        gathered = plan.nbytes(chunk) - (12 if chunk.aux else 0)
        assert (slot.bytes[gathered:4096] == 0xA5).all()
    assert np.array_equal(target.space, wanted)
    assert np.array_equal(source.space, before)


@parts
@given(scattered())
def test_what_finds_no_slot_is_cut_into_the_same_bytes_as_strips(pair):
    source, target, request = pair
    plan = PairPlan(source.memory, target.memory)
    wanted = moved_by_hand(source, target, whole(*request))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "SLOT_BYTES", 60)
        patch.setattr(pool, "MAX_CHUNK_BYTES", 50)
        patch.setattr(pool, "MAX_CHUNK_DESCRIPTORS", 8)
        for chunk in plan.cut(*request, gather=True):
            for piece in plan.as_strips(chunk):
                plan.check(piece)
                runs = plan.runs(piece)
                assert len(runs.nbytes) <= 8 or len(piece.local_pages) == 1
                target.space = apply_runs(source, target, runs)
    assert np.array_equal(target.space, wanted)


def test_target_pages_in_a_row_are_one_run_whatever_the_order_of_the_source():
    source, target = Rank(pages=9, kv_heads=2, layers=2), Rank(pages=9, layers=2, total_heads=2)
    plan = PairPlan(source.memory, target.memory)
    (chunk,) = plan.cut(ids(8, 0, 3, 5), ids(6, 4, 7, 5), gather=True)
    staged = plan.stage(chunk, Staging(1).reserve())
    assert plan.runs(staged).nbytes.tolist() == [4 * 4] * 4
    assert len(plan.runs(chunk).nbytes) == 4 * 4 * 2


def test_a_gathered_chunk_fits_into_a_slot():
    source, target = big(90, 4, 64 << 10, page_tokens=16, kv_heads=4), big(90, 4, 32 << 10, page_tokens=16, kv_heads=2)
    target = structs.replace(target, total_heads=4)
    plan = PairPlan(source, target)
    pages = np.arange(90, dtype=np.int32)
    chunks = plan.cut(pages, pages, gather=True)
    assert sizes(chunks) == [16] * 5 + [10], "16 pages of 8 regions with 32 KiB fit into a slot of 4 MiB"
    assert all(plan.nbytes(chunk) <= SLOT_BYTES for chunk in chunks)


@pytest.mark.parametrize(
    ("ours", "theirs", "can"),
    [
        ({"kv_heads": 2}, {"total_heads": 2}, True),
        ({"total_heads": 2}, {"kv_heads": 2}, False),
        ({"kv_heads": 2}, {"kv_heads": 2}, False),
        ({"kv_heads": 2, "page_tokens": 1}, {"total_heads": 2, "page_tokens": 1}, True),
        ({"kv_heads": 2, "total_heads": 3}, {"kv_heads": 2, "total_heads": 3, "first_head": 1}, False),
        ({"total_layers": 4, "kv_heads": 2}, {"total_layers": 4, "first_layer": 2, "total_heads": 2}, False),
    ],
)
def test_only_strips_that_are_whole_pages_at_the_target_can_be_staged(ours, theirs, can):
    plan = PairPlan(Rank(**ours).memory, Rank(**theirs).memory)
    assert plan.can_stage is can
    if not can:
        with pytest.raises(LayoutError, match="staged is given, must be left out"):
            plan.stage(Chunk(ids(1), ids(1)), Staging(1).reserve())


@pytest.mark.parametrize(
    ("page_tokens", "head_bytes", "pages", "worth"),
    [
        (16, 1024, ids(4, 9, 1), True),
        (16, 1025, ids(4, 9, 1), False),
        (3, 64, ids(4, 9, 1), False),
        (3, 64, ids(4, 9, 5), True),
        (1, 64, ids(4, 9, 1, 6), False),
        (1, 64, ids(3, 1, 0, 2), True),
        (16, 64, ids(), False),
    ],
)
def test_only_many_small_strips_are_worth_it(page_tokens, head_bytes, pages, worth):
    fields = {"pages": 10, "page_tokens": page_tokens, "head_bytes": (head_bytes, 1), "layers": 1}
    plan = PairPlan(Rank(kv_heads=2, **fields).memory, Rank(total_heads=2, **fields).memory)
    assert plan.worth_staging(pages) is worth
    assert PairPlan(Rank(**fields).memory, Rank(**fields).memory).worth_staging(pages) is False


def test_ids_are_checked_before_anything_is_gathered():
    plan = PairPlan(Rank(kv_heads=2).memory, Rank(total_heads=2).memory)
    slot = Staging(1).reserve()
    for chunk in (Chunk(ids(5), ids(0)), Chunk(ids(-1), ids(0)), Chunk(ids(0, 1), ids(3, 3))):
        with pytest.raises(LayoutError):
            plan.stage(chunk, slot)


def test_more_than_a_slot_is_refused():
    rank = {"pages": 9, "page_tokens": 1023, "head_bytes": (1 << 9, 1 << 9)}
    plan = PairPlan(Rank(layers=1, kv_heads=2, **rank).memory, Rank(layers=1, total_heads=2, **rank).memory)
    with pytest.raises(LayoutError, match="staged pages have 5237760 bytes, must have at most 4194304"):
        plan.stage(Chunk(ids(0, 1, 2, 3, 4), ids(0, 1, 2, 3, 4)), Staging(1).reserve())

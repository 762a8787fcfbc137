"""Backends between ranks that hold different parts of a model; a third process compares the bytes."""

import time
from contextlib import contextmanager

import numpy as np
import pytest

from tests.integration.backend_cases import CANARY, PLANES, fill, item, move
from tests.integration.backend_peer import Peer

HEAD_BYTES = 16 * 64  # of one page and region: 16 tokens of 16 float32
TOTALS = {"total_layers": 4, "total_heads": 6}


@pytest.fixture(params=PLANES, scope="module")
def crew(request):
    """Three processes of one plane, in which each test opens backends of its own."""
    plane = PLANES[request.param]
    processes = [Peer(plane.env) for _ in range(3)]
    yield plane, processes
    assert [process.end() for process in processes] == [0, 0, 0]


@contextmanager
def ranks(crew, *geometries):
    """A rank with an open backend for each geometry; the last is the target, to which the others may be connected."""
    plane, processes = crew
    opened = processes[: len(geometries)]
    for peer, geometry in zip(opened, geometries, strict=True):
        name = f"r-{time.monotonic_ns():x}"
        peer.post_open(plane.backend, name, host=plane.host, target=peer is opened[-1], **geometry)
    for peer in opened:
        peer.opened()
    try:
        yield opened
    finally:
        for peer in opened:
            assert peer.call("close") == {}
            peer.arena.close()


def part(first_layer, layers, first_head, kv_heads, **fields):
    held = {"first_layer": first_layer, "layers": layers, "first_head": first_head, "kv_heads": kv_heads}
    return {**TOTALS, **held, "pages": 12, "page_bytes": kv_heads * HEAD_BYTES, **fields}


def cells(peer, region, page, memory):
    """One page of one region in the peer's own arena: (token, head, byte)."""
    return item(peer, region, page).reshape(memory.page_tokens, memory.kv_heads, -1)


def land(source, sink, image, source_pages, sink_pages, aux=None, state=None):
    """Put into `image` of the sink's arena what must arrive there, cell by cell; returns how many cells did."""
    ours, theirs = source.remote.memory, sink.remote.memory
    layers = set(range(ours.first_layer, ours.first_layer + ours.layers))
    heads = set(range(ours.first_head, ours.first_head + ours.kv_heads))
    count = 0
    for layer in layers & set(range(theirs.first_layer, theirs.first_layer + theirs.layers)):
        for kind in (0, 1):
            region, to_region = ours.kv[ours.region_of(layer, kind)], theirs.kv[theirs.region_of(layer, kind)]
            start = to_region.address - sink.arena.address
            after = image[start : start + to_region.nbytes]
            after = after.reshape(to_region.items, theirs.page_tokens, theirs.kv_heads, -1)
            for head in heads & set(range(theirs.first_head, theirs.first_head + theirs.kv_heads)):
                for page, to in zip(source_pages, sink_pages, strict=True):
                    cell = cells(source, region, page, ours)[:, head - ours.first_head]
                    after[to, :, head - theirs.first_head] = cell
                    count += 1
    rows = [(ours.aux[0], theirs.aux[0], *aux)] if aux else []
    pools = zip(regions_of(ours), regions_of(theirs), strict=True)
    for number, (region, to_region) in enumerate(pools):
        for index, to in zip(*(state or ((), ())), strict=True):
            if ours.state[0].cut_of(number) is None:
                rows.append((region, to_region, index, to))
            else:
                count += land_units(source, sink, image, number, index, to)
    for region, to_region, index, to in rows:
        start = to_region.address - sink.arena.address + to * to_region.item_bytes
        image[start : start + to_region.item_bytes] = item(source, region, index)
    return count


def regions_of(memory):
    return memory.state[0].regions if memory.state else ()


def land_units(source, sink, image, number, index, to):
    """The units of one item of a cut region that both hold; how many there are."""
    ours, theirs = (dict(units(peer.remote.memory, number)) for peer in (source, sink))
    region = sink.remote.memory.state[0].regions[number]
    start = region.address - sink.arena.address + to * region.item_bytes
    common = ours.keys() & theirs.keys()
    for unit in common:
        at, count = theirs[unit]
        here, _ = ours[unit]
        image[start + at : start + at + count] = item(source, source.remote.memory.state[0].regions[number], index)[
            here : here + count
        ]
    return len(common)


def units(memory, number):
    """(place before the axis, group, number in the model) of each unit of an item, and (offset, bytes) in it."""
    pool = memory.state[0]
    cut = pool.cut_of(number)
    nbytes, at = pool.regions[number].item_bytes // cut.units, 0
    for outer in range(cut.outer):
        for group, held in enumerate(cut.groups):
            first = 0 if (number, group) in COPIED else pool.rank * held
            for unit in range(first, first + held):
                yield (outer, group, unit), (at, nbytes)
                at += nbytes


def moves_rightly(crew, source, sink, *moved):
    """Whether a transfer puts every cell where it belongs and nothing elsewhere; how many cells that was."""
    fill(source, sink)
    untouched, wanted = source.arena.view.copy(), sink.arena.view.copy()
    count = land(source, sink, wanted, *moved)
    assert move(source, sink, *moved)["outcome"] == "done"
    assert np.array_equal(sink.arena.view, wanted)
    assert np.array_equal(source.arena.view, untouched)
    return count


PAIRS = {
    "TP 1 to 2": (part(0, 4, 0, 6), part(0, 4, 3, 3)),
    "TP 2 to 1": (part(0, 4, 3, 3), part(0, 4, 0, 6)),
    "TP 2 to 3": (part(0, 4, 0, 3), part(0, 4, 2, 2)),
    "TP 3 to 2": (part(0, 4, 2, 2), part(0, 4, 0, 3)),
    "PP 1 to 2": (part(0, 4, 0, 6), part(1, 3, 0, 6)),
    "PP 2 to 3, unequal": (part(0, 3, 0, 6), part(1, 2, 0, 6)),
    "PP and TP": (part(1, 3, 4, 2), part(0, 3, 0, 6)),
}


@pytest.mark.parametrize("shape", PAIRS)
def test_what_both_ranks_hold_arrives_and_nothing_else(crew, shape):
    with ranks(crew, *PAIRS[shape]) as (initiator, target):
        assert initiator.connect(target) == {}
        assert moves_rightly(crew, initiator, target, [3, 4, 5, 0, 11], [6, 7, 8, 1, 0], (1, 7)) > 0


def test_pages_that_were_gathered_arrive_as_strips_would(crew):
    with ranks(crew, part(0, 4, 0, 6), part(1, 3, 2, 2)) as (initiator, target):
        assert initiator.connect(target) == {}
        for moved in (([3, 4, 5, 0, 11], [6, 7, 8, 1, 0], (1, 7)), ([7], [3])):
            fill(initiator, target)
            untouched, wanted = initiator.arena.view.copy(), target.arena.view.copy()
            land(initiator, target, wanted, *moved)
            assert move(initiator, target, *moved, stage=True)["outcome"] == "done"
            assert np.array_equal(target.arena.view, wanted)
            assert np.array_equal(initiator.arena.view, untouched)


def test_ranks_with_nothing_in_common_exchange_aux_rows_only(crew):
    with ranks(crew, part(0, 2, 0, 6), part(2, 2, 0, 6)) as (initiator, target):
        assert initiator.connect(target) == {}
        assert moves_rightly(crew, initiator, target, [1, 2], [3, 4], (5, 2)) == 0
        assert moves_rightly(crew, initiator, target, [1, 2], [3, 4]) == 0


def test_two_prefill_ranks_fill_one_decode_rank(crew):
    with ranks(crew, part(0, 4, 0, 2), part(0, 4, 2, 4), part(0, 4, 0, 6)) as (first, second, target):
        fill(first, target, seed=1)
        fill(second, target, seed=2)
        wanted = target.arena.view.copy()
        for initiator in (first, second):
            assert initiator.connect(target) == {}
            land(initiator, target, wanted, [1, 9], [2, 0])
            assert move(initiator, target, [1, 9], [2, 0])["outcome"] == "done"
        assert np.array_equal(target.arena.view, wanted)


def test_a_cache_that_every_rank_has_in_full_moves_whole(crew):
    latent = {"layers": 4, "total_heads": 1, "pages": 12, "page_bytes": 9216}
    with ranks(crew, latent, latent) as (initiator, target):
        assert initiator.connect(target) == {}
        assert moves_rightly(crew, initiator, target, [2, 3], [9, 10], (0, 0)) > 0


def test_state_moves_with_pages_and_aux(crew):
    stateful = part(1, 2, 0, 6, state=[1000, 40, 64])
    with ranks(crew, stateful, stateful) as (initiator, target):
        assert initiator.connect(target) == {}
        assert moves_rightly(crew, initiator, target, [0, 1], [5, 2], (3, 4), ([7, 8, 0], [1, 2, 11])) > 0


COPIED = {(1, 1)}  # (region, group) of the memories below that every rank has


def share(rank, ranks, *held, whole=True):
    """A part whose state is cut: three groups, then one behind another axis beside a copied one, then heads."""
    groups = [4 // ranks, 4 // ranks, 8 // ranks], [4 // ranks, 3], [4 // ranks]
    cuts = [[outer, one] for outer, one in zip((1, 3, 1), groups, strict=True)]
    sizes = [outer * sum(one) * unit for (outer, one), unit in zip(cuts, (6, 2, 4096), strict=True)]
    more = {"state": [*sizes, 40], "state_cuts": [*cuts, None]} if whole else {"state": sizes, "state_cuts": cuts}
    return part(*held, state_rank=rank, state_ranks=ranks, **more)


@pytest.mark.parametrize("shares", [((3, 4), (1, 2)), ((0, 1), (3, 4)), ((2, 4), (2, 4))])
def test_the_share_of_state_that_both_hold_arrives_beside_whole_items(crew, shares):
    with ranks(crew, share(*shares[0], 1, 2, 0, 6), share(*shares[1], 1, 2, 0, 6)) as (initiator, target):
        assert initiator.connect(target) == {}
        moved = [3, 4, 0], [6, 7, 1], (1, 7), ([7, 8, 0], [1, 2, 11])
        assert moves_rightly(crew, initiator, target, *moved) > 0


def test_the_share_of_state_that_both_hold_arrives_where_they_have_no_heads_in_common(crew):
    apart = share(1, 2, 1, 2, 0, 3, whole=False), share(0, 1, 1, 2, 3, 3, whole=False)
    with ranks(crew, *apart) as (initiator, target):
        assert initiator.connect(target) == {}
        assert moves_rightly(crew, initiator, target, [3], [6], None, ([7], [2])) == 2 + 2 + 4 + 3 * (2 + 3) + 2


def test_a_share_of_another_shape_is_refused_by_name(crew):
    with ranks(crew, share(0, 4, 0, 4, 0, 6), share(0, 2, 0, 4, 0, 6) | {"state_ranks": 4}) as (initiator, target):
        answer = initiator.connect(target)
        assert answer["error"] == "IncompatiblePeerError"
        assert (
            "groups[0] of region 0 of state pool 'mamba' is 1 on each of 4 ranks at prefill and 2 on each of 4"
            in answer["message"]
        )


def test_some_regions_of_a_page_move_alone(crew):
    with ranks(crew, part(0, 4, 0, 6), part(0, 4, 3, 3)) as (initiator, target):
        assert initiator.connect(target) == {}
        fill(initiator, target)
        wanted, whole = target.arena.view.copy(), target.arena.view.copy()
        land(initiator, target, whole, [4], [5])
        for region in target.remote.memory.kv[3:6]:
            start = region.address - target.arena.address + 5 * region.item_bytes
            wanted[start : start + region.item_bytes] = whole[start : start + region.item_bytes]
        assert move(initiator, target, [4], [5], span=(3, 6))["outcome"] == "done"
        assert np.array_equal(target.arena.view, wanted)


BAD = {
    "page": ({"local": [0, 12], "remote": [0, 1]}, "local_pages[1] is 12, must be 0..11"),
    "state": ({"local": [], "remote": [], "state": ([0], [0])}, "state names pool 0, must be one of"),
    "span": ({"local": [1], "remote": [1], "span": (0, 9)}, "span is (0, 9), must be within 0..8"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_ids_are_refused_before_anything_is_written(crew, case):
    chunk, message = BAD[case]
    with ranks(crew, part(0, 4, 0, 6), part(0, 4, 3, 3)) as (initiator, target):
        assert initiator.connect(target) == {}
        fill(initiator, target)
        answer = initiator.call("submit", peer=target.name, **chunk)
        assert answer["error"] == "InvalidChunkError"
        assert message in answer["message"]
        assert (target.arena.view == CANARY).all()


def test_a_page_of_other_tokens_is_refused_by_name(crew):
    ours, theirs = part(0, 4, 0, 6), part(0, 4, 3, 3, total_heads=12, page_tokens=32)
    with ranks(crew, ours, theirs) as (initiator, target):
        answer = initiator.connect(target)
        assert answer["error"] == "IncompatiblePeerError"
        assert "page_tokens is 16 at prefill and 32 at decode, must be the same" in answer["message"]
        assert "total_heads is 6 at prefill and 12 at decode" in answer["message"]

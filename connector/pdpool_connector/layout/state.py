"""State between ranks that hold different shares of it: whether it can be moved, and which bytes move.

A group of a cut axis (`StateCut`) is *split* where all ranks of a side together hold as many units of it as those of
the other side: each rank then has a range of them. It is *copied* where each rank holds as many units on both sides
although the rank counts differ (Mamba's B and C with one group): every rank has them, and one rank sends them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .memory import KVMemory
from .pool import Row, whole_row
from .regions import differs, first_of
from .state_pool import StateCut, StatePool


class StateRows(NamedTuple):
    """What moves of one pool between two memories, piece by piece, on both sides in the same order.

    The first `whole` rows are regions that are not cut. The next `split` are what both hold of the shares of one side.
    The rest are groups that are copied.
    """

    local: list[Row]
    remote: list[Row]
    whole: int
    split: int


def state_rows(ours: StatePool, theirs: StatePool, first_layer: int, layers: int, *, heads: bool) -> StateRows:
    """The rows of a pool for the layers that both hold. The memories must be compatible.

    heads: whether the memories have heads in common.
    """
    wholes: list[tuple[Row, Row]] = []
    splits: list[tuple[Row, Row]] = []
    copies: list[tuple[Row, Row]] = []
    for here, there in _regions(ours, theirs, first_layer, layers):
        pair = whole_row(ours.regions[here]), whole_row(theirs.regions[there])
        if ours.cut_of(here) is None:
            wholes += [pair] if heads else []
        elif (ours.rank, ours.ranks) == (theirs.rank, theirs.ranks):
            splits.append(pair)
        elif shares_meet(ours.rank, ours.ranks, theirs.rank, theirs.ranks):
            for local, remote, split in _segments(ours, here, theirs, there):
                (splits if split else copies).append((local, remote))
    rows = [*wholes, *splits, *copies]
    return StateRows([row for row, _ in rows], [row for _, row in rows], len(wholes), len(splits))


def copies_from(source: StatePool, target: StatePool) -> bool:
    """Whether `target` gets copied groups from `source`: the first of the ranks whose shares meet its own."""
    return source.rank == target.rank * source.ranks // max(target.ranks, 1)


def shares_meet(rank: int, ranks: int, other_rank: int, other_ranks: int) -> bool:
    """Whether share `rank` of `ranks` and share `other_rank` of `other_ranks` have something in common."""
    return rank * other_ranks < (other_rank + 1) * ranks and other_rank * ranks < (rank + 1) * other_ranks


def state_differs(local: KVMemory, remote: KVMemory, first_layer: int, layers: int, *, heads: bool) -> list[str]:
    """The reasons that forbid moving state, one line each. `heads`: as for `state_rows`."""
    ours, theirs = ([pool.name for pool in memory.state] for memory in (local, remote))
    if ours != theirs:
        return [differs("state pools (names and order)", ours, theirs)]
    found: list[str] = []
    for pool, other in zip(local.state, remote.state, strict=True):
        found += _pool_differs(local, pool, remote, other, (first_layer, layers, heads))
    return found


def _pool_differs(
    local: KVMemory, pool: StatePool, remote: KVMemory, other: StatePool, common: tuple[int, int, bool]
) -> list[str]:
    first_layer, layers, heads = common
    if not layers or not (heads or any(pool.cuts) or any(other.cuts)):
        return []
    ours, theirs = pool.regions_in(first_layer, layers), other.regions_in(first_layer, layers)
    if not ours and not theirs:
        return []
    named, their_named = (
        [one.layers[at] for at in chosen if one.layers] for one, chosen in ((pool, ours), (other, theirs))
    )
    if named != their_named:
        return [differs(f"layers of state pool {pool.name!r} that both hold", named, their_named)]
    if len(ours) != len(theirs):
        return [differs(f"number of regions of state pool {pool.name!r}", len(ours), len(theirs))]
    if not named and (local.first_layer, local.layers) != (remote.first_layer, remote.layers):
        held = _held(local, remote)
        return [f"state pool {pool.name!r} is of {held}, must be of the same layers unless its `layers` are given"]
    lines = [_region_differs(local, pool, remote, other, pair, heads=heads) for pair in zip(ours, theirs, strict=True)]
    return first_of([line for line in lines if line])


def _region_differs(
    local: KVMemory, pool: StatePool, remote: KVMemory, other: StatePool, pair: tuple[int, int], *, heads: bool
) -> str | None:
    here, there = pair
    cut, other_cut = pool.cut_of(here), other.cut_of(there)
    size, their_size = pool.regions[here].item_bytes, other.regions[there].item_bytes
    named = f"region {here} of state pool {pool.name!r}"
    if cut is not None and other_cut is not None:
        return _cut_differs(named, (cut, size, pool.ranks), (other_cut, their_size, other.ranks))
    if cut is not other_cut:
        how = ["moves whole" if one is None else "is cut" for one in (cut, other_cut)]
        return f"{named} {how[0]} at prefill and {how[1]} at decode (`cuts`), must be the same"
    if heads and (local.first_head, local.kv_heads) != (remote.first_head, remote.kv_heads):
        return (
            f"{named} is of {_held(local, remote)}, must be of the same heads (as many tensor-parallel ranks on both "
            "sides), or `cuts` must say how it is cut: otherwise its items move whole"
        )
    return differs(f"item_bytes of {named}", size, their_size) if heads and size != their_size else None


def _cut_differs(named: str, ours: tuple[StateCut, int, int], theirs: tuple[StateCut, int, int]) -> str | None:
    """For a region that is cut on both sides: its cut, `item_bytes` and number of ranks, at prefill and at decode."""
    (cut, size, ranks), (other, their_size, their_ranks) = ours, theirs
    shape, their_shape = (cut.outer, len(cut.groups)), (other.outer, len(other.groups))
    if shape != their_shape:
        return differs(f"(outer, number of groups) of {named}", shape, their_shape)
    if size // cut.units != their_size // other.units:
        return differs(f"bytes of a unit of {named}", size // cut.units, their_size // other.units)
    for index, (units, their_units) in enumerate(zip(cut.groups, other.groups, strict=True)):
        if units != their_units and units * ranks != their_units * their_ranks:
            return (
                f"groups[{index}] of {named} is {units} on each of {ranks} ranks at prefill and {their_units} on each "
                f"of {their_ranks} at decode, must be as many on all ranks together, or on each"
            )
    return None


def _segments(ours: StatePool, here: int, theirs: StatePool, there: int) -> Iterator[tuple[Row, Row, bool]]:
    """For each segment the rows of what both shares have of it, and whether it is split. The shares differ and meet."""
    cut, other = ours.cut_of(here), theirs.cut_of(there)
    assert cut is not None
    assert other is not None
    local, remote = ours.regions[here], theirs.regions[there]
    unit = local.item_bytes // cut.units
    at = their_at = 0
    for _ in range(cut.outer):
        for units, their_units in zip(cut.groups, other.groups, strict=True):
            split = units * ours.ranks == their_units * theirs.ranks
            first, their_first = (ours.rank * units, theirs.rank * their_units) if split else (0, 0)
            start = max(first, their_first)
            count = min(first + units, their_first + their_units) - start
            yield (
                Row(local.address + (at + start - first) * unit, count * unit, local.item_bytes, local.items),
                Row(
                    remote.address + (their_at + start - their_first) * unit,
                    count * unit,
                    remote.item_bytes,
                    remote.items,
                ),
                split,
            )
            at, their_at = at + units, their_at + their_units


def _regions(ours: StatePool, theirs: StatePool, first_layer: int, layers: int) -> list[tuple[int, int]]:
    """Indices of the regions of the same layers here and there."""
    if not layers:
        return []
    here, there = ours.regions_in(first_layer, layers), theirs.regions_in(first_layer, layers)
    return list(zip(here, there, strict=True))


def _held(local: KVMemory, remote: KVMemory) -> str:
    ours, theirs = (
        f"layers {memory.first_layer}..{memory.first_layer + memory.layers - 1} and "
        f"heads {memory.first_head}..{memory.first_head + memory.kv_heads - 1}"
        for memory in (local, remote)
    )
    return f"{ours} at prefill and of {theirs} at decode"

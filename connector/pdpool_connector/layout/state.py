"""State between ranks that hold different shares of it: whether it can be moved, and which bytes then are.

A group of a cut axis (`memory.StateCut`) is *split* where all ranks of a side together hold as many units of it as
those of the other side: a rank then has a range of them. It is *copied* where each rank of a side holds as many as one
of the other side, though they are more or fewer ranks: it cannot be split among so many (B and C of a Mamba whose heads
are all of one group), and ranks have it in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .memory import KVMemory, StateCut, differs, first_of
from .pool import Row, whole_row


class StateRows(NamedTuple):
    """What of the state moves between two memories, piece by piece, on both sides in the same order.

    The first `whole` rows are regions that are not cut, the next `split` are what both hold of the shares of one side,
    and the rest are groups that are copied: each rank has them, and must get them from one only.
    """

    local: list[Row]
    remote: list[Row]
    whole: int
    split: int


def state_rows(local: KVMemory, remote: KVMemory, first_layer: int, layers: int, *, heads: bool) -> StateRows:
    """The rows for the layers that both hold; `heads`: they have heads in common. The memories must fit together."""
    wholes: list[tuple[Row, Row]] = []
    splits: list[tuple[Row, Row]] = []
    copies: list[tuple[Row, Row]] = []
    for ours, theirs in _regions(local, remote, first_layer, layers):
        pair = whole_row(local.state[ours]), whole_row(remote.state[theirs])
        if local.cut_of(ours) is None:
            wholes += [pair] if heads else []
        elif _share(local) == _share(remote):
            splits.append(pair)
        elif shares_meet(*_share(local), *_share(remote)):
            for here, there, split in _segments(local, ours, remote, theirs):
                (splits if split else copies).append((here, there))
    rows = [*wholes, *splits, *copies]
    return StateRows([row for row, _ in rows], [row for _, row in rows], len(wholes), len(splits))


def copies_from(source: KVMemory, target: KVMemory) -> bool:
    """Whether `target` gets what is copied from `source`: the first of the ranks whose shares meet its own."""
    return source.state_rank == target.state_rank * source.state_ranks // max(target.state_ranks, 1)


def shares_meet(rank: int, ranks: int, other_rank: int, other_ranks: int) -> bool:
    """Whether share `rank` of `ranks` and share `other_rank` of `other_ranks` have something in common."""
    return rank * other_ranks < (other_rank + 1) * ranks and other_rank * ranks < (rank + 1) * other_ranks


def state_differs(local: KVMemory, remote: KVMemory, first_layer: int, layers: int, *, heads: bool) -> list[str]:
    """What forbids moving state of the layers that both hold, one line a reason. `heads`: as for `state_rows`."""
    cut = any(local.state_cuts) or any(remote.state_cuts)
    if not layers or not (heads or cut):
        return []
    ours, theirs = local.state_in(first_layer, layers), remote.state_in(first_layer, layers)
    if not ours and not theirs:
        return []
    told, others = (
        [memory.state_layers[index] for index in chosen if memory.state_layers]
        for memory, chosen in ((local, ours), (remote, theirs))
    )
    if told != others:
        return [differs("layers of the state regions that both hold", told, others)]
    if len(ours) != len(theirs):
        return [differs("number of state regions", len(ours), len(theirs))]
    if not told and (local.first_layer, local.layers) != (remote.first_layer, remote.layers):
        return [f"state is of {_part(local, remote)}, must be of the same layers unless `state_layers` tells them"]
    found = [
        line
        for pair in zip(ours, theirs, strict=True)
        if (line := _region_differs(local, pair[0], remote, pair[1], heads=heads))
    ]
    return first_of(found)


def _region_differs(local: KVMemory, ours: int, remote: KVMemory, theirs: int, *, heads: bool) -> str | None:
    cut, other = local.cut_of(ours), remote.cut_of(theirs)
    size, their_size = local.state[ours].item_bytes, remote.state[theirs].item_bytes
    named = f"state region {ours}"
    if cut is not None and other is not None:
        return _cut_differs(named, (cut, size, local.state_ranks), (other, their_size, remote.state_ranks))
    if cut is not other:
        told = ["moves whole" if one is None else "is cut" for one in (cut, other)]
        return f"{named} {told[0]} here and {told[1]} at the peer (`state_cuts`), must be the same"
    if heads and (local.first_head, local.kv_heads) != (remote.first_head, remote.kv_heads):
        return (
            f"{named} is of {_part(local, remote)}, must be of the same heads (as many tensor-parallel ranks on both "
            "sides), or `state_cuts` must tell how it is cut: otherwise its items move whole"
        )
    return differs(f"item_bytes of {named}", size, their_size) if heads and size != their_size else None


def _cut_differs(named: str, ours: tuple[StateCut, int, int], theirs: tuple[StateCut, int, int]) -> str | None:
    """Of a region that is cut on both sides: how, its `item_bytes` and the number of ranks, here and at the peer."""
    (cut, size, ranks), (other, their_size, their_ranks) = ours, theirs
    shape, their_shape = (cut.outer, len(cut.groups)), (other.outer, len(other.groups))
    if shape != their_shape:
        return differs(f"(outer, number of groups) of {named}", shape, their_shape)
    if size // cut.units != their_size // other.units:
        return differs(f"bytes of a unit of {named}", size // cut.units, their_size // other.units)
    for index, (units, their_units) in enumerate(zip(cut.groups, other.groups, strict=True)):
        if units != their_units and units * ranks != their_units * their_ranks:
            return (
                f"groups[{index}] of {named} is {units} on each of {ranks} ranks here and {their_units} on each of "
                f"{their_ranks} at the peer, must be as many on all ranks together, or on each"
            )
    return None


def _segments(local: KVMemory, ours: int, remote: KVMemory, theirs: int) -> Iterator[tuple[Row, Row, bool]]:
    """For each segment the rows of what both shares have of it, and whether it is split; they differ, and meet."""
    cut, other = local.cut_of(ours), remote.cut_of(theirs)
    assert cut is not None
    assert other is not None
    here, there = local.state[ours], remote.state[theirs]
    unit = here.item_bytes // cut.units
    at = their_at = 0
    for _ in range(cut.outer):
        for units, their_units in zip(cut.groups, other.groups, strict=True):
            split = units * local.state_ranks == their_units * remote.state_ranks
            first, their_first = (local.state_rank * units, remote.state_rank * their_units) if split else (0, 0)
            start = max(first, their_first)
            count = min(first + units, their_first + their_units) - start
            yield (
                Row(here.address + (at + start - first) * unit, count * unit, here.item_bytes, here.items),
                Row(
                    there.address + (their_at + start - their_first) * unit, count * unit, there.item_bytes, there.items
                ),
                split,
            )
            at, their_at = at + units, their_at + their_units


def _regions(local: KVMemory, remote: KVMemory, first_layer: int, layers: int) -> list[tuple[int, int]]:
    """Indices of the state regions of the same layers here and there."""
    if not layers:
        return []
    return list(zip(local.state_in(first_layer, layers), remote.state_in(first_layer, layers), strict=True))


def _share(memory: KVMemory) -> tuple[int, int]:
    return memory.state_rank, memory.state_ranks


def _part(local: KVMemory, remote: KVMemory) -> str:
    ours, theirs = (
        f"layers {memory.first_layer}..{memory.first_layer + memory.layers - 1} and "
        f"heads {memory.first_head}..{memory.first_head + memory.kv_heads - 1}"
        for memory in (local, remote)
    )
    return f"{ours} here and of {theirs} at the peer"

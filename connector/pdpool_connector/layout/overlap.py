"""Which part of the model two memories have in common, and whether it can be moved from one to the other."""

from __future__ import annotations

from typing import Final, NamedTuple

from .memory import KVMemory

MAX_STRIPS: Final = 1023
"""Strips that one page of one region may be cut into: they and an aux row go out in one chunk."""


class Overlap(NamedTuple):
    """Layers `first_layer`.. and of each the heads `first_head`.., by their numbers in the model; empty if one is 0."""

    first_layer: int
    layers: int
    first_head: int
    heads: int

    @property
    def empty(self) -> bool:
        """Whether nothing of the cache has to be moved between the two."""
        return not (self.layers and self.heads)


def overlap(local: KVMemory, remote: KVMemory) -> Overlap:
    """What both memories hold."""
    first_layer, layers = _common(local.first_layer, local.layers, remote.first_layer, remote.layers)
    first_head, heads = _common(local.first_head, local.kv_heads, remote.first_head, remote.kv_heads)
    return Overlap(first_layer, layers, first_head, heads)


def same_heads(local: KVMemory, remote: KVMemory) -> bool:
    """Whether pages move whole, because both hold the same heads."""
    return (local.first_head, local.kv_heads) == (remote.first_head, remote.kv_heads)


def compatible(local: KVMemory, remote: KVMemory) -> list[str]:
    """What forbids moving pages between the memories, one line for each reason; empty if nothing.

    They may hold different parts of one model, but of the same model, in the same format, with pages of the same number
    of tokens. State can be moved only where both hold the same heads, and the same layers unless it is told by layer.
    """
    found = [
        _differs(field, ours, theirs)
        for field in ("model", "dtype", "page_tokens", "head_dim", "total_layers", "total_heads", "regions_per_layer")
        if (ours := getattr(local, field)) != (theirs := getattr(remote, field))
    ]
    if local.aux.item_bytes != remote.aux.item_bytes:
        found.append(_differs("item_bytes of aux", local.aux.item_bytes, remote.aux.item_bytes))
    common = overlap(local, remote)
    if common.empty:
        return found
    if (local.page_tokens, local.regions_per_layer) == (remote.page_tokens, remote.regions_per_layer):
        found += _heads_differ(local, remote, common)
    found += _state_differs(local, remote, common)
    if not same_heads(local, remote) and local.page_tokens > MAX_STRIPS:
        found.append(
            f"page_tokens is {local.page_tokens}, must be at most {MAX_STRIPS} where the two sides hold different heads"
        )
    return found


def _heads_differ(local: KVMemory, remote: KVMemory, common: Overlap) -> list[str]:
    """The first region whose heads take other bytes at the peer, where there is one; mostly all do then."""
    found = []
    for layer in range(common.first_layer, common.first_layer + common.layers):
        for part in range(local.regions_per_layer):
            region = local.region_of(layer, part)
            ours, theirs = local.kv[region].item_bytes, remote.kv[remote.region_of(layer, part)].item_bytes
            if ours * remote.kv_heads != theirs * local.kv_heads:
                found.append(
                    f"item_bytes of kv region {region} (layer {layer}) is {ours} here for {local.kv_heads} heads and "
                    f"{theirs} at the peer for {remote.kv_heads} heads, must be the same for each head"
                )
    more = f" ({len(found) - 1} more regions differ)" if len(found) > 1 else ""
    return [line + more for line in found[:1]]


def _state_differs(local: KVMemory, remote: KVMemory, common: Overlap) -> list[str]:
    ours, theirs = (memory.state_in(common.first_layer, common.layers) for memory in (local, remote))
    if not ours and not theirs:
        return []
    layers = [
        [memory.state_layers[index] for index in chosen if memory.state_layers]
        for memory, chosen in ((local, ours), (remote, theirs))
    ]
    if layers[0] != layers[1]:
        return [_differs("layers of the state regions that both hold", *layers)]
    if len(ours) != len(theirs):
        return [_differs("number of state regions", len(ours), len(theirs))]
    if not same_heads(local, remote) or (not layers[0] and _part(local) != _part(remote)):
        parts = f"{_part(local)} here and of {_part(remote)} at the peer"
        needed = "of the same heads (as many tensor-parallel ranks on both sides)"
        unless = "and of the same layers unless `state_layers` tells them: items of state move whole"
        return [f"state is of {parts}, must be {needed}, {unless}"]
    return [
        _differs(f"item_bytes of state region {index}", local.state[index].item_bytes, remote.state[other].item_bytes)
        for index, other in zip(ours, theirs, strict=True)
        if local.state[index].item_bytes != remote.state[other].item_bytes
    ]


def _part(memory: KVMemory) -> str:
    return (
        f"layers {memory.first_layer}..{memory.first_layer + memory.layers - 1} and "
        f"heads {memory.first_head}..{memory.first_head + memory.kv_heads - 1}"
    )


def _differs(field: str, ours: object, theirs: object) -> str:
    return f"{field} is {ours!r} here and {theirs!r} at the peer, must be the same"


def _common(first: int, count: int, other_first: int, other_count: int) -> tuple[int, int]:
    start = max(first, other_first)
    return start, max(0, min(first + count, other_first + other_count) - start)

"""Which part of the model two memories have in common, and whether it can be moved from one to the other."""

from __future__ import annotations

from typing import Final, NamedTuple

from .memory import KVMemory, differs, first_of
from .state import state_differs

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
    of tokens. State of layers that both hold must be told by layer, unless these are all that either holds. What of it
    moves whole needs the same heads on both sides; what is cut needs cuts of the same shape.
    """
    found = [
        differs(field, ours, theirs)
        for field in ("model", "dtype", "page_tokens", "head_dim", "total_layers", "total_heads", "regions_per_layer")
        if (ours := getattr(local, field)) != (theirs := getattr(remote, field))
    ]
    if local.aux.item_bytes != remote.aux.item_bytes:
        found.append(differs("item_bytes of aux", local.aux.item_bytes, remote.aux.item_bytes))
    common = overlap(local, remote)
    state = state_differs(local, remote, common.first_layer, common.layers, heads=common.heads > 0)
    if common.empty:
        return found + state
    if (local.page_tokens, local.regions_per_layer) == (remote.page_tokens, remote.regions_per_layer):
        found += _heads_differ(local, remote, common)
    found += state
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
    return first_of(found)


def _common(first: int, count: int, other_first: int, other_count: int) -> tuple[int, int]:
    start = max(first, other_first)
    return start, max(0, min(first + count, other_first + other_count) - start)

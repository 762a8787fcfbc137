"""Which part of the model two memories have in common, and whether it can be moved from one to the other.

Formula for a layer's heads: head h of H takes the share [h/H, (h+1)/H) of the layer. Of the heads that both memories
hold, head h goes from the rank whose share of the reference heads holds the point where h begins within the target's
share. Where all layers have the same heads, these are the heads that both hold. Where a layer has fewer heads than
ranks, several ranks hold a head, and exactly one of them sends it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from .memory import KVMemory
from .regions import differs, first_of
from .state import state_differs

MAX_STRIPS: Final = 1023
"""Most strips of one page of one region. With aux rows they stay near what Mooncake takes at once."""


class Overlap(NamedTuple):
    """Layers `first_layer`.. and of each the reference heads `first_head`.., by their numbers in the model."""

    first_layer: int
    layers: int
    first_head: int
    heads: int

    @property
    def empty(self) -> bool:
        """Whether no page moves between the two."""
        return not (self.layers and self.heads)


class Cell(NamedTuple):
    """What moves of one KV region: the heads `first_head`.. of one layer, by their numbers in the model.

    part: 0 is K, or K and V together; 1 is V.
    """

    layer: int
    part: int
    first_head: int
    heads: int


def overlap(local: KVMemory, remote: KVMemory) -> Overlap:
    """The layers and reference heads that both memories hold."""
    first_layer, layers = _common(local.first_layer, local.layers, remote.first_layer, remote.layers)
    first_head, heads = _common(local.first_head, local.kv_heads, remote.first_head, remote.kv_heads)
    return Overlap(first_layer, layers, first_head, heads)


def cells_of(local: KVMemory, remote: KVMemory) -> list[Cell]:
    """What moves from `local` to `remote`, in the order of the KV regions. The memories must be `compatible`."""
    common = overlap(local, remote)
    if common.empty:
        return []
    cells = []
    for layer in range(common.first_layer, common.first_layer + common.layers):
        first, heads = _heads_that_move(local, remote, layer)
        if heads:
            cells += [Cell(layer, part, first, heads) for part in range(local.regions_per_layer)]
    return cells


def moves_whole(local: KVMemory, remote: KVMemory, cells: list[Cell]) -> bool:
    """Whether pages move whole: in each cell all heads that both sides hold."""
    for cell in cells:
        held = (cell.first_head, cell.heads)
        for memory in (local, remote):
            one = memory.heads_of(cell.layer)
            if held != (one.first_head, one.kv_heads):
                return False
    return True


def compatible(local: KVMemory, remote: KVMemory) -> list[str]:
    """The reasons that forbid moving from `local` to `remote`, one line each; empty if there are none.

    The memories may hold different parts of one model, in the same format, with pages of the same number of tokens.
    """
    fields = ("model", "dtype", "page_tokens", "head_dim", "total_layers", "total_heads")
    orders = ("layout", "kv_order", "regions_per_layer")
    found = [
        differs(field, ours, theirs)
        for field in (*fields, *orders)
        if (ours := getattr(local, field)) != (theirs := getattr(remote, field))
    ]
    aux, their_aux = ([region.item_bytes for region in memory.aux] for memory in (local, remote))
    if aux != their_aux:
        found.append(differs("item_bytes of the aux regions", aux, their_aux))
    common = overlap(local, remote)
    state = state_differs(local, remote, common.first_layer, common.layers, heads=common.heads > 0)
    if common.empty or any(getattr(local, field) != getattr(remote, field) for field in ("page_tokens", *orders)):
        return found + state
    found += first_of(_heads_differ(local, remote, common))
    found += state
    if local.strips > MAX_STRIPS and not moves_whole(local, remote, cells_of(local, remote)):
        found.append(
            f"a page has {local.strips} strips (page_tokens {local.page_tokens}, layout {local.layout}), must have at "
            f"most {MAX_STRIPS} where the two sides hold different heads"
        )
    return found


def _heads_that_move(local: KVMemory, remote: KVMemory, layer: int) -> tuple[int, int]:
    """First and number; see the formula in the module's docstring."""
    ours, theirs = local.heads_of(layer), remote.heads_of(layer)
    first, count = _common(ours.first_head, ours.kv_heads, theirs.first_head, theirs.kv_heads)
    total, reference = ours.total_heads, local.total_heads
    # Shares in units of 1 / (total * reference).
    low, high = local.first_head * total, (local.first_head + local.kv_heads) * total
    target = remote.first_head * total
    if target >= high:
        return first, 0
    start = first if target >= low else max(first, -(-low // reference))
    return start, max(0, min(first + count, -(-high // reference)) - start)


def _heads_differ(local: KVMemory, remote: KVMemory, common: Overlap) -> list[str]:
    """A line for each region whose heads differ between prefill and decode."""
    found = []
    for layer in range(common.first_layer, common.first_layer + common.layers):
        ours, theirs = local.heads_of(layer), remote.heads_of(layer)
        shape, their_shape = (ours.total_heads, ours.head_dim), (theirs.total_heads, theirs.head_dim)
        if (local.heads or remote.heads) and shape != their_shape:
            found.append(differs(f"(total_heads, head_dim) of layer {layer}", shape, their_shape))
            continue
        for part in range(local.regions_per_layer):
            region = local.region_of(layer, part)
            size, their_size = local.kv[region].item_bytes, remote.kv[remote.region_of(layer, part)].item_bytes
            if size * theirs.kv_heads != their_size * ours.kv_heads:
                found.append(
                    f"item_bytes of kv region {region} (layer {layer}) is {size} at prefill for {ours.kv_heads} heads "
                    f"and {their_size} at decode for {theirs.kv_heads} heads, must be the same for each head"
                )
    return found


def _common(first: int, count: int, other_first: int, other_count: int) -> tuple[int, int]:
    start = max(first, other_first)
    return start, max(0, min(first + count, other_first + other_count) - start)

"""A memory with bytes in it, small enough to move each cell by hand."""

from fractions import Fraction

import numpy as np
from pdpool_connector.layout.memory import KVMemory, LayerHeads, Region, StatePool

AUX_BYTES = 12
GUARD = 7  # bytes of nobody between regions
POOL = "mamba"


class Rank:
    """One rank's memory: `space[a - base]` is the byte at address `a`.

    head_bytes: of a head of one token of K and of V, or of a latent, for each element of `head_dim`. state: item bytes
    of the regions of one pool; `more_state`: of further pools, by name.
    """

    def __init__(
        self,
        *,
        pages=5,
        aux_rows=3,
        aux=(AUX_BYTES,),
        state=(),
        state_items=4,
        state_layers=(),
        state_cuts=(),
        state_rank=0,
        state_ranks=0,
        more_state=None,
        head_bytes=(2, 2),
        seed=0,
        **fields,
    ):
        defaults = {"page_tokens": 2, "layers": 2, "kv_heads": 1, "head_dim": 1, "dtype": "uint8", "model": "m"}
        fields = {**defaults, **fields}
        heads = fields.get("heads") or [LayerHeads(fields["kv_heads"], fields["head_dim"], 0, 0)] * fields["layers"]
        self.head_bytes = head_bytes
        each = head_bytes if fields.get("kv_order", "separate") == "separate" else (sum(head_bytes),)
        sizes = [fields["page_tokens"] * one.kv_heads * one.head_dim * count for one in heads for count in each]
        pools = {**({POOL: state} if state else {}), **(more_state or {})}
        items = [(size, pages) for size in sizes]
        items += [(size, state_items) for regions in pools.values() for size in regions]
        items += [(size, aux_rows) for size in aux]
        nbytes = GUARD + sum(size * count + GUARD for size, count in items)
        self.space = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
        self.base = self.space.ctypes.data
        address, made_of = self.base + GUARD, []
        for size, count in items:
            made_of.append(Region(address, size, count))
            address = made_of[-1].end + GUARD
        left = iter(made_of[len(sizes) : len(made_of) - len(aux)])
        details = {POOL: (tuple(state_layers), tuple(state_cuts), state_rank, state_ranks)}
        made = [
            StatePool(name, tuple(next(left) for _ in regions), *details.get(name, ()))
            for name, regions in pools.items()
        ]
        self.memory = KVMemory(
            kv=tuple(made_of[: len(sizes)]), aux=tuple(made_of[len(made_of) - len(aux) :]), state=tuple(made), **fields
        )

    def items(self, region):
        """A writable view of one region's items: uint8 (items, item bytes)."""
        start = region.address - self.base
        return self.space[start : start + region.nbytes].reshape(region.items, region.item_bytes)

    def pages(self, layer, part):
        """A writable view of one layer's K or V, by the layer's number in the model: (page, token, head, byte)."""
        memory = self.memory
        held, tokens = memory.heads_of(layer), memory.page_tokens
        nbytes = self.head_bytes[part] * held.head_dim
        at = layer - memory.first_layer
        if memory.kv_order == "packed":
            pages, nbytes = self.items(memory.kv[at]), sum(self.head_bytes) * held.head_dim
        elif memory.kv_order == "interleaved":
            pages = self.items(memory.kv[at]).reshape(memory.pages, 2, -1)[:, part]
        else:
            pages = self.items(memory.kv[at * len(self.head_bytes) + part])
        if memory.layout == "HND":
            found = pages.reshape(memory.pages, held.kv_heads, tokens, nbytes).swapaxes(1, 2)
        else:
            found = pages.reshape(memory.pages, tokens, held.kv_heads, nbytes)
        if memory.kv_order == "packed":
            start = sum(self.head_bytes[:part]) * held.head_dim
            return found[..., start : start + self.head_bytes[part] * held.head_dim]
        return found


def heads_by_hand(ours, theirs, layer):
    """Heads of a layer that `ours` sends to `theirs`, by their numbers in the model."""
    here, there = ours.heads_of(layer), theirs.heads_of(layer)
    low, high = (Fraction(head, ours.total_heads) for head in (ours.first_head, ours.first_head + ours.kv_heads))
    target = Fraction(theirs.first_head, theirs.total_heads)
    common = set(range(here.first_head, here.first_head + here.kv_heads)) & set(
        range(there.first_head, there.first_head + there.kv_heads)
    )
    return [head for head in common if low <= max(target, Fraction(head, here.total_heads)) < high]


def moved_by_hand(source, target, chunk):
    """The target's space after a whole chunk, cell by cell."""
    after = Rank.__new__(Rank)
    after.memory, after.head_bytes = target.memory, target.head_bytes
    after.space, after.base = target.space.copy(), target.base
    ours, theirs = source.memory, target.memory
    reference = set(range(ours.first_head, ours.first_head + ours.kv_heads)) & set(
        range(theirs.first_head, theirs.first_head + theirs.kv_heads)
    )
    for layer in range(theirs.first_layer, theirs.first_layer + theirs.layers):
        if not ours.first_layer <= layer < ours.first_layer + ours.layers or not reference:
            continue
        for head in heads_by_hand(ours, theirs, layer):
            for part in range(len(source.head_bytes)):
                for page, to in zip(chunk.local_pages, chunk.remote_pages, strict=True):
                    cell = source.pages(layer, part)[page, :, head - ours.heads_of(layer).first_head]
                    after.pages(layer, part)[to, :, head - theirs.heads_of(layer).first_head] = cell
    for items in chunk.state:
        for mine, other in _common_state(ours, theirs, items.pool):
            for item, to in zip(items.local, items.remote, strict=True):
                after.items(other)[to] = source.items(mine)[item]
    for here, there in chunk.aux:
        for mine, other in zip(ours.aux, theirs.aux, strict=True):
            after.items(other)[there] = source.items(mine)[here]
    return after.space


def _common_state(ours, theirs, number):
    """Regions of a pool of the same layer; without layers all of them, in order."""
    mine, other = ours.state[number], theirs.state[number]
    if not mine.layers:
        return zip(mine.regions, other.regions, strict=True)
    pairs = []
    for layer in range(ours.total_layers):
        here, there = (
            [region for region, its in zip(pool.regions, pool.layers, strict=True) if its == layer]
            for pool in (mine, other)
        )
        if here and there:
            pairs += zip(here, there, strict=True)
    return pairs


def apply_runs(source, target, runs, slot=None):
    """The target's space after copying byte ranges from the source or a slot; fails where one leaves all of them."""
    space = target.space.copy()
    for local, remote, count in zip(*(column.tolist() for column in runs), strict=True):
        to = remote - target.base
        assert to >= 0
        assert to + count <= len(space)
        space[to : to + count] = _bytes_at(local, count, source, slot)
    return space


def _bytes_at(address, count, source, slot):
    start = address - source.base
    if start >= 0 and start + count <= len(source.space):
        return source.space[start : start + count]
    assert slot is not None
    start = address - slot.address
    assert start >= 0
    assert start + count <= len(slot.bytes)
    return slot.bytes[start : start + count]

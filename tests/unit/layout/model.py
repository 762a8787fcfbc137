"""A memory with bytes in it, small enough to move each cell by hand."""

import numpy as np
from pdpool_connector.layout.memory import KVMemory, Region

AUX_BYTES = 12
GUARD = 7  # bytes of nobody between regions


class Rank:
    """One rank's memory: `space[a - base]` is the byte at address `a`."""

    def __init__(self, *, pages=5, aux_rows=3, state=(), state_items=4, head_bytes=(2, 2), seed=0, **fields):
        defaults = {"page_tokens": 2, "layers": 2, "kv_heads": 1, "head_dim": 1, "dtype": "uint8", "model": "m"}
        fields = {**defaults, **fields}
        sizes = [fields["page_tokens"] * fields["kv_heads"] * count for count in head_bytes] * fields["layers"]
        self.head_bytes = head_bytes
        items = [(size, pages) for size in sizes] + [(size, state_items) for size in state] + [(AUX_BYTES, aux_rows)]
        nbytes = GUARD + sum(size * count + GUARD for size, count in items)
        self.space = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
        self.base = self.space.ctypes.data
        address, regions = self.base + GUARD, []
        for size, count in items:
            regions.append(Region(address, size, count))
            address = regions[-1].end + GUARD
        kv, rest = tuple(regions[: len(sizes)]), tuple(regions[len(sizes) : -1])
        self.memory = KVMemory(kv=kv, aux=regions[-1], state=rest, **fields)

    def items(self, region):
        """A writable view of one region's items: uint8 (items, item bytes)."""
        start = region.address - self.base
        return self.space[start : start + region.nbytes].reshape(region.items, region.item_bytes)

    def pages(self, layer, part):
        """A writable view of one layer's K or V, by the layer's number in the model: (page, token, head, byte)."""
        memory = self.memory
        region = memory.kv[(layer - memory.first_layer) * len(self.head_bytes) + part]
        return self.items(region).reshape(region.items, memory.page_tokens, memory.kv_heads, self.head_bytes[part])


def moved_by_hand(source, target, chunk):
    """The target's space after a whole chunk, cell by cell."""
    after = Rank.__new__(Rank)
    after.memory, after.head_bytes = target.memory, target.head_bytes
    after.space, after.base = target.space.copy(), target.base
    ours, theirs = source.memory, target.memory
    for layer in range(theirs.first_layer, theirs.first_layer + theirs.layers):
        for head in range(theirs.first_head, theirs.first_head + theirs.kv_heads):
            if not ours.first_layer <= layer < ours.first_layer + ours.layers:
                continue
            if not ours.first_head <= head < ours.first_head + ours.kv_heads:
                continue
            for part in range(len(source.head_bytes)):
                for page, to in zip(chunk.local_pages, chunk.remote_pages, strict=True):
                    cell = source.pages(layer, part)[page, :, head - ours.first_head]
                    after.pages(layer, part)[to, :, head - theirs.first_head] = cell
    if chunk.state is not None:
        for mine, other in _common_state(ours, theirs):
            for item, to in zip(*chunk.state, strict=True):
                after.items(other)[to] = source.items(mine)[item]
    for here, there in chunk.aux:
        after.items(theirs.aux)[there] = source.items(ours.aux)[here]
    return after.space


def _common_state(ours, theirs):
    """Regions of the state of the same layer; without layers all of them, in order."""
    if not ours.state_layers:
        return zip(ours.state, theirs.state, strict=True)
    pairs = []
    for layer in range(ours.total_layers):
        mine, others = (
            [region for region, its in zip(memory.state, memory.state_layers, strict=True) if its == layer]
            for memory in (ours, theirs)
        )
        if mine and others:
            pairs += zip(mine, others, strict=True)
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

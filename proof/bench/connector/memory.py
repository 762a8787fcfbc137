"""The KV memory that is moved, and which pages a request has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.memory import KVMemory

AUX_BYTES = 256


@dataclass(frozen=True)
class Shape:
    """`pages` pages over `layers` layers, each `item_bytes` in K and as many in V of every layer; as many aux rows."""

    layers: int
    item_bytes: int
    pages: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return 2 * self.layers * self.item_bytes

    def lay_out(self, arena: HostArena) -> KVMemory:
        """The registered view of `arena`."""
        size = self.item_bytes * self.pages
        return KVMemory(
            kv=tuple(arena.region(index * size, self.item_bytes, self.pages) for index in range(2 * self.layers)),
            aux=(arena.region(2 * self.layers * size, AUX_BYTES, self.pages),),
            page_tokens=16,
            layers=self.layers,
            kv_heads=1,
            head_dim=self.item_bytes // 32,
            dtype="float16",
            model="bench",
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the arena that holds it."""
        return self.pages * (self.page_bytes + AUX_BYTES)


def places(shape: Shape, each: int, slots: int, *, scattered: bool, seed: int) -> list[NDArray[np.int32]]:
    """Page ids of `slots` requests with `each` pages; scattered ones lie anywhere in the whole memory."""
    if slots * each > shape.pages:
        raise ValueError(f"{slots} requests of {each} pages do not fit into {shape.pages}")
    pool = np.arange(shape.pages, dtype=np.int32)
    if scattered:
        pool = np.random.default_rng(seed).permutation(pool)
    return [pool[slot * each : (slot + 1) * each] for slot in range(slots)]

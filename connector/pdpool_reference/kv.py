"""The paged KV cache, who owns its pages, and the aux rows that go with a hand-off."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.memory import KVMemory, Region
from pdpool_connector.layout.pairing import ModelShard

from pdpool_reference.config import ModelConfig
from pdpool_reference.shard import shards_of

PAGE_TOKENS: Final = 16
"""Tokens in one page."""
AUX_ROWS: Final = 256
"""Aux rows of one engine; each hand-off under way has one."""
_AUX_WORDS: Final = 8
_AUX_VALID: Final = 0x5044_504F_4F4C_0001
"""First word of a written row. A cleared or half-written row has another one."""
_ALIGNMENT: Final = 4096


@dataclass(frozen=True, slots=True)
class AuxRow:
    """What decode needs beside the cache: the first token of the answer, and the prompt's length to check against."""

    first_token: int
    prompt_tokens: int


class PagedKV:
    """K and V of `pages` pages in one arena, one buffer each per layer, and `AUX_ROWS` aux rows.

    Args:
        config: The model.
        pages: How many pages.
        arena: Memory of at least `PagedKV.nbytes(config, pages, shard)` bytes; a new arena by default.
        shard: What the rank holds of the model; the whole model by default.

    `k` and `v` hold one float32 array (pages, PAGE_TOKENS, kv_heads, head_dim) for each layer of the shard. `memory`
    describes the same bytes to the connector.
    """

    def __init__(
        self, config: ModelConfig, pages: int, arena: HostArena | None = None, shard: ModelShard | None = None
    ) -> None:
        shard = shard or shards_of(config)[0]
        self.pages = pages
        self.shard = shard
        self.arena = HostArena(self.nbytes(config, pages, shard)) if arena is None else arena
        shape = (pages, PAGE_TOKENS, shard.kv_heads, config.head_dim)
        item_bytes = _page_bytes(config, shard)
        stride = _aligned(item_bytes * pages)
        self.k: list[NDArray[np.float32]] = []
        self.v: list[NDArray[np.float32]] = []
        regions: list[Region] = []
        for index in range(2 * shard.layers):
            buffers = self.v if index % 2 else self.k
            buffers.append(self.arena.array(index * stride, shape, np.float32))
            regions.append(self.arena.region(index * stride, item_bytes, pages))
        aux_offset = 2 * shard.layers * stride
        self._aux: NDArray[np.int64] = self.arena.array(aux_offset, (AUX_ROWS, _AUX_WORDS), np.int64)
        self.memory = KVMemory(
            kv=tuple(regions),
            aux=(self.arena.region(aux_offset, _AUX_WORDS * 8, AUX_ROWS),),
            page_tokens=PAGE_TOKENS,
            head_dim=config.head_dim,
            dtype="float32",
            model=config.name,
            first_layer=shard.first_layer,
            layers=shard.layers,
            total_layers=config.layers,
            first_head=shard.first_head,
            kv_heads=shard.kv_heads,
            total_heads=config.kv_heads,
        )

    @staticmethod
    def nbytes(config: ModelConfig, pages: int, shard: ModelShard | None = None) -> int:
        """Return the bytes of arena that `pages` pages and the aux rows of a shard need."""
        shard = shard or shards_of(config)[0]
        return 2 * shard.layers * _aligned(_page_bytes(config, shard) * pages) + AUX_ROWS * _AUX_WORDS * 8

    def write_aux(self, slot: int, row: AuxRow) -> None:
        """Fill an aux row."""
        self._aux[slot] = (_AUX_VALID, row.first_token, row.prompt_tokens, *[0] * (_AUX_WORDS - 3))

    def read_aux(self, slot: int) -> AuxRow | None:
        """Return the row, or None when nothing was written since `clear_aux`."""
        valid, first_token, prompt_tokens = (int(word) for word in self._aux[slot, :3])
        return AuxRow(first_token, prompt_tokens) if valid == _AUX_VALID else None

    def clear_aux(self, slot: int) -> None:
        """Empty a row, so that the row of its former owner is not taken for a new one."""
        self._aux[slot] = 0


class PageAllocator:
    """Which of the ids 0..total-1 are free. Not thread-safe.

    Ids go out lowest first at the start, then most recently freed first, in no promised order.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"total is {total}, must be at least 1")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._used = np.zeros(total, np.bool_)

    @property
    def available(self) -> int:
        """How many ids are free."""
        return len(self._free)

    def alloc(self, count: int) -> NDArray[np.int32] | None:
        """Take `count` ids: int32 (count,), or None, and nothing is taken, when fewer are free."""
        if count < 0:
            raise ValueError(f"count is {count}, must not be negative")
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        ids = np.array(self._free[cut:][::-1], np.int32)
        del self._free[cut:]
        self._used[ids] = True
        return ids

    def free(self, ids: NDArray[np.int32]) -> None:
        """Give ids back. Raises ValueError, and takes none back, when one is not out or is given twice."""
        given = [int(id_) for id_ in ids]
        if len(set(given)) != len(given):
            raise ValueError(f"ids {sorted(given)} are to be freed, each must be given once")
        for id_ in given:
            if not 0 <= id_ < self.total:
                raise ValueError(f"id {id_} is to be freed, must be within 0..{self.total - 1}")
            if not self._used[id_]:
                raise ValueError(f"id {id_} is to be freed, but is free already")
        self._used[given] = False
        self._free.extend(given)


def _page_bytes(config: ModelConfig, shard: ModelShard) -> int:
    return PAGE_TOKENS * shard.kv_heads * config.head_dim * 4


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

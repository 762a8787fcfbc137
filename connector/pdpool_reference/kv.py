"""The paged KV cache, who owns its pages, and the aux rows that go with a hand-off."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.memory import KVMemory, Region
from pdpool_connector.layout.pairing import ModelShard

from pdpool_reference.config import ModelConfig
from pdpool_reference.shard import parts_of

PAGE_TOKENS: Final = 16
"""Tokens in one page."""
AUX_ROWS: Final = 256
"""Aux rows of one engine; each request under way in a hand-off has one."""
_AUX_WORDS: Final = 8
_AUX_VALID: Final = 0x5044_504F_4F4C_0001
"""First word of a row that was written: a cleared or half-written row has another."""
_ALIGNMENT: Final = 4096


@dataclass(frozen=True, slots=True)
class AuxRow:
    """What decode needs beside the cache: the first token of the answer, and the prompt's length to check against."""

    first_token: int
    prompt_tokens: int


class PagedKV:
    """K and V of `pages` pages in one arena, one buffer each per layer, and `AUX_ROWS` aux rows.

    k, v: for each layer of the part float32 (pages, PAGE_TOKENS, kv_heads, head_dim); memory: the same as registered
    for hand-offs. part: what of the model the rank holds; all of it unless given.
    The arena is made here unless one is given; it must then hold `PagedKV.nbytes(config, pages, part)` bytes.
    """

    def __init__(
        self, config: ModelConfig, pages: int, arena: HostArena | None = None, part: ModelShard | None = None
    ) -> None:
        part = part or parts_of(config)[0]
        self.pages = pages
        self.part = part
        self.arena = HostArena(self.nbytes(config, pages, part)) if arena is None else arena
        shape = (pages, PAGE_TOKENS, part.kv_heads, config.head_dim)
        item_bytes = _page_bytes(config, part)
        stride = _aligned(item_bytes * pages)
        self.k: list[NDArray[np.float32]] = []
        self.v: list[NDArray[np.float32]] = []
        regions: list[Region] = []
        for index in range(2 * part.layers):
            buffers = self.v if index % 2 else self.k
            buffers.append(self.arena.array(index * stride, shape, np.float32))
            regions.append(self.arena.region(index * stride, item_bytes, pages))
        aux_offset = 2 * part.layers * stride
        self._aux: NDArray[np.int64] = self.arena.array(aux_offset, (AUX_ROWS, _AUX_WORDS), np.int64)
        self.memory = KVMemory(
            kv=tuple(regions),
            aux=(self.arena.region(aux_offset, _AUX_WORDS * 8, AUX_ROWS),),
            page_tokens=PAGE_TOKENS,
            head_dim=config.head_dim,
            dtype="float32",
            model=config.name,
            **part.geometry,
        )

    @staticmethod
    def nbytes(config: ModelConfig, pages: int, part: ModelShard | None = None) -> int:
        """Bytes of arena that `pages` pages and the aux rows of a part (the whole model unless given) need."""
        part = part or parts_of(config)[0]
        return 2 * part.layers * _aligned(_page_bytes(config, part) * pages) + AUX_ROWS * _AUX_WORDS * 8

    def write_aux(self, slot: int, row: AuxRow) -> None:
        """Fill an aux row."""
        self._aux[slot] = (_AUX_VALID, row.first_token, row.prompt_tokens, *[0] * (_AUX_WORDS - 3))

    def read_aux(self, slot: int) -> AuxRow | None:
        """The row, or None when nothing was written since `clear_aux`."""
        valid, first_token, prompt_tokens = (int(word) for word in self._aux[slot, :3])
        return AuxRow(first_token, prompt_tokens) if valid == _AUX_VALID else None

    def clear_aux(self, slot: int) -> None:
        """Empty a row, so that what its former owner left is not taken for a new one."""
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
        """Give ids back. Raises ValueError, and takes none back, when one is not out or stands there twice."""
        given = [int(id_) for id_ in ids]
        if len(set(given)) != len(given):
            raise ValueError(f"ids {sorted(given)} are to be freed, must each stand there once")
        for id_ in given:
            if not 0 <= id_ < self.total:
                raise ValueError(f"id {id_} is to be freed, must be within 0..{self.total - 1}")
            if not self._used[id_]:
                raise ValueError(f"id {id_} is to be freed, but is free already")
        self._used[given] = False
        self._free.extend(given)


def _page_bytes(config: ModelConfig, part: ModelShard) -> int:
    return PAGE_TOKENS * part.kv_heads * config.head_dim * 4


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

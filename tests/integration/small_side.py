"""One live connector with a small cache of its own, for tests that hold both sides in one process."""

from typing import Any

import numpy as np
from pdpool_connector import (
    ConnectorConfig,
    DecodeConnector,
    DecodeTransfer,
    HostArena,
    KVMemory,
    PrefillConnector,
)
from pdpool_connector.backends.base import TransferBackend
from pdpool_connector.layout.pairing import ModelShard, shard_model

from tests.integration.shards import kv_fields

PAGE, ROW, ROWS = 256, 64, 8
(WHOLE,) = shard_model([1], 1)
"""One layer with one head."""


class Side:
    """A connector and its cache, uint8 (K and V of one layer, pages, 256 for each head), with aux rows, uint8 (8, 64).

    `shard`: which part of the model it holds, one layer of it. `backend`: a transfer backend of the test's own.
    """

    def __init__(
        self,
        kind: type[PrefillConnector] | type[DecodeConnector],
        *,
        pages: int = 8,
        shard: ModelShard = WHOLE,
        backend: TransferBackend | None = None,
        **config: Any,
    ) -> None:
        page = PAGE * shard.kv_heads
        self.arena = HostArena(2 * pages * page + ROWS * ROW)
        self.memory = KVMemory(
            kv=tuple(self.arena.region(first * pages * page, page, pages) for first in range(2)),
            aux=(self.arena.region(2 * pages * page, ROW, ROWS),),
            page_tokens=16,
            head_dim=4,
            dtype="float32",
            model="m",
            **kv_fields(shard),
        )
        self.aux = self.arena.array(2 * pages * page, (ROWS, ROW), np.uint8)
        self.cache = self.arena.array(0, (2, pages, page), np.uint8)
        configured = ConnectorConfig("127.0.0.1", admin_port=0, **config)
        self.connector = kind(configured, self.memory, backend=backend)
        self.connector.start()

    def close(self) -> None:
        self.connector.close()
        self.arena.close()


def offer(decode: Side, prefill: Side | str, room: int, pages: list[int], **more: Any) -> DecodeTransfer:
    """Open decode's half and offer its memory at once. `prefill`: its side, or the address of its registry."""
    where = prefill if isinstance(prefill, str) else prefill.connector.bootstrap_address
    transfer = decode.connector.open(where, room, "r")
    transfer.offer(pages, **{"aux_slot": pages[0], **more})
    return transfer

"""Hand a numpy KV cache from one process to another: 2 layers, 64 pages of 16 tokens, 4 heads of 32 float32."""

import asyncio
import multiprocessing.connection

import numpy as np
from pdpool_connector import ConnectorConfig, DecodeConnector, HostArena, KVMemory, PrefillConnector

PAGES, PAGE_BYTES, AUX_BYTES = 64, 16 * 4 * 32 * 4, 64


def make_cache() -> tuple[HostArena, np.ndarray[tuple[int, ...], np.dtype[np.float32]], KVMemory]:
    """Zeroed float32 [4, 64, 16, 4, 32]: K and V of each layer, page, token, head, element; and where it lies."""
    arena = HostArena(4 * PAGES * PAGE_BYTES + AUX_BYTES)
    kv = tuple(arena.region(index * PAGES * PAGE_BYTES, PAGE_BYTES, PAGES) for index in range(4))
    aux = (arena.region(4 * PAGES * PAGE_BYTES, AUX_BYTES, 1),)  # one row of bytes that goes with each request
    memory = KVMemory(kv=kv, aux=aux, page_tokens=16, layers=2, kv_heads=4, head_dim=32, dtype="float32", model="demo")
    return arena, arena.array(0, (4, PAGES, 16, 4, 32), np.float32), memory


def prefill(pipe: "multiprocessing.connection.Connection[str, str]") -> None:
    arena, cache, memory = make_cache()
    with arena, PrefillConnector(ConnectorConfig("127.0.0.1"), memory) as connector:
        pipe.send(connector.bootstrap_address)
        transfer = connector.open(room=42, request_id="example")
        for start in (0, 4):  # two chunks of a prompt, each sent as soon as it is computed
            cache[:, start : start + 4] = start + 1
            transfer.send(np.arange(start, start + 4, dtype=np.int32), start=start, last=start == 4)
        asyncio.run(transfer.wait_released())  # from here on nobody reads these pages any more


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=prefill, args=(theirs,)).start()
    arena, cache, memory = make_cache()
    pages = np.array([7, 3, 9, 1, 60, 61, 62, 20], np.int32)  # any free ones, in any order
    with arena, DecodeConnector(ConnectorConfig("127.0.0.1"), memory) as connector:
        transfer = connector.open(ours.recv(), room=42, request_id="example", pages=pages, aux_slot=0)
        status = asyncio.run(transfer.wait_ended())
    print(status.phase, status.bytes_moved, "bytes; pages hold", cache[0, pages, 0, 0, 0])

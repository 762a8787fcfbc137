"""Hand a numpy KV cache from one process to another: 2 layers, 64 pages of 16 tokens, 4 heads of 32 float32."""

import multiprocessing
import time

import numpy as np
from pdpool_connector import ConnectorConfig, DecodeConnector, HostArena, KVMemory, PrefillConnector

PAGES, PAGE = 64, (16, 4, 32)
PAGE_BYTES, AUX_BYTES = 16 * 4 * 32 * 4, 64


def open_connector(kind):
    """The cache, float32 (K and V of each layer, page, token, head, element), and the connector that has it."""
    arena = HostArena(4 * PAGES * PAGE_BYTES + AUX_BYTES)
    kv = tuple(arena.region(index * PAGES * PAGE_BYTES, PAGE_BYTES, PAGES) for index in range(4))
    aux = arena.region(4 * PAGES * PAGE_BYTES, AUX_BYTES, 1)
    shape = {"page_tokens": 16, "layers": 2, "kv_heads": 4, "head_dim": 32, "dtype": "float32", "model": "example"}
    connector = kind(ConnectorConfig("127.0.0.1"), KVMemory(kv=kv, aux=aux, **shape), on_change=lambda: None)
    connector.start()
    return arena, arena.array(0, (4, PAGES, *PAGE), np.float32), connector


def prefill(pipe):
    _arena, cache, connector = open_connector(PrefillConnector)
    pipe.send(connector.bootstrap_address)
    transfer = connector.open(room=42, request_id="example")
    for start in (0, 4):  # two chunks of a prompt, each sent as soon as it is computed
        cache[:, start : start + 4] = start + 1
        transfer.send(np.arange(start, start + 4, dtype=np.int32), start=start, last=start == 4)
    while not transfer.status.releasable:  # from here on nobody reads these pages any more
        time.sleep(0.001)
    connector.close()


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=prefill, args=(theirs,)).start()
    arena, cache, connector = open_connector(DecodeConnector)
    pages = np.array([7, 3, 9, 1, 60, 61, 62, 20], np.int32)  # any free ones, in any order
    transfer = connector.open(ours.recv(), room=42, request_id="example", pages=pages, aux_slot=0)
    while not transfer.status.ended:
        time.sleep(0.001)
    print(transfer.status.phase, transfer.status.bytes_moved, "bytes; pages hold", cache[0, pages, 0, 0, 0])
    connector.close()

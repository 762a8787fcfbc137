"""Hand a numpy KV cache from one process to another: 2 layers, 64 pages of 16 tokens, 4 heads of 32 float32."""

import multiprocessing.connection

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import ConnectorConfig, DecodeConnector, HostArena, KVMemory, PrefillConnector

PAGES, PAGE_BYTES, AUX_BYTES, WAIT_S = 64, 16 * 4 * 32 * 4, 64, 30.0


def make_cache() -> tuple[HostArena, NDArray[np.float32], KVMemory]:
    """Return zeroed float32 [4, 64, 16, 4, 32] (K and V of each layer, page, token, head, element) and its layout."""
    arena = HostArena(4 * PAGES * PAGE_BYTES + AUX_BYTES)
    kv = tuple(arena.region(index * PAGES * PAGE_BYTES, PAGE_BYTES, PAGES) for index in range(4))
    aux = (arena.region(4 * PAGES * PAGE_BYTES, AUX_BYTES, 1),)  # one row of bytes, for what goes with a request
    memory = KVMemory(kv=kv, aux=aux, page_tokens=16, layers=2, kv_heads=4, head_dim=32, dtype="float32", model="demo")
    return arena, arena.array(0, (4, PAGES, 16, 4, 32), np.float32), memory


def prefill(pipe: "multiprocessing.connection.Connection[str, str]") -> None:
    arena, cache, memory = make_cache()
    with arena, PrefillConnector(ConnectorConfig("127.0.0.1"), memory) as connector:
        pipe.send(connector.bootstrap_address)
        transfer = connector.open(room=42, request_id="example")
        for start in (0, 4):  # two chunks of a prompt, each sent as soon as it is computed
            cache[:, start : start + 4] = start + 1
            transfer.send(list(range(start, start + 4)), start=start, last=start == 4)
        transfer.wait_released(WAIT_S)  # now no other process reads these pages


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=prefill, args=(theirs,)).start()
    arena, cache, memory = make_cache()
    with arena, DecodeConnector(ConnectorConfig("127.0.0.1"), memory) as connector:
        transfer = connector.open(ours.recv(), room=42, request_id="example")  # as soon as the request has arrived
        transfer.offer(pages := [7, 3, 9, 1, 60, 61, 62, 20], aux_slot=0)  # when there is memory: any free pages
        status = transfer.wait(WAIT_S)
    print(status.phase, status.bytes_moved, "bytes; pages hold", cache[0, pages, 0, 0, 0])

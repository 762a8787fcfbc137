"""An engine that works until a command makes it fail, and then ends by an exception, with its connector open and busy.

Its arguments are its role, its data plane and, for decode, prefill's bootstrap address.
"""

import select
import sys
import threading
from itertools import count

import numpy as np
from pdpool_connector import ConnectorConfig, DecodeConnector, HostArena, KVMemory, PrefillConnector

REGIONS, PAGES, PAGE_BYTES, AUX_ROWS = 32, 256, 4096, 4
WINDOW, OFFERS = 16, 4


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(role: str, backend: str, prefill: str = "") -> None:
    size = REGIONS * PAGES * PAGE_BYTES
    arena = HostArena(size + 64 * AUX_ROWS)
    memory = KVMemory(
        kv=tuple(arena.region(index * PAGES * PAGE_BYTES, PAGE_BYTES, PAGES) for index in range(REGIONS)),
        aux=(arena.region(size, 64, AUX_ROWS),),
        page_tokens=16,
        layers=REGIONS // 2,
        kv_heads=1,
        head_dim=64,
        dtype="float32",
        model="raising",
    )
    pages = np.random.default_rng(1).permutation(PAGES).astype(np.int32).reshape(OFFERS, -1)
    config = ConnectorConfig("127.0.0.1", backend=backend, allowed_networks=("127.0.0.0/8",))
    changed = threading.Event()
    connector = (PrefillConnector if role == "prefill" else DecodeConnector)(config, memory, changed.set)
    connector.start()
    rooms, live, free = count(), {}, list(range(WINDOW if role == "prefill" else OFFERS))
    say(connector.bootstrap_address if role == "prefill" else "ready")
    busy = False
    while not select.select([sys.stdin], [], [], 0)[0]:
        while free:
            room, at = next(rooms), free.pop()
            if role == "prefill":
                live[at] = connector.open(room, f"r{room}")
                live[at].send(pages[0], start=0, last=True, aux_slot=0)
            else:
                live[at] = connector.open(prefill, room, f"r{room}")
                live[at].offer(pages[at], aux_slot=at)
        free = [at for at, transfer in live.items() if transfer.status.releasable]
        if not busy and connector.stats().bytes_moved_total:
            busy = True
            say("busy")
        changed.wait(0.001)
        changed.clear()
    raise RuntimeError("the engine fails")


if __name__ == "__main__":
    main(*sys.argv[1:])

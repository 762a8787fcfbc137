"""An engine that forks helpers, one before its connector is started and one after its first hand-off.

Its arguments are its role, its data plane and, for decode, prefill's bootstrap address. It says how every helper and
every hand-off ended.
"""

import gc
import os
import sys
import threading
import weakref
from functools import partial

import numpy as np
from pdpool_connector import (
    ConnectorConfig,
    DecodeConnector,
    DecodeTransfer,
    HostArena,
    KVMemory,
    PrefillConnector,
    PrefillTransfer,
)

REGIONS, PAGES, PAGE_BYTES = 2, 8, 4096
HAND_OFFS = 3
HELPER_ENDED = 7


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def forked() -> bool:
    """True in a new helper; the engine says how that one ended."""
    helper = os.fork()
    if helper:
        say(f"helper {os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])}")
    return not helper


def refused_calls(connector: PrefillConnector | DecodeConnector, transfer: PrefillTransfer | DecodeTransfer) -> None:
    """What a helper may try, with what it has inherited."""
    if isinstance(connector, PrefillConnector):
        calls = [partial(connector.open, 0, "again"), partial(connector.refuse, 0, "again", "no")]
    else:
        whose, pages = ("127.0.0.1:1", 0, "again"), np.arange(PAGES, dtype=np.int32)
        calls = [partial(connector.open, *whose, pages=pages, aux_slot=0), partial(connector.refuse, *whose, "no")]
        calls.append(partial(connector.expect, *whose))
    for call in (connector.start, *calls):
        try:
            call()
        except RuntimeError as error:
            if "after the fork" in str(error):
                continue
        sys.exit(f"{call} was not refused")
    transfer.abort()
    connector.drain()
    if connector.abort_room(0, "no") or connector.purge(0.0, "no"):
        sys.exit("hand-offs of the parent's are said to be given up")


def main(role: str, backend: str, prefill: str = "") -> None:
    size = REGIONS * PAGES * PAGE_BYTES
    arena = HostArena(size + 64)
    memory = KVMemory(
        kv=tuple(arena.region(index * PAGES * PAGE_BYTES, PAGE_BYTES, PAGES) for index in range(REGIONS)),
        aux=(arena.region(size, 64, 1),),
        page_tokens=16,
        layers=REGIONS // 2,
        kv_heads=1,
        head_dim=64,
        dtype="float32",
        model="forking",
    )
    pages = np.arange(PAGES, dtype=np.int32)
    config = ConnectorConfig("127.0.0.1", backend=backend, allowed_networks=("127.0.0.0/8",))
    changed = threading.Event()
    connector = (PrefillConnector if role == "prefill" else DecodeConnector)(config, memory, changed.set)
    if forked():
        kept = weakref.ref(connector)
        del connector
        gc.collect()
        sys.exit(HELPER_ENDED if kept() is not None else "what the data plane made was collected")
    connector.start()
    try:
        say(connector.bootstrap_address if role == "prefill" else "ready")
        for room in range(HAND_OFFS):
            if role == "prefill":
                transfer = connector.open(room, f"r{room}")
                transfer.send(pages, start=0, last=True, aux_slot=0)
            else:
                transfer = connector.open(prefill, room, f"r{room}", pages=pages, aux_slot=0)
            while not transfer.status.releasable:
                changed.wait(0.1)
                changed.clear()
            say(f"{transfer.status.phase} {transfer.status.message}".strip())
            if room == 0 and forked():
                refused_calls(connector, transfer)
                sys.exit(HELPER_ENDED)
    finally:
        connector.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

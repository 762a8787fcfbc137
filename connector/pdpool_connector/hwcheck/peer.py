"""One side of a trial, in a process of its own: obeys one JSON command a line, answers one JSON line on a descriptor.

Answers have a descriptor of their own, because UCX and Mooncake print to stdout.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from pdpool_connector.hwcheck.cuda import DeviceMemory, load
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.memory import KVMemory, Region
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.decode import DecodeConnector
from pdpool_connector.runtime.prefill import PrefillConnector
from pdpool_connector.runtime.transfer import DecodeTransfer, PrefillTransfer

PAGE_TOKENS: Final = 16
HEADS: Final = 8
HEAD_DIM: Final = 128
PAGE_BYTES: Final = PAGE_TOKENS * HEADS * HEAD_DIM * 2
"""A page of one layer's K or V: 16 tokens, 8 heads of 128 bfloat16 elements."""
REGIONS: Final = 2
HANDOFF_S: Final = 30.0
STATS_S: Final = 3.0
"""Time after which the statistics show what has happened."""


class Cache(Protocol):
    """The bytes of all regions, one behind the other, on the host or on a device."""

    address: int

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes at `offset`."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes at `offset`."""

    def close(self) -> None:
        """Give the memory up."""


class HostCache:
    """`nbytes` bytes of host memory that other processes can map."""

    def __init__(self, nbytes: int) -> None:
        self._arena = HostArena(nbytes)
        self._bytes = self._arena.array(0, nbytes, np.uint8)
        self.address = self._arena.address

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes at `offset`."""
        self._bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes at `offset`."""
        return self._bytes[offset : offset + nbytes].tobytes()

    def close(self) -> None:
        """Give the memory up."""
        self._arena.close()


def pattern(room: int, region: int, page: int) -> bytes:
    """What a page holds for a room: bytes that no other room, region or logical page has."""
    return np.random.default_rng((room, region, page)).bytes(PAGE_BYTES)


class Side:
    """The cache of one rank with one layer (K and V), and its connector."""

    def __init__(self, role: str, backend: str, device: int | None, pages: int) -> None:
        nbytes = REGIONS * pages * PAGE_BYTES
        self._pages = pages
        self._cache: Cache = HostCache(nbytes) if device is None else DeviceMemory(load(), device, nbytes)
        regions = tuple(
            Region(self._cache.address + self._offset(region, 0), PAGE_BYTES, pages, device)
            for region in range(REGIONS)
        )
        memory = KVMemory(
            kv=regions,
            page_tokens=PAGE_TOKENS,
            layers=1,
            kv_heads=HEADS,
            head_dim=HEAD_DIM,
            dtype="bfloat16",
            model="hwcheck",
        )
        config = ConnectorConfig(advertise_host="127.0.0.1", backend=backend)
        self.connector = (PrefillConnector if role == "prefill" else DecodeConnector)(config, memory)
        self._open: dict[int, PrefillTransfer | DecodeTransfer] = {}
        self.connector.start()

    def _offset(self, region: int, page: int) -> int:
        return (region * self._pages + page) * PAGE_BYTES

    def address(self) -> str:
        """Where decode finds prefill."""
        assert isinstance(self.connector, PrefillConnector)
        return self.connector.bootstrap_address

    def request(self, room: int) -> None:
        """Prefill: open a hand-off."""
        assert isinstance(self.connector, PrefillConnector)
        self._open[room] = self.connector.open(room, f"hwcheck-{room}")

    def send(self, room: int, pages: list[int], start: int, *, last: bool) -> None:
        """Prefill: fill pages with the room's pattern and send them as logical pages `start` onward."""
        for at, page in enumerate(pages):
            for region in range(REGIONS):
                self._cache.write(self._offset(region, page), pattern(room, region, start + at))
        transfer = self._open[room]
        assert isinstance(transfer, PrefillTransfer)
        transfer.send(pages, start=start, last=last)

    def offer(self, prefill: str, room: int, pages: list[int]) -> None:
        """Decode: open a hand-off and offer pages."""
        assert isinstance(self.connector, DecodeConnector)
        transfer = self.connector.open(prefill, room, f"hwcheck-{room}")
        self._open[room] = transfer
        transfer.offer(pages)

    def abort(self, room: int) -> None:
        """Give a hand-off up."""
        self._open[room].abort("hwcheck aborts it")

    def ended(self, room: int) -> dict[str, Any]:
        """Wait until a hand-off has ended and its pages are released; say how it ended."""
        transfer = self._open[room]
        transfer.wait(HANDOFF_S)
        status = transfer.wait_released(HANDOFF_S)
        return {"phase": status.phase, "message": status.message}

    def transport(self) -> str:
        """Prefill: the transport to its decode, as the backend reports it; "" if it does not know."""
        until = time.monotonic() + STATS_S
        while not (used := {peer.transport for peer in self.connector.stats().peers} - {""}):
            if time.monotonic() > until:
                break
            time.sleep(STATS_S / 100)
        return ", ".join(sorted(used))

    def differing(self, room: int, pages: list[int]) -> list[int]:
        """Which of the pages do not hold the room's pattern, in both regions."""
        return [
            page
            for at, page in enumerate(pages)
            if any(
                self._cache.read(self._offset(region, page), PAGE_BYTES) != pattern(room, region, at)
                for region in range(REGIONS)
            )
        ]

    def close(self) -> None:
        """Close the connector, then free the cache."""
        self.connector.close()
        self._cache.close()


def serve(commands: Callable[[], str], answer: Callable[[str], None]) -> None:
    """Obey commands until there are none; the first one makes the side."""
    side = Side(**json.loads(commands()))
    try:
        answer(json.dumps({"ready": True}))
        while line := commands():
            command = json.loads(line)
            try:
                result = getattr(side, command.pop("do"))(**command)
            except Exception as error:  # noqa: BLE001 - it is the answer, and the trial fails by it
                answer(json.dumps({"error": f"{type(error).__name__}: {error}"}))
            else:
                answer(json.dumps({"result": result}))
    finally:
        side.close()


def main() -> None:
    """`python -m pdpool_connector.hwcheck.peer ANSWERS_FD`."""
    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def answer(line: str) -> None:
            answers.write(line + "\n")
            answers.flush()

        serve(sys.stdin.readline, answer)


if __name__ == "__main__":
    main()

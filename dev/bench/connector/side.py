"""One connector and its memory, within the process that holds them."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from typing import Any

import numpy as np
from pdpool_connector import ConnectorConfig, DecodeConnector, Phase, PrefillConnector
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.protocol.frames import Frame
from pdpool_connector.protocol.timing import Timing

from . import raw
from .memory import places
from .process import Setup
from .scheduler import DecodeLoop, Job, PrefillLoop, Times, Wake


class Side:
    """What `Process` calls by name. The source is filled with a pattern, so that what arrived can be checked."""

    def __init__(self, setup: Setup, imported_s: float) -> None:
        self.setup, self.imported_s = setup, imported_s
        self.arena = HostArena(setup.shape.nbytes)
        self.bytes = self.arena.array(0, self.arena.nbytes, np.uint8)
        self.bytes[:] = 0
        if setup.role == "prefill":
            self.fill(1)
        self.memory = setup.shape.lay_out(self.arena)
        self.wake = Wake()
        self.frames: Counter[str] = Counter()
        config = ConnectorConfig(
            advertise_host="127.0.0.1",
            bind_host="127.0.0.1",
            backend=setup.plane.backend,
            timing=Timing(max_attempts=setup.max_attempts),
        )
        begun = time.monotonic()
        kind = PrefillConnector if setup.role == "prefill" else DecodeConnector
        self.connector: Any = kind(config, self.memory, self.wake.set)
        self.connector.start()
        self.started_s = time.monotonic() - begun

    def facts(self) -> dict[str, Any]:
        """Who it is, and how long it took to start."""
        bootstrap = self.connector.bootstrap_address if self.setup.role == "prefill" else ""
        return {
            "incarnation": self.connector.incarnation,
            "bootstrap": bootstrap,
            "imported_s": self.imported_s,
            "started_s": self.started_s,
        }

    def fill(self, seed: int) -> None:
        """Give every page of the memory other bytes than `seed - 1` gives it."""
        words = self.bytes[: len(self.bytes) // 8 * 8].view(np.uint64)
        words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(2654435761) + np.uint64(seed)

    def digest(self, pages: Any) -> list[int]:  # noqa: ANN401
        """A checksum of each page of the request, over all its regions."""
        item, regions = self.setup.shape.item_bytes, 2 * self.setup.shape.layers
        table = self.bytes[: regions * self.setup.shape.pages * item].view(np.uint64)
        table = table.reshape(regions, self.setup.shape.pages, item // 8)
        return [int(np.bitwise_xor.reduce(table[:, page], axis=None)) for page in pages]

    def run(self, job: Job, prefill: str = "") -> Times:
        """Do this side's part of a job."""
        seed = 1 if self.setup.role == "prefill" else 2
        slots = places(self.setup.shape, job.pages, job.window, scattered=job.scattered, seed=seed)
        if self.setup.role == "prefill":
            return PrefillLoop(self.connector, self.wake, job, slots).run()
        return DecodeLoop(self.connector, prefill, self.wake, job, slots).run()

    def raw(self, peer: str, job: Job) -> dict[str, float]:
        """Move the pages of `job`'s first window with the bare engine; seconds by pattern."""
        local = places(self.setup.shape, job.pages, job.window, scattered=job.scattered, seed=1)
        target = places(self.setup.shape, job.pages, job.window, scattered=job.scattered, seed=2)
        return raw.measure(self.connector._engine, peer, list(zip(local, target, strict=True)))

    def count_frames(self) -> None:
        """Count what is sent from now on."""

        def note(frame: Frame) -> float:
            self.frames[type(frame).__name__] += 1
            return 0.0

        object.__setattr__(self.connector.config, "frame_filter", note)

    def frames_sent(self) -> dict[str, int]:
        """What has been sent since `count_frames`, by type; counting ends."""
        object.__setattr__(self.connector.config, "frame_filter", None)
        return dict(self.frames)

    def open_idle(self, first: int, count: int, prefill: str = "") -> None:
        """Open hand-offs that are never sent; they stay until `drop_idle`."""
        deadline = time.monotonic() + 60
        self.idle = [self._open_idle(first + index, prefill) for index in range(count)]
        while any(transfer.status.phase is Phase.WAITING for transfer in self.idle if self.setup.role == "prefill"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} hand-offs are not ready after 60 s")
            self.wake.wait(1.0)

    def _open_idle(self, room: int, prefill: str) -> Any:  # noqa: ANN401
        if self.setup.role == "prefill":
            return self.connector.open(room, f"idle-{room}")
        return self.connector.open(prefill, room, f"idle-{room}", pages=np.zeros(1, np.int32), aux_slot=0)

    def drop_idle(self) -> None:
        """Abort what `open_idle` opened, and wait until all have ended."""
        for transfer in self.idle:
            transfer.abort()
        deadline = time.monotonic() + 60
        while not all(transfer.status.ended and transfer.status.releasable for transfer in self.idle):
            if time.monotonic() > deadline:
                raise TimeoutError("aborted hand-offs have not ended after 60 s")
            self.wake.wait(1.0)
        self.idle = []

    def cpu(self) -> tuple[float, float]:
        """(wall, CPU) seconds of the whole process so far, all threads, user and system."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.monotonic(), used.ru_utime + used.ru_stime

    def rss(self) -> int:
        """Resident bytes."""
        with open("/proc/self/statm") as statm:  # noqa: PTH123
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def lag(self) -> float:
        """Loop lag of the connector, seconds."""
        return float(self.connector.stats().loop_lag_s)

    def faults(self) -> int:
        """Faults inside the connector; must be 0."""
        return int(self.connector.stats().faults)

    def close(self) -> None:
        """Close the connector."""
        self.connector.close()

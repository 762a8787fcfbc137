"""One connector and its memory, within the process that holds them."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pdpool_connector import ConnectorConfig, DecodeConnector, Phase, PrefillConnector, TransferStatus
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.protocol.frames import Frame
from pdpool_connector.protocol.timeouts import Timeouts

from . import raw, stages
from .frames import Content, content
from .memory import places
from .process import Setup
from .scheduler import DecodeLoop, Job, PrefillLoop, Times, Wake
from .turns import Turn, Watch

IDLE_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


class Side:
    """What `Process` calls by name. The source is filled with a pattern, so that what arrived can be checked."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.arena = HostArena(setup.shape.nbytes)
        self.bytes = self.arena.array(0, self.arena.nbytes, np.uint8)
        self.bytes[:] = 0
        if setup.role == "prefill":
            self.fill(1)
        self.memory = setup.shape.lay_out(self.arena)
        self.wake = Wake()
        self.frames: Counter[Content] = Counter()
        self.idle: list[tuple[Any, Any]] = []
        config = ConnectorConfig(
            advertise_host="127.0.0.1",
            bind_host="127.0.0.1",
            backend=setup.plane.backend,
            timeouts=Timeouts(max_attempts=setup.max_attempts),
            frame_filter=self._note if setup.counts_frames else None,
            **setup.options,
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
            "started_s": self.started_s,
        }

    def fill(self, seed: int) -> None:
        """Give every page of the memory other bytes than `seed - 1` gives it."""
        words = self.bytes[: len(self.bytes) // 8 * 8].view(np.uint64)
        words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(2654435761) + np.uint64(seed)

    def digest(self, pages: Any) -> list[list[int]]:  # noqa: ANN401
        """A checksum of each page of the request, in each of its regions."""
        item, regions = self.setup.shape.item_bytes, 2 * self.setup.shape.layers
        table = self.bytes[: regions * self.setup.shape.pages * item].view(np.uint64)
        table = table.reshape(regions, self.setup.shape.pages, item // 8)
        return [np.bitwise_xor.reduce(table[:, page], axis=1).tolist() for page in pages]

    def run(self, job: Job, prefill: str = "") -> Times:
        """Do this side's part of a job."""
        seed = 1 if self.setup.role == "prefill" else 2
        slots = places(self.setup.shape, job.pages, job.window, scattered=job.scattered, seed=seed)
        if self.setup.role == "prefill":
            return PrefillLoop(self.connector, self.wake, job, slots).run()
        return DecodeLoop(self.connector, prefill, self.wake, job, slots).run()

    def raw(self, peer: str, job: Job, only: str = "") -> dict[str, float]:
        """Move the pages of `job`'s first window with the bare engine; seconds by pattern (or by `only` that one)."""
        local = places(self.setup.shape, job.pages, job.window, scattered=job.scattered, seed=1)
        target = places(self.setup.shape, job.pages, job.window, scattered=job.scattered, seed=2)
        return raw.measure(self.connector._backend, peer, list(zip(local, target, strict=True)), only)

    def count_frames(self) -> None:
        """Forget what was sent so far."""
        self.frames.clear()

    def _note(self, frame: Frame) -> float:
        self.frames[content(frame)] += 1
        return 0.0

    def frames_sent(self) -> Counter[Content]:
        """What has been sent since `count_frames`, and how often each. Only with `Setup.counts_frames`."""
        return Counter(self.frames)

    def open_idle(self, first: int, count: int, pages: int, prefill: str = "") -> None:
        """Open hand-offs that are not sent yet; they stay until `end_idle`. Their pages are the memory's last ones."""
        last = np.arange(self.setup.shape.pages - count * pages, self.setup.shape.pages, dtype=np.int32)
        for room, own in enumerate(np.split(last, count), start=first):
            if self.setup.role == "prefill":
                transfer = self.connector.open(room, f"idle-{room}")
            else:
                transfer = self.connector.open(prefill, room, f"idle-{room}")
                transfer.offer(own, aux_slot=0)
            self.idle.append((transfer, own))
        if self.setup.role == "prefill":
            self._until(lambda status: status.phase is not Phase.WAITING)

    def send_idle(self) -> None:
        """Send them all, without waiting for anything."""
        for transfer, pages in self.idle:
            transfer.send(pages, start=0, last=True, aux_slot=0)

    def end_idle(self, abort: bool) -> int:
        """Wait until all of them have ended, aborted before or not; how many were done nevertheless."""
        for transfer, _ in self.idle:
            if abort:
                transfer.abort()
        self._until(lambda status: status.ended and status.releasable)
        done = sum(transfer.status.phase is Phase.DONE for transfer, _ in self.idle)
        self.idle = []
        return done

    def _until(self, holds: Callable[[TransferStatus], bool]) -> None:
        deadline = time.monotonic() + IDLE_S
        while not all(holds(transfer.status) for transfer, _ in self.idle):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.idle)} hand-offs did not get there within {IDLE_S} s")
            self.wake.wait(1.0)

    def mark(self) -> None:
        """Note when stages of hand-offs are reached, until `marks`."""
        self._marks: stages.Marks = []
        self._unmark = stages.mark(self.setup.role, self.connector, self._marks)

    def marks(self) -> stages.Marks:
        """The notes since `mark`."""
        self._unmark()
        return self._marks

    def watch_turns(self) -> None:
        """Note each turn of the loop, until `turns`."""
        self._watch = Watch(self.connector)

    def turns(self) -> list[Turn]:
        """The turns since `watch_turns`."""
        return self._watch.end()

    def cpu(self) -> tuple[float, float]:
        """(wall, CPU) seconds of the whole process so far, all threads, user and system."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.monotonic(), used.ru_utime + used.ru_stime

    def threads(self) -> dict[str, float]:
        """CPU seconds of each thread so far, by name; peers' workers together."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        used: defaultdict[str, float] = defaultdict(float)
        for task in Path("/proc/self/task").iterdir():
            fields = (task / "stat").read_text().rpartition(") ")[2].split()
            name = names.get(int(task.name)) or (task / "comm").read_text().strip()
            name = {"MainThread": "scheduler", "ZMQbg/IO/0": "zmq i/o"}.get(name, name)
            used["worker" if "-peer-" in name else name] += (int(fields[11]) + int(fields[12])) / TICKS
        return dict(used)

    def faults(self) -> int:
        """Faults inside the connector; must be 0."""
        return int(self.connector.stats().faults)

    def close(self) -> None:
        """Close the connector."""
        self.connector.close()

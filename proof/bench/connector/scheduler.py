"""What an engine's scheduler does with a connector, and nothing else: open, offer, poll, send, note ends."""

from __future__ import annotations

import os
import random
import select
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import DecodeConnector, DecodeTransfer, Phase, PrefillConnector, PrefillTransfer

STALL_S = 60.0
Any = TypeVar("Any", PrefillTransfer, DecodeTransfer)


@dataclass(frozen=True)
class Job:
    """Hand-offs of rooms `first` .. `first + count - 1`, each of `pages` pages; at most `window` are open at a time.

    `abort_share`: how many of them decode aborts, `abort_within_s` after they were opened at the latest.
    `offer_after_s`: how long after a request arrives decode has memory for it. 0: at once, and prefill sends when it
    knows of that. Above 0, prefill sends as soon as its own request arrives.
    """

    first: int
    count: int
    window: int
    pages: int
    scattered: bool = True
    abort_share: float = 0.0
    abort_within_s: float = 0.0
    offer_after_s: float = 0.0

    def abort_after(self, room: int) -> float | None:
        """When decode aborts `room`, in seconds after it was opened; the same in every run."""
        if not self.abort_share:
            return None  # seeding the dice takes 7 us, which would count as time of the hand-off
        dice = random.Random(room)
        return dice.random() * self.abort_within_s if dice.random() < self.abort_share else None


@dataclass
class Times:
    """What one side noted of a job; monotonic seconds by room, which both processes share."""

    begun: float = 0.0
    ended: float = 0.0
    cpu_s: float = 0.0
    opened: dict[int, float] = field(default_factory=dict)
    offered: dict[int, float] = field(default_factory=dict)
    """Decode only: when it offered memory."""
    sent: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    failed: dict[int, float] = field(default_factory=dict)
    """When a hand-off that had failed became releasable."""
    aborted: dict[int, float] = field(default_factory=dict)
    """When a hand-off that was being written was aborted."""
    held_page_s: float = 0.0
    """Pages times seconds from an abort to the release."""

    @property
    def wall_s(self) -> float:
        """How long it took."""
        return self.ended - self.begun


class Wake:
    """`on_change` of a connector, waited for with a deadline."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def set(self) -> None:
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float) -> bool:
        """Wait for `set`; False when it did not come."""
        if not self._poll.poll(timeout_s * 1000):
            return False
        os.eventfd_read(self._fd)
        return True


class Loop(Generic[Any]):
    """The part that both sides share: a window of live hand-offs, each with a slot of pages."""

    def __init__(self, wake: Wake, job: Job, slots: list[NDArray[np.int32]]) -> None:
        self.wake, self.job = wake, job
        self.free = deque(enumerate(slots))
        self.live: dict[int, tuple[Any, tuple[int, NDArray[np.int32]]]] = {}
        self.next = job.first
        self.times = Times()

    def run(self) -> Times:
        """Do the job. Raises TimeoutError when nothing happens for a minute."""
        times, cpu = self.times, time.process_time()
        times.begun = time.monotonic()
        end = self.job.first + self.job.count
        while self.live or self.next < end:
            while self.free and self.next < end:
                slot = self.free.popleft()
                self.live[self.next] = (self.open(self.next, slot), slot)
                times.opened[self.next] = time.monotonic()
                self.next += 1
            moved = False
            for room, (transfer, slot) in list(self.live.items()):
                moved |= self.look(room, transfer, slot)
            wait_s = self.patience()
            if not moved and not self.wake.wait(wait_s) and wait_s == STALL_S:
                raise TimeoutError(f"nothing moved for {STALL_S} s: {[entry[0] for entry in self.live.values()]}")
        times.ended = time.monotonic()
        times.cpu_s = time.process_time() - cpu
        return times

    def over(self, room: int, transfer: Any, slot: tuple[int, NDArray[np.int32]]) -> bool:
        """Take note of an end, and give the pages back."""
        status = transfer.status
        if not (status.ended and status.releasable):
            return False
        (self.times.done if status.phase is Phase.DONE else self.times.failed)[room] = time.monotonic()
        if status.phase is not Phase.DONE and not self.job.abort_share:
            raise RuntimeError(f"room {room} failed: {status}")
        del self.live[room]
        self.free.append(slot)
        return True

    def patience(self) -> float:
        """How long to wait for a change."""
        return STALL_S

    def open(self, room: int, slot: tuple[int, NDArray[np.int32]]) -> Any:
        """Open a hand-off."""
        raise NotImplementedError

    def look(self, room: int, transfer: Any, slot: tuple[int, NDArray[np.int32]]) -> bool:
        """React to a status; True when something was done."""
        raise NotImplementedError


class PrefillLoop(Loop[PrefillTransfer]):
    """Sends a request's pages, all at once, as soon as the destination is known."""

    def __init__(self, connector: PrefillConnector, wake: Wake, job: Job, slots: list[NDArray[np.int32]]) -> None:
        super().__init__(wake, job, slots)
        self.connector = connector

    def open(self, room: int, slot: tuple[int, NDArray[np.int32]]) -> PrefillTransfer:
        """As Loop."""
        del slot
        return self.connector.open(room, f"request-{room}")

    def look(self, room: int, transfer: PrefillTransfer, slot: tuple[int, NDArray[np.int32]]) -> bool:
        """As Loop."""
        if room not in self.times.sent and (self.job.offer_after_s or transfer.status.phase is Phase.READY):
            self.times.sent[room] = time.monotonic()
            transfer.send(slot[1], start=0, last=True, aux_slot=slot[0])
            return True
        return self.over(room, transfer, slot)


class DecodeLoop(Loop[DecodeTransfer]):
    """Opens requests when they arrive, offers pages, waits for them to be filled, aborts some."""

    def __init__(
        self, connector: DecodeConnector, prefill: str, wake: Wake, job: Job, slots: list[NDArray[np.int32]]
    ) -> None:
        super().__init__(wake, job, slots)
        self.connector, self.prefill = connector, prefill
        self.aborts: dict[int, float] = {}

    def open(self, room: int, slot: tuple[int, NDArray[np.int32]]) -> DecodeTransfer:
        """As Loop."""
        if (after := self.job.abort_after(room)) is not None:
            self.aborts[room] = time.monotonic() + after
        transfer = self.connector.open(self.prefill, room, f"request-{room}")
        if not self.job.offer_after_s:
            self._offer(room, transfer, slot)
        return transfer

    def _offer(self, room: int, transfer: DecodeTransfer, slot: tuple[int, NDArray[np.int32]]) -> None:
        self.times.offered[room] = time.monotonic()
        transfer.offer(slot[1], aux_slot=slot[0])

    def look(self, room: int, transfer: DecodeTransfer, slot: tuple[int, NDArray[np.int32]]) -> bool:
        """As Loop."""
        if room not in self.times.offered and time.monotonic() >= self._offer_at(room):
            self._offer(room, transfer, slot)
            return True
        if room in self.aborts and time.monotonic() >= self.aborts[room]:
            del self.aborts[room]
            if not transfer.status.ended:
                self.times.aborted[room] = time.monotonic()
                transfer.abort("the client is gone")
        if not self.over(room, transfer, slot):
            return False
        self.aborts.pop(room, None)
        if room in self.times.aborted and room in self.times.failed:
            self.times.held_page_s += (self.times.failed[room] - self.times.aborted[room]) * len(slot[1])
        return True

    def patience(self) -> float:
        """Until the next abort or offer is due."""
        offers = (self._offer_at(room) for room in self.live if room not in self.times.offered)
        due = min((*self.aborts.values(), *offers), default=None)
        return STALL_S if due is None else max(min(due - time.monotonic(), STALL_S / 2), 0.0)

    def _offer_at(self, room: int) -> float:
        return self.times.opened[room] + self.job.offer_after_s

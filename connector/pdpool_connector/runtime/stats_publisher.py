"""Publishes a connector's statistics: the owner thread takes snapshots, any thread reads the last one."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.layout.process import ProcessName
from pdpool_connector.protocol.attempt import DecodeAttempt
from pdpool_connector.protocol.handoff import RankExchange
from pdpool_connector.protocol.queue_counts import QueueCounts
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.stats import ConnectorStats, HeldFor, QueueStats

MAX_QUEUES = 8
"""Queues of the engine's own. The operator reads at most 16 in all."""

Take = Callable[[float], ConnectorStats]


class _Beat(NamedTuple):
    """One beat of the engine. An idle engine runs until its next one."""

    at: float
    paused: bool
    idle: bool

    def age(self, now: float) -> float:
        """Seconds since the engine was last known to run."""
        return 0.0 if self.idle else now - self.at

    def lasted(self, now: float, step_s: float) -> float:
        """Seconds from this beat until now that count as running: at most `step_s`, unless the engine is idle."""
        return now - self.at if self.idle else min(now - self.at, step_s)


class StatsPublisher:
    """`take` makes a snapshot at a moment; it is called in turns of the connector's, or before its start."""

    def __init__(self, take: Take, lag: Callable[[], float], timeouts: Timeouts) -> None:
        self._take, self._lag, self._timeouts = take, lag, timeouts
        self._born = self._taken_at = time.monotonic()
        self._beat: _Beat | None = None
        self._ran_s = 0.0
        """See `engine_ran_s`, as of the last beat."""
        self._queues: dict[str, tuple[float, QueueStats]] = {}
        """The engine's own queues, and when it has shown each."""
        self._snapshot: ConnectorStats | None = None

    def refresh(self, *, at_once: bool = False) -> None:
        """Take a snapshot, if the last is old."""
        now = time.monotonic()
        if at_once or now - self._taken_at >= self._timeouts.snapshot_s:
            self._taken_at = now
            self._snapshot = self._take(now)

    def beat(self, *, paused: bool = False, idle: bool = False) -> None:
        """The engine's scheduler loop is alive. It may be paused on purpose, or sleep because it has nothing to do."""
        now = time.monotonic()
        if self._beat is not None:
            self._ran_s += self._beat.lasted(now, self._timeouts.engine_step_s)
        self._beat = _Beat(now, paused, idle)

    @property
    def engine_ran_s(self) -> float:
        """Seconds for which the engine's loop was seen running, or ready to run; see `EngineRan`."""
        beat = self._beat
        return self._ran_s + (beat.lasted(time.monotonic(), 0.0) if beat is not None else 0.0)

    def set_queue(self, name: str, queue: QueueStats) -> None:
        """Show a queue of the engine's own. It ages until it is shown again. Raises ValueError for one too many."""
        if name not in self._queues and len(self._queues) >= MAX_QUEUES:
            raise ValueError(f"name={name!r} is one queue too many: the engine shows {MAX_QUEUES} already")
        self._queues[name] = time.monotonic(), queue

    def read(self) -> ConnectorStats:
        """The last snapshot, completed by what is known without one. From any thread."""
        if self._snapshot is None:
            self.refresh(at_once=True)
        assert self._snapshot is not None
        snapshot, now = self._snapshot, time.monotonic()
        beat = self._beat
        shown = {name: _aged(now - at, queue) for name, (at, queue) in list(self._queues.items())}
        return replace(
            snapshot,
            uptime_s=now - self._born,
            loop_lag_s=self._lag(),
            engine_beat_age_s=None if beat is None else beat.age(now),
            engine_paused=beat is not None and beat.paused,
            queues={**shown, **snapshot.queues},
            engine_queues=shown,
        )


def _aged(by_s: float, queue: QueueStats) -> QueueStats:
    """The queue, if nothing has left it for so long."""
    return queue if queue.oldest_s is None else replace(queue, oldest_s=queue.oldest_s + by_s)


def queues_of(queues: QueueCounts[Any], now: float) -> dict[str, QueueStats]:
    """The statistics of each of a machine's queues."""
    return {
        label: QueueStats(
            queues.count(label),
            None if (since := queues.oldest(label)) is None else now - since,
            queues.moved_total(label),
        )
        for label in queues.labels
    }


def bytes_held(held: RankExchange | DecodeAttempt, memory: KVMemory) -> int:
    """Bytes of our memory that a peer may still touch: pages, state items, the aux row of a hand-off."""
    state = sum(count * pool.item_bytes for count, pool in zip(held.state_items, memory.state, strict=False))
    return held.pages * memory.page_bytes + state + memory.aux_bytes


def held_for(unsettled: Iterable[str], processes: Mapping[str, ProcessName]) -> tuple[HeldFor, ...]:
    """How many hand-offs are held for each peer, and where that runs. `unsettled`: a peer for each hand-off."""
    rows = []
    for peer, holds in sorted(Counter(unsettled).items()):
        process = processes.get(peer)
        where = (process.pod_uid, process.container) if process is not None else ("", "")
        rows.append(HeldFor(peer, holds, *where))
    return tuple(rows)

"""Publishes a connector's statistics: the owner thread takes snapshots, any thread reads the last one."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.layout.process import ProcessName
from pdpool_connector.protocol.decode import DecodeAttempt
from pdpool_connector.protocol.handoff import RankExchange
from pdpool_connector.protocol.queue_counts import QueueCounts
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.stats import ConnectorStats, HeldFor, QueueStats

MAX_QUEUES = 8
"""Queues of the engine's own. The operator reads at most 16 in all."""

Take = Callable[[float], ConnectorStats]


class StatsPublisher:
    """`take` makes a snapshot at a moment; it is called in turns of the connector's, or before its start."""

    def __init__(self, take: Take, lag: Callable[[], float], timeouts: Timeouts) -> None:
        self._take, self._lag, self._timeouts = take, lag, timeouts
        self._born = self._taken_at = time.monotonic()
        self._engine_beat: float | None = None
        self._engine_paused = False
        self.engine_ran_s = 0.0
        """Seconds for which the engine's loop was seen running; see `EngineRan`."""
        self._queues: dict[str, tuple[float, QueueStats]] = {}
        """The engine's own queues, and when it has shown each."""
        self._snapshot: ConnectorStats | None = None

    def refresh(self, *, at_once: bool = False) -> None:
        """Take a snapshot, if the last is old."""
        now = time.monotonic()
        if at_once or now - self._taken_at >= self._timeouts.snapshot_s:
            self._taken_at = now
            self._snapshot = self._take(now)

    def beat(self, *, paused: bool = False) -> None:
        """The engine's scheduler loop is alive, and may be paused on purpose."""
        now = time.monotonic()
        if self._engine_beat is not None:
            self.engine_ran_s += min(now - self._engine_beat, self._timeouts.engine_step_s)
        self._engine_beat, self._engine_paused = now, paused

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
        beat = self._engine_beat
        shown = {name: _aged(now - at, queue) for name, (at, queue) in self._queues.items()}
        return replace(
            snapshot,
            uptime_s=now - self._born,
            loop_lag_s=self._lag(),
            engine_beat_age_s=None if beat is None else now - beat,
            engine_paused=self._engine_paused,
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
            queues.went_on(label),
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

"""Statistics that several threads read and write."""

from dataclasses import dataclass, field
from typing import Any

from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.stats import QueueStats
from pdpool_connector.runtime.stats_publisher import StatsPublisher

EMPTY = QueueStats(0, None, 0)


@dataclass
class Shown:
    """The fields of a snapshot that a read completes."""

    uptime_s: float = 0.0
    loop_lag_s: float = 0.0
    engine_beat_age_s: float | None = None
    engine_paused: bool = False
    queues: dict[str, QueueStats] = field(default_factory=dict)
    engine_queues: dict[str, QueueStats] = field(default_factory=dict)


def test_queue_shown_during_a_read_is_in_the_next() -> None:
    snapshot: Any = Shown()
    publisher = StatsPublisher(lambda _: snapshot, lambda: 0.0, Timeouts())

    class Interrupted:
        """A queue during whose reading the engine's thread shows another one."""

        @property
        def oldest_s(self) -> None:
            publisher.set_queue("later", EMPTY)

    queue: Any = Interrupted()
    publisher.set_queue("first", queue)
    assert set(publisher.read().engine_queues) == {"first"}
    assert set(publisher.read().engine_queues) == {"first", "later"}

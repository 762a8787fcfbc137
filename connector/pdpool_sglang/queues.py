"""SGLang's queues as the connector shows them: how many wait, since when the oldest, and how many went on."""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from pdpool_connector import DecodeConnector, PrefillConnector

SAMPLE_S: Final = 0.25
"""Pause between two samples. The operator reads the numbers every few seconds."""


class QueueSampler:
    """Notes which requests are in a queue. One that is elsewhere in the scheduler now has gone on. Others have ended.

    Args:
        connector: shows the queues.
        clock: seconds, monotonic.
    """

    def __init__(self, connector: PrefillConnector | DecodeConnector, clock: Callable[[], float]) -> None:
        self._connector, self._clock = connector, clock
        self._due = 0.0
        self._since: dict[str, dict[str, float]] = {}
        self._moved: dict[str, int] = {}

    def is_due(self) -> bool:
        """Whether the last sample is old enough. To be asked in each turn of the scheduler."""
        return self._clock() >= self._due

    def sample(self, queues: Mapping[str, Collection[str]], under_way: Collection[str]) -> None:
        """Show the queues.

        Args:
            queues: ids of the requests in each.
            under_way: ids of all requests of the scheduler.
        """
        now, there = self._clock(), frozenset(under_way)
        self._due = now + SAMPLE_S
        for name, ids in queues.items():
            before = self._since.get(name, {})
            since = {one: before.get(one, now) for one in ids}
            self._since[name] = since
            self._moved[name] = self._moved.get(name, 0) + len((before.keys() - since.keys()) & there)
            oldest = now - min(since.values()) if since else None
            self._connector.set_queue(name, len(since), oldest, self._moved[name])

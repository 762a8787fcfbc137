"""A de-duplicating work queue with the semantics of client-go's rate-limiting queue.

- A key waits at most once, however often it is added.

- A key is never given to two workers at once. If it is added while a worker has it, it runs again afterwards.

- `add_after` keeps the earliest of the requested times.

- `retry` backs off exponentially per key until `forget`.
"""

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

BACKOFF_FIRST_S = 0.05
BACKOFF_LIMIT_S = 300.0
BACKOFF_JITTER = 0.2


class WorkQueue(Generic[K]):
    """Keys to work on, each at most once in the queue and with at most one worker.

    All methods must be called on one event loop's thread. `clock` returns monotonic seconds. The queue holds at most
    `limit` distinct keys, waiting or delayed. It refuses further keys, and the periodic resync adds them again later.
    """

    def __init__(self, clock: Callable[[], float], *, limit: int = 100_000, rng: random.Random | None = None) -> None:
        self._clock = clock
        self._limit = limit
        self._rng = rng or random.Random()  # noqa: S311 - spreads retries, guards nothing
        self._ready: deque[K] = deque()
        self._dirty: set[K] = set()
        self._processing: dict[K, float] = {}
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0
        self._failures: dict[K, int] = {}
        self._wake = asyncio.Event()
        self._moved_at = clock()
        self._closed = False
        self.refused = 0

    def add(self, key: K) -> bool:
        """Queue `key` for the next free worker. Return False if the queue is full."""
        if key in self._dirty:
            return True
        if len(self._dirty) + len(self._due) >= self._limit and key not in self._due:
            self.refused += 1
            return False
        self._dirty.add(key)
        if key not in self._processing:
            self._push(key)
        return True

    def add_after(self, key: K, seconds: float) -> bool:
        """Queue `key` in `seconds`, or earlier if an earlier time was requested. Return False if the queue is full."""
        if seconds <= 0:
            return self.add(key)
        when = self._clock() + seconds
        known = self._due.get(key)
        if known is not None and known <= when:
            return True
        if known is None and len(self._dirty) + len(self._due) >= self._limit:
            self.refused += 1
            return False
        self._due[key] = when
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, key))
        self._wake.set()
        return True

    def retry(self, key: K) -> float:
        """Queue `key` again after its back-off, which doubles with each call until `forget`. Return the seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = BACKOFF_LIMIT_S if failures > 32 else min(BACKOFF_LIMIT_S, BACKOFF_FIRST_S * 2.0**failures)
        delay *= 1 + BACKOFF_JITTER * self._rng.random()
        self.add_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """Reset the back-off of `key`."""
        self._failures.pop(key, None)

    def close(self) -> None:
        """Give out no more keys."""
        self._closed = True
        self._wake.set()

    async def get(self) -> K | None:
        """Wait for a key and take it. Call `done` exactly once for it. Return None when the queue is closed."""
        while not self._closed:
            if (key := self.take()) is not None:
                if self._ready:
                    self._wake.set()  # one event serves all workers: wake the next one
                return key
            self._wake.clear()
            due = self.next_due()
            timeout = None if due is None else max(0.0, due - self._clock())
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                pass  # a delayed key is due now
        return None

    def take(self) -> K | None:
        """Return the next key that is ready now, or None."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            when, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == when:  # an earlier time replaces this entry
                del self._due[key]
                self.add(key)
        if not self._ready:
            return None
        key = self._ready.popleft()
        self._dirty.discard(key)
        self._processing[key] = now
        self._moved_at = now
        return key

    def done(self, key: K) -> None:
        """Return `key` to the queue. It is queued again if it was added meanwhile."""
        del self._processing[key]
        self._moved_at = self._clock()
        if key in self._dirty:
            self._push(key)

    def next_due(self) -> float | None:
        """Return when the earliest delayed key is due, on the queue's clock."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def stalled_s(self) -> float:
        """Return the seconds without progress: a key has been with a worker, or keys wait and no worker takes or
        returns one.
        """
        since = [*self._processing.values(), *([self._moved_at] if self._ready else [])]
        return self._clock() - min(since) if since else 0.0

    def __len__(self) -> int:
        """Return the number of keys that are ready and wait for a worker."""
        return len(self._ready)

    @property
    def delayed(self) -> int:
        """Return the number of keys that wait for their time."""
        return len(self._due)

    def _push(self, key: K) -> None:
        if not self._ready and not self._processing:
            self._moved_at = self._clock()
        self._ready.append(key)
        self._wake.set()

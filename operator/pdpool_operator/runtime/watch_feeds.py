"""Lists and watches resources so that no failure of the API server or of the network reaches kopf.

kopf ends the process on most failures of a watch. It also never notices an object that was deleted while its watch was
down. So kopf gets this object as its HTTP session. Lists are repeated until one is complete. A broken watch just ends.
A watch that cannot go on ends with 410, and kopf lists again.

Calls for one resource start at least `PACE_S` apart, and after failures at growing intervals up to `BACKOFF_LIMIT_S`.
"""

import asyncio
import json
import logging
import random
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from .api import Api
from .api_errors import ApiError, GoneError, UnavailableError
from .resources import Object, Resource

PACE_S = 0.5
BACKOFF_FIRST_S = 0.5
BACKOFF_LIMIT_S = 10.0
"""The longest pause, jitter included."""
JITTER = 0.2
SILENT_S = 75.0
"""A watch without an event or bookmark for so long is given up. The API server sends a bookmark every minute."""
WORKED_S = 5.0
"""A watch that lasts so long has worked, also without an event."""
WATCH_S = 300
"""The API server ends a watch after this time. It is then resumed."""
NOTICED_S = SILENT_S + BACKOFF_LIMIT_S
"""Time after which a failure of the API server shows, at the latest."""

CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})
GONE_LINE = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}\n'

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives what the feeds read, before kopf does."""

    def listed(self, resource: Resource, namespace: str | None, objects: Sequence[Object], version: str) -> None:
        """Take in a complete list. Objects that are not in it exist no longer."""

    def changed(self, resource: Resource, type_: str, obj: Object) -> None:
        """Take in a change: ADDED, MODIFIED or DELETED."""


@dataclass
class Feed:
    """What is known of one resource in one namespace, or in all (None)."""

    resource: Resource
    namespace: str | None
    began_at: float = 0.0
    """When it was first asked for."""
    version: str = ""
    """Newest resourceVersion of the resource. Empty before the first list."""
    confirmed_at: float = -1e9
    """When the API server last sent a complete list, an event or a bookmark."""
    listed: bool = False
    """Whether a complete list has been read."""
    failures: int = 0
    """Calls that failed in a row."""
    failing: bool = False
    """Whether no watch has been opened since the last failure."""
    called_at: float = -1e9

    def __str__(self) -> str:
        return self.resource.plural + (f" in {self.namespace}" if self.namespace else "")


class WatchFeeds:
    """The feeds of all watched resources, and kopf's HTTP session in front of them.

    Only `request`, `headers`, `closed` and `close` are kopf's.
    """

    def __init__(
        self,
        api: Api,
        resources: Iterable[Resource],
        sink: Sink,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
        silent_s: float = SILENT_S,
        rng: random.Random | None = None,
    ) -> None:
        self._silent_s = silent_s
        self._api, self._sink, self._clock, self._sleep = api, sink, clock, sleep
        self._resources = {resource.path(None): resource for resource in resources}
        self._feeds: dict[tuple[str, str | None], Feed] = {}
        self._rng = rng or random.Random()  # noqa: S311 - spreads calls, guards nothing
        self.headers = {"User-Agent": "pdpool-operator"}
        self.closed = False

    def feed(self, resource: Resource, namespace: str | None) -> Feed:
        """Return the feed of a resource in a namespace, or in all."""
        return self._feeds.setdefault((resource.path(None), namespace), Feed(resource, namespace, self._clock()))

    def age_s(self, resource: Resource, namespace: str | None) -> float:
        """Return how old the known objects may be, in seconds. Infinite before the first list."""
        for where in (None, namespace):
            feed = self._feeds.get((resource.path(None), where))
            if feed is not None and feed.listed:
                return self._clock() - feed.confirmed_at
        return float("inf")

    def version(self, resource: Resource) -> str:
        """Return the newest known resourceVersion of a resource. Empty before its first list."""
        versions = [feed.version for feed in self._feeds.values() if feed.resource == resource and feed.version]
        return max(versions, key=lambda version: (len(version), version), default="")

    def blind(self) -> tuple[float, str]:
        """Return for how many seconds a resource has been out of sight, and which one. 0 while all are seen."""
        now, ages = self._clock(), [(0.0, "")]
        for feed in self._feeds.values():
            age = now - max(feed.confirmed_at, feed.began_at)
            if feed.failing or age > NOTICED_S:
                ages.append((age, str(feed)))
        return max(ages)

    async def request(self, *, method: str, url: str, **_: Any) -> "Answer":  # noqa: ANN401 - kopf's calling convention
        """Answer a request of kopf. It fails only if cancelled."""
        if method.upper() != "GET":
            raise RuntimeError(f"kopf must only read, but sends {method} {url}")
        parts = urlsplit(url)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        found = re.fullmatch(r"(/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/([^/]+))?/([^/]+)", parts.path)
        resource = self._resources.get(f"{found[1]}/{found[3]}") if found else None
        if found is None or resource is None:
            return Answer(await self._discover(parts.path))
        feed = self.feed(resource, found[2])
        labels = query.get("labelSelector", "")
        if query.get("watch") == "true":
            return Answer(lines=self._watch(feed, labels, query["resourceVersion"]))
        return Answer(await self._list(feed, labels))

    async def close(self) -> None:
        """Do nothing: the connections are the client's."""

    async def _discover(self, path: str) -> Object:
        """Return what the API server says of its kinds. A group that does not exist has none."""
        feed = Feed(Resource("", "", path, ""), None)
        while True:
            await self._turn(feed)
            try:
                return await self._api.read(feed.resource, path) or {"resources": [], "groups": [], "versions": []}
            except ApiError as error:
                self._failed(feed, error)

    async def _list(self, feed: Feed, labels: str) -> Object:
        while True:
            await self._turn(feed)
            try:
                objects, version = await self._api.whole_list(feed.resource, feed.namespace, labels)
            except ApiError as error:
                self._failed(feed, error)
                continue
            self._sink.listed(feed.resource, feed.namespace, objects, version)
            feed.listed = True
            self._confirm(feed, version)
            return {"items": objects, "metadata": {"resourceVersion": version}}

    async def _watch(self, feed: Feed, labels: str, since: str) -> AsyncIterator[bytes]:
        """Yield the lines of one watch. It ends at a failure, and with GONE_LINE if it must not be resumed."""
        await self._turn(feed)
        began = self._clock()
        changes = self._api.watch(
            feed.resource,
            feed.namespace,
            labels,
            since,
            seconds=WATCH_S,
            silent_s=self._silent_s,
            opened=lambda: self._opened(feed),
        )
        try:
            async for event in changes:
                type_, obj = event["type"], event["object"]
                if type_ in CHANGES:
                    self._sink.changed(feed.resource, type_, obj)
                self._confirm(feed, obj["metadata"]["resourceVersion"])
                feed.failures = 0
                yield json.dumps(event).encode() + b"\n"
        except UnavailableError as error:  # resumed from the last event
            self._lasted(feed, began)
            self._failed(feed, error)
        except ApiError as error:
            self._lasted(feed, began)
            self._failed(feed, error)
            yield GONE_LINE
        else:
            if not self._lasted(feed, began):
                self._failed(feed, UnavailableError(0, "Closed", "closed at once", f"watch {feed}"))

    def _opened(self, feed: Feed) -> None:
        feed.failing = False

    def _lasted(self, feed: Feed, began: float) -> bool:
        """Return whether a watch lasted long enough to count as working."""
        if self._clock() - began < WORKED_S:
            return False
        feed.failures = 0
        return True

    def _confirm(self, feed: Feed, version: str) -> None:
        feed.version, feed.confirmed_at = version, self._clock()

    async def _turn(self, feed: Feed) -> None:
        """Wait until the next call of this feed may start."""
        backoff = BACKOFF_FIRST_S * 2.0 ** min(feed.failures, 10) if feed.failures else PACE_S
        pause = min(BACKOFF_LIMIT_S, backoff * (1 + JITTER * self._rng.random()))
        wait = feed.called_at + pause - self._clock()
        if wait > 0:
            await self._sleep(wait)
        feed.called_at = self._clock()

    def _failed(self, feed: Feed, error: ApiError) -> None:
        """Count a failure. Only the first of a row is a warning: an outage must not fill the log."""
        first = feed.failures == 0 and not isinstance(error, GoneError)
        feed.failures += 1
        feed.failing = True
        log.log(logging.WARNING if first else logging.DEBUG, "lost sight of %s, retrying: %s", feed, error)


class Answer:
    """A response as kopf reads it: a JSON object, or lines."""

    status = 200

    def __init__(self, body: Object | None = None, lines: AsyncIterator[bytes] | None = None) -> None:
        self._body, self._lines = body, lines
        self.headers: dict[str, str] = {}
        self.content = self

    async def json(self) -> Object | None:
        """Return the object."""
        return self._body

    def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        """Return the lines, each complete."""
        assert self._lines is not None
        return self._lines

    def close(self) -> None:
        """Do nothing: the lines end when their reader is cancelled."""

    async def __aenter__(self) -> "Answer":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._lines is not None:
            await self._lines.aclose()  # type: ignore[attr-defined]

"""Reads from each router how the requests that it sent to each engine ended, and notes which routers are unreachable.

sglang-router counts them for its circuit breaker, also while the breaker is disabled. A failure counts at both engines
of the pair. Answers with 400 and 404 count as successes, and so do 2xx. A request whose client leaves is not counted.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import aiohttp

from ..api.names import router_metrics_url
from ..engines.answers import MAX_COUNT
from .http import REFUSED, UNREACHABLE, Unanswered, request
from .keys import Key
from .samples import Tally

INTERVAL_S = 3.0
TIMEOUT_S = 2.0
CONNECT_S = 1.5
"""Linux sends a second SYN after 1 s."""
UNREACHABLE_AFTER = 2
"""Connections that fail in a row until a router counts as unreachable: one packet may be lost."""
MAX_ENGINES = 4096
"""Limit of engines in one router's counters. More count as no answer."""

_SERIES = re.compile(
    rb'^smg_worker_cb_outcomes_total\{worker="(http://[0-9a-zA-Z.:\[\]-]{1,256})",outcome="(success|failure)"\} '
    rb"(\d{1,19})$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class RouterSample:
    """Counters of one router pod, by URL of the engine, since the router began."""

    pod_uid: str
    at: datetime
    engines: Mapping[str, Tally]


class RouterOutcomes:
    """Samples the routers of all services at regular intervals. A router without an answer has no sample.

    `on_reach` is called with the service when one of its routers has become reachable or unreachable.

    Reconciles set the routers with `watch`. One round asks every router once, at most `concurrency` at a time, and the
    next round begins after it.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        now: Callable[[], datetime],
        on_sample: Callable[[Key, RouterSample], None],
        on_reach: Callable[[Key], object],
        concurrency: int = 16,
    ) -> None:
        self._http, self._now, self._on_sample, self._on_reach = http, now, on_sample, on_reach
        self._slots = asyncio.Semaphore(concurrency)
        self._routers: dict[Key, dict[str, str]] = {}
        self._failed: dict[str, int] = {}
        """Connections that failed in a row, by UID of the router's pod. Absent before the first look at it."""

    def watch(self, service: Key, routers: Iterable[tuple[str, str]]) -> None:
        """Replace the router pods of a service, each with UID and address. Empty: the service has no routers."""
        before, self._routers[service] = self._routers.get(service, {}), dict(routers)
        for uid in before.keys() - self._routers[service].keys():
            self._failed.pop(uid, None)
        if not self._routers[service]:
            del self._routers[service]

    def reachable(self, uid: str) -> bool | None:
        """Whether connections to a router's pod succeed. `None` before the first look at it, and after one failure."""
        failed = self._failed.get(uid)
        if failed is None or 0 < failed < UNREACHABLE_AFTER:
            return None
        return failed == 0

    async def run(self) -> None:
        """Sample for ever."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Sample every router once."""
        pods = [(service, uid, ip) for service, pods in self._routers.items() for uid, ip in pods.items()]
        await asyncio.gather(*(self._look(service, uid, ip) for service, uid, ip in pods))

    async def _look(self, service: Key, uid: str, ip: str) -> None:
        engines, connected = None, True
        try:
            async with self._slots:
                status, body = await request(
                    self._http, "GET", router_metrics_url(ip), timeout_s=TIMEOUT_S, connect_s=CONNECT_S
                )
            engines = parse_outcomes(body) if status == 200 else None
        except Unanswered as error:
            # The counters of the next answer contain what this one would have shown.
            connected = error.outcome not in {REFUSED, UNREACHABLE}
        if uid not in self._routers.get(service, {}):
            return  # the service lost it meanwhile
        self._note(service, uid, connected=connected)
        if engines is not None:
            self._on_sample(service, RouterSample(uid, self._now(), engines))

    def _note(self, service: Key, uid: str, *, connected: bool) -> None:
        before = self.reachable(uid)
        self._failed[uid] = 0 if connected else self._failed.get(uid, 0) + 1
        if self.reachable(uid) is not before and self.reachable(uid) is not None:
            self._on_reach(service)


def parse_outcomes(body: bytes) -> dict[str, Tally]:
    """Parse a router's `/metrics`; raises Unanswered if it names too many engines."""
    engines: dict[str, Tally] = {}
    for url, outcome, text in _SERIES.findall(body):
        name, number = url.decode(), min(int(text), MAX_COUNT)
        seen = engines.get(name, Tally())
        engines[name] = Tally(number, seen.failed) if outcome == b"success" else Tally(seen.done, number)
        if len(engines) > MAX_ENGINES:
            raise Unanswered(f"invalid: more than {MAX_ENGINES} engines")
    return engines

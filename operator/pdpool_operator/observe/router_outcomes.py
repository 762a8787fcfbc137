"""Reads from each router how the requests that it sent to each engine ended.

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
from .http import Unanswered, request
from .keys import Key
from .model import Tally

INTERVAL_S = 3.0
TIMEOUT_S = 2.0
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

    Reconciles set the routers with `watch`. One round asks every router once, at most `concurrency` at a time, and the
    next round begins after it.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        now: Callable[[], datetime],
        on_sample: Callable[[Key, RouterSample], None],
        concurrency: int = 16,
    ) -> None:
        self._http, self._now, self._on_sample = http, now, on_sample
        self._slots = asyncio.Semaphore(concurrency)
        self._routers: dict[Key, dict[str, str]] = {}

    def watch(self, service: Key, routers: Iterable[tuple[str, str]]) -> None:
        """Replace the router pods of a service, each with UID and address. None: the service has no routers."""
        self._routers[service] = dict(routers)
        if not self._routers[service]:
            del self._routers[service]

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
        try:
            async with self._slots:
                status, body = await request(self._http, "GET", router_metrics_url(ip), timeout_s=TIMEOUT_S)
            engines = parse_outcomes(body)
        except Unanswered:
            return  # the counters of the next answer contain what this one would have shown
        if status == 200 and uid in self._routers.get(service, {}):
            self._on_sample(service, RouterSample(uid, self._now(), engines))


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

"""A stock engine whose `/v1/loads` or `/metrics` accepts requests and never answers, or keeps old numbers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from functools import partial

import aiohttp
import pytest
from pdpool_operator.api.engine import EngineType
from pdpool_operator.api.names import ENGINE_HTTP_PORT, Role
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.diagnose.pools import diagnose
from pdpool_operator.diagnose.track import RankTrack, follow
from pdpool_operator.observe.http import session
from pdpool_operator.observe.pod_reader import PodReader
from pdpool_operator.observe.sampler import Sampler
from pdpool_operator.observe.samples import RankSample
from pdpool_operator.observe.targets import Target

from tests.serving import pod_address
from tests.stock_sglang import Stock, StockServer
from tests.unit.operator.plan.makers import T0, make_pod, seconds

STUCK_AFTER_S = 30
EVERY_S = 14
"""Below the age at which a sample is too old, so that few looks cover the time until a verdict of Stuck."""
TIMEOUT_S = 0.5
"""Of a request to an engine. Short, because each test waits for it several times."""
QUEUE = {"prefill": "prefill_bootstrap", "decode": "decode_prealloc"}


class Pair:
    """A prefill and a decode engine, both sampled every `EVERY_S` of a clock that the test sets."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.servers: dict[str, StockServer] = {}
        self.ips = {role: pod_address() for role in QUEUE}
        self.tracks: dict[str, RankTrack] = {}
        self.now: datetime = T0
        self.reader = PodReader(http, now=lambda: self.now, timeout_s=TIMEOUT_S)

    async def start(self) -> "Pair":
        for role, ip in self.ips.items():
            self.servers[role] = await StockServer(Stock(role)).start(ip, ENGINE_HTTP_PORT)
        return self

    def target(self, role: str) -> Target:
        return Target(
            "llm",
            "service/x",
            Role(role),
            0,
            f"uid-{role}",
            self.ips[role],
            EngineType.SGLANG,
            has_connector=False,
            asks_metrics=True,
        )

    async def look(self) -> dict[str, Diagnosis]:
        """Sample both, `EVERY_S` after the last time, and judge them."""
        self.now += seconds(EVERY_S)
        samples = await asyncio.gather(*(self.reader.sample(self.target(role)) for role in QUEUE))
        for role, ranks in zip(QUEUE, samples, strict=True):
            for sample in ranks:
                self.tracks[role] = follow(self.tracks.get(role), sample)
        one, two = (self._subject(role) for role in QUEUE)
        judge = partial(diagnose, stuck_after_s=STUCK_AFTER_S, now=self.now)
        return {"prefill": judge([one], [two])[0], "decode": judge([two], [one])[0]}

    async def play(self, shown: Callable[[str, int], Stock], looks: int) -> list[dict[str, Diagnosis]]:
        """Return the diagnoses of so many looks. `shown` returns what an engine has, by role and number of the look."""
        found = []
        for number in range(looks):
            for role, server in self.servers.items():
                server.stock = shown(role, number)
            found.append(await self.look())
        return found

    def _subject(self, role: str) -> Subject:
        pod = make_pod(f"{role}-0")
        track = self.tracks[role]
        return Subject("service/x", Role(role), 0, pod, leaving=False, tracks=(track,), watched_pod=pod.name)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with session(8) as http:
        one = await Pair(http).start()
        yield one
        for server in one.servers.values():
            await server.stop()


def serves(role: str, number: int) -> Stock:
    """An engine under load: its queue is never seen empty, and a request leaves it between two looks."""
    running = 3 if role == "decode" else 0
    return Stock(role, {QUEUE[role]: 4}, {QUEUE[role]: 200 + number}, running, 9000 + 400 * number, 300 + number)


def verdicts(found: Sequence[dict[str, Diagnosis]], role: str) -> set[Verdict]:
    return {one[role].verdict for one in found}


async def test_engines_that_serve_flow(pair: Pair):
    found = await pair.play(serves, 6)
    assert verdicts(found, "prefill") | verdicts(found, "decode") == {Verdict.FLOWING}


async def test_hanging_loads_leave_the_lengths_of_metrics(pair: Pair):
    for server in pair.servers.values():
        server.hanging = ("/v1/loads",)
    found = await pair.play(serves, 6)
    assert verdicts(found, "prefill") | verdicts(found, "decode") == {Verdict.FLOWING}


@pytest.mark.parametrize("role", QUEUE)
async def test_hanging_metrics_never_make_an_engine_stuck(pair: Pair, role: str):
    await pair.play(serves, 3)
    pair.servers[role].hanging = ("/metrics",)
    found = await pair.play(lambda who, number: serves(who, 3 + number), 6)
    assert verdicts(found, role) == {Verdict.FLOWING, Verdict.UNKNOWN}
    assert "nothing shows whether the queue moves (/metrics: timeout)" in found[-1][role].message
    assert not {Verdict.STUCK, Verdict.BLOCKED} & (verdicts(found, "prefill") | verdicts(found, "decode"))
    pair.servers[role].hanging = ()
    found = await pair.play(lambda who, number: serves(who, 9 + number), 2)
    assert verdicts(found, role) == {Verdict.FLOWING}


async def test_engine_of_which_all_reports_hang_is_unknown(pair: Pair):
    await pair.play(serves, 3)
    pair.servers["decode"].hanging = ("/v1/loads", "/metrics")
    found = await pair.play(lambda who, number: serves(who, 3 + number), 4)
    assert verdicts(found, "decode") == {Verdict.UNKNOWN}
    assert "does not report its queues (timeout; /metrics: timeout)" in found[-1]["decode"].message
    assert verdicts(found, "prefill") == {Verdict.FLOWING}


@pytest.mark.parametrize("hanging", [(), ("/v1/loads",)])
async def test_frozen_gauges_of_engines_that_serve_are_not_stuck(pair: Pair, hanging: tuple[str, ...]):
    """The gauges stay above zero. `/v1/loads` has the true lengths, if it answers."""
    for role, server in pair.servers.items():
        server.hanging, server.gauges = hanging, {QUEUE[role]: 7}

    def nothing_waits(role: str, number: int) -> Stock:
        return Stock(role, {}, {QUEUE[role]: 200 + number}, 0, 9000 + 400 * number, 300 + number)

    found = await pair.play(nothing_waits, 6)
    seen = {Verdict.FLOWING} if hanging else {Verdict.IDLE}
    assert (verdicts(found, "prefill"), verdicts(found, "decode")) == (seen, seen)


async def test_engine_that_hangs_does_not_delay_samples_of_others(pair: Pair):
    seen: dict[str, list[RankSample]] = {role: [] for role in QUEUE}
    enough = asyncio.Event()

    def on_samples(target: Target, samples: Sequence[RankSample]) -> None:
        seen[target.role].extend(samples)
        if len(seen["prefill"]) >= 20:
            enough.set()

    pair.servers["decode"].hanging = ("/v1/loads", "/metrics")
    async with session(8) as http:
        clock = asyncio.get_running_loop().time
        reader = PodReader(http, now=lambda: T0, timeout_s=60)
        sampler = Sampler(reader, clock=clock, on_samples=on_samples, interval_s=0.01)
        tasks = [asyncio.create_task(sampler.run())]
        tasks += [
            asyncio.create_task(sampler.watch("llm", "service/x", Role(role), [pair.target(role)])) for role in QUEUE
        ]
        await asyncio.wait_for(enough.wait(), 30)
        assert seen["decode"] == []
        assert pair.servers["decode"].asked == {"/v1/loads": 1, "/metrics": 1}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

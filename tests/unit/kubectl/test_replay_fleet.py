"""`record` and `replay` of stock engines that something else runs, beside the operator's judge of the same engines."""

import asyncio
import runpy
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from pdpool_kubectl.observer import Observer
from pdpool_kubectl.record import record
from pdpool_kubectl.recording import Look, dump
from pdpool_kubectl.replay import Change, replay
from pdpool_operator.api.services import DisaggregatedService
from pdpool_operator.controller.judge import Judge
from pdpool_operator.observe.fleets import FleetReads
from pdpool_operator.observe.http import session
from pdpool_operator.observe.keys import Bindings, Key
from pdpool_operator.observe.pod_reader import ANSWER_BYTES, PodReader
from pdpool_operator.observe.sampler import Sampler
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.resources import PODS, SERVICES_PD

from tests.fake_api import Call, FakeApi
from tests.serving import pod_address
from tests.stock_sglang import Stock, StockServer
from tests.unit.operator.plan.makers import T0, seconds

from .conftest import SECRET, SINCE, Kubectl, run

PORT = 30080
BOOTSTRAP = "prefill_bootstrap"
ROLES = ("prefill", "decode")

Life = Callable[[int], Stock]
"""What an engine shows at each look, by the number of the look."""


def stuck_prefill(number: int) -> Stock:
    return Stock("prefill", queues={BOOTSTRAP: 4})


def busy_prefill(number: int) -> Stock:
    return Stock("prefill", {BOOTSTRAP: 90}, {BOOTSTRAP: 200 + number}, 0, 10**6 + 900 * number, 300 + number)


def working_decode(number: int) -> Stock:
    return Stock("decode", running=3, tokens=1000 + 400 * number, finished=10 + number)


def idle_decode(number: int) -> Stock:
    return Stock("decode")


@dataclass
class Fleet:
    """One stock engine of each role, in pods that a service selects. The fake API server forwards to them."""

    api: FakeApi
    client: Api
    http: aiohttp.ClientSession
    lives: dict[str, Life] = field(default_factory=dict)
    servers: dict[str, StockServer] = field(default_factory=dict)

    async def start(self) -> "Fleet":
        sides = {role: {"selector": {"app": role}, "port": PORT} for role in ROLES}
        self.api.put(SERVICES_PD, "llm", "watched", {"metadata": {}, "spec": sides})
        self.api.fault = self.forward
        for role in ROLES:
            ip = pod_address()
            self.servers[role] = await StockServer(Stock(role)).start(ip, PORT)
            put_pod(self.api, f"{role}-x", role, ip)
        return self

    async def stop(self) -> None:
        for server in self.servers.values():
            await server.stop()

    async def forward(self, _: web.Request, call: Call) -> web.StreamResponse | None:
        """Answer as the API server's proxy does."""
        before, _, path = call.path.partition("/proxy/")
        if not path:
            return None
        name, _, port = before.rpartition("/")[2].partition(":")
        ip = self.api.objects[PODS]["llm", name]["status"]["podIP"]
        try:
            async with self.http.get(f"http://{ip}:{port}/{path}") as answer:
                return web.Response(status=answer.status, body=await answer.read())
        except aiohttp.ClientConnectorError:
            return web.json_response({"message": "connection refused"}, status=503)

    def show(self, number: int) -> None:
        for role, life in self.lives.items():
            self.servers[role].stock = life(number)

    async def recorded(self, count: int) -> list[Look]:
        """Record so many looks, and give them times 3 s apart."""
        numbers = iter(range(1, count + 1))
        self.show(0)
        every_s = 0.001
        looks = await record(
            self.client, "llm", every_s * (count - 0.5), lambda _: self.show(next(numbers)), every_s=every_s
        )
        return [retimed(look, number) for number, look in enumerate(looks)]

    async def observed(self, count: int) -> list[Change]:
        """Return what the operator finds at so many looks, 3 s apart."""
        clock, bindings = [T0], Bindings()
        judge = Judge(bindings, lambda: clock[-1], lambda _: None)
        reader = PodReader(self.http, now=lambda: clock[-1])
        sampler = Sampler(reader, clock=asyncio.get_running_loop().time)
        reads, changes = FleetReads(self.client, sampler), dict[str, Change]()
        service = DisaggregatedService.parse(self.api.objects[SERVICES_PD]["llm", "watched"])
        bindings.bind(Key(service.kind, "llm", "watched"), "service/watched", "service/watched")
        found = []
        for number in range(count):
            self.show(number)
            clock.append(T0 + seconds(3 * number))
            sides = {Key(s.pool.kind, "llm", "service/watched"): s for s in (await reads.observe(service)).sides}
            for key, side in sides.items():
                judge.observed(key, side)
            for uid in sampler.samples():
                target = sampler.target(uid)
                assert target is not None
                judge.on_samples(target, await reader.sample(target))
            judge.tick()
            for one in (one for key in sides for one in judge.judge(key)):
                change = Change(3.0 * number, one.subject.name, str(one.verdict), one.message)
                if change.instance not in changes or changes[change.instance].verdict != change.verdict:
                    changes[change.instance] = change
                    found.append(change)
        return found


def put_pod(api: FakeApi, name: str, app: str, ip: str, **labels: str) -> dict[str, Any]:
    """A pod that something else made, with secrets in its environment and annotations."""
    containers = [{"name": "sglang", "env": [{"name": "TOKEN", "value": SECRET}], "args": ["--api-key", SECRET]}]
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": SINCE}
    body = {
        "metadata": {"labels": {"app": app, **labels}, "annotations": {"note": SECRET}},
        "spec": {"containers": containers},
        "status": {"phase": "Running", "podIP": ip, "conditions": [ready]},
    }
    return api.put(PODS, "llm", name, body)


def retimed(look: Look, number: int) -> Look:
    at = (T0 + seconds(3 * number)).isoformat()
    return replace(look, at=at, answers={uid: replace(one, at=at, asked_at=at) for uid, one in look.answers.items()})


@pytest.fixture
async def fleet(api: FakeApi) -> AsyncIterator[Fleet]:
    async with ApiClient(Configuration(host=api.url)) as client, session(8) as http:
        one = await Fleet(api, Api(client), http).start()
        yield one
        await one.stop()


def asked(look: Look) -> set[str]:
    """Names of the pods that were asked."""
    return {pod["metadata"]["name"] for pod in look.pods if pod["metadata"]["uid"] in look.answers}


def verdicts(changes: list[Change]) -> list[tuple[str, str]]:
    return [(change.instance, change.verdict) for change in changes]


class TestVerdicts:
    @pytest.mark.parametrize("prefill", [stuck_prefill, busy_prefill])
    @pytest.mark.parametrize("decode", [working_decode, idle_decode])
    async def test_replay_finds_what_the_operator_finds(self, fleet: Fleet, prefill: Life, decode: Life) -> None:
        fleet.lives = {"prefill": prefill, "decode": decode}
        assert list(replay(await fleet.recorded(16))) == await fleet.observed(16)

    @pytest.mark.parametrize("path", ["/metrics", "/v1/loads"])
    async def test_missing_source_gives_the_operators_verdicts(self, fleet: Fleet, path: str) -> None:
        fleet.lives = {"prefill": stuck_prefill, "decode": working_decode}
        for server in fleet.servers.values():
            server.missing = (path,)
        assert verdicts(list(replay(await fleet.recorded(30)))) == verdicts(await fleet.observed(30))

    async def test_stuck_stock_engine_is_found(self, fleet: Fleet) -> None:
        fleet.lives = {"prefill": stuck_prefill, "decode": working_decode}
        changes = list(replay(await fleet.recorded(16)))
        assert verdicts(changes)[-1] == ("prefill-x", "Stuck")
        assert "requests wait for bootstrap and nothing moves" in changes[-1].message

    async def test_busy_stock_engine_is_not_stuck(self, fleet: Fleet) -> None:
        fleet.lives = {"prefill": busy_prefill, "decode": working_decode}
        changes = list(replay(await fleet.recorded(16)))
        assert verdicts(changes) == [("prefill-x", "Flowing"), ("decode-x", "Flowing")]

    async def test_false_alarm_becomes_a_failing_test(self, fleet: Fleet, tmp_path: Path) -> None:
        fleet.lives = {"prefill": stuck_prefill, "decode": working_decode}
        looks = await fleet.recorded(16)
        file, module = tmp_path / "alarm.json", tmp_path / "test_alarm.py"
        file.write_text(dump("llm", looks))
        code, _ = await asyncio.to_thread(run, "replay", str(file), "--as-test", str(module))
        check = runpy.run_path(str(module))["test_alarm_raises_no_alarm"]
        with pytest.raises(AssertionError):
            check()
        file.write_text(dump("llm", looks[:5]))
        check()
        assert code == 1


@pytest.mark.usefixtures("fleet")
async def test_recording_of_a_fleet_holds_no_secret(kubectl: Kubectl, tmp_path: Path) -> None:
    result = await kubectl("record", str(tmp_path / "fleet.json"), "--seconds", "0")
    assert SECRET not in (tmp_path / "fleet.json").read_text()
    progress = "look 1: 0 pools, 1 service with selectors, 2 engine pods, 0 questions unanswered\n"
    assert (result.exit_code, result.stderr) == (0, progress)


class TestQuestions:
    async def test_only_metrics_that_diagnosis_reads_are_kept(self, fleet: Fleet) -> None:
        (look,) = await fleet.recorded(1)
        lines = [line for one in look.answers.values() for line in (one.metrics or {})["text"].splitlines()]
        assert any(line.startswith("sglang:num_prefill_bootstrap_queue_reqs{") for line in lines)
        assert not any(line.startswith(("#", "sglang:cache_hit_rate")) for line in lines)

    async def test_answer_beyond_the_samplers_limit_is_refused(self, fleet: Fleet) -> None:
        fleet.lives["prefill"] = lambda _: Stock("prefill", queues={BOOTSTRAP: "x" * ANSWER_BYTES})
        (look,) = await fleet.recorded(1)
        prefill, decode = look.answers.values()
        assert prefill.engine == {"error": f"invalid: more than {ANSWER_BYTES} bytes"}
        assert decode.errors == ()

    async def test_pods_that_the_operator_refuses_are_not_asked(self, fleet: Fleet) -> None:
        put_pod(fleet.api, "ours", "decode", "127.0.0.1", **{"app.kubernetes.io/managed-by": "pdpool"})
        (look,) = await fleet.recorded(1)
        assert asked(look) == {"prefill-x", "decode-x"}

    async def test_pod_of_two_services_stays_with_the_first(self, fleet: Fleet) -> None:
        sides = {"prefill": {"selector": {"app": "prefill"}}, "decode": {"selector": {"app": "other"}}}
        (first,) = await fleet.recorded(1)
        fleet.api.put(SERVICES_PD, "llm", "another", {"metadata": {}, "spec": sides})
        (second,) = await fleet.recorded(1)
        observer = Observer()
        for look in (first, replace(second, services=second.services[::-1])):
            found = {one.key.name: [t.port for t in one.targets] for one in observer.observe(look)[::2]}
        assert found == {"service/another": [], "service/watched": [PORT]}

    async def test_connector_of_pdpool_is_asked_in_place_of_metrics(self, fleet: Fleet) -> None:
        binding = {"selector": {"app": "decode"}, "port": PORT, "connector": "Pdpool"}
        prefill = {"selector": {"app": "prefill"}, "port": PORT}
        fleet.api.put(SERVICES_PD, "llm", "watched", {"metadata": {}, "spec": {"prefill": prefill, "decode": binding}})
        (look,) = await fleet.recorded(1)
        by_app = {pod["metadata"]["labels"]["app"]: look.answers[pod["metadata"]["uid"]] for pod in look.pods}
        assert by_app["decode"].metrics is None
        assert "connection refused" in by_app["decode"].connectors[0]["error"]
        assert by_app["prefill"].connectors == []

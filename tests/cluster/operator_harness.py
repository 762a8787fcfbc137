"""What the operator's cluster tests stand on: a namespace each, the operator as a local process under the rights that
the chart gives it, and the tests in the place of the kubelet, so that pods come and go when a test says so.

Pods name a scheduler that does not exist; a test marks them Running at a loopback address, where it may serve an
engine.
"""

import asyncio
import base64
import contextlib
import itertools
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from pdpool_operator.api.names import ADMIN_PORT, ENGINE_HTTP_PORT
from pdpool_operator.observe.cluster import DECODE_POOLS, PREFILL_POOLS, SERVICES_PD
from pdpool_operator.runtime.api import LEASES, PODS, Api, ApiError, NotFoundError, Resource, connect

ROOT = Path(__file__).parents[2]
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
POOLS = {"PrefillPool": PREFILL_POOLS, "DecodePool": DECODE_POOLS, "DisaggregatedService": SERVICES_PD}

BENCH = "pdpool.dev/operator-tests"
"""Label of the namespaces that these tests made; an operator in one serves no other."""
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Before a command: it does not outlive a test session that is killed."""
NOBODY = "pdpool-tests-no-such-scheduler"
ADDRESSES = (f"127.88.{i // 250}.{i % 250 + 1}" for i in itertools.count(os.getpid() % 200 * 250))

Object = dict[str, Any]


async def eventually(what: Callable[[], Awaitable[Any]], *, within_s: float = 30.0, every_s: float = 0.1) -> Any:
    """What `what` returns as soon as it is true; fails with its last value or error when it never is."""
    last: Any = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    if last := await what():
                        return last
                except (ApiError, AssertionError, KeyError, aiohttp.ClientError) as error:
                    last = error
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise AssertionError(f"not within {within_s} s; last: {last!r}") from None


class Admin(Api):
    """The test's own hands in the cluster."""

    async def drop(self, resource: Resource, namespace: str | None, name: str, **options: Any) -> None:
        with contextlib.suppress(NotFoundError):
            body = {"apiVersion": "v1", "kind": "DeleteOptions"} | options
            await self._call("delete", resource, resource.path(namespace, name), body=body)

    async def make(self, resource: Resource, body: Object) -> Object:
        path = resource.path(body["metadata"].get("namespace"))
        kind = {"apiVersion": resource.api_version, "kind": resource.kind}
        return await self._call("create", resource, path, body=kind | body)

    async def edit(
        self, resource: Resource, namespace: str, name: str, patch: Object, sub: str | None = None
    ) -> Object:
        path = resource.path(namespace, name, sub)
        return await self._call("patch", resource, path, body=patch, content="application/merge-patch+json")

    async def all(self, resource: Resource, namespace: str | None, labels: str = "") -> list[Object]:
        return [item async for item in self.list(resource, namespace, labels)]


async def _leases(admin: Admin) -> dict[str, str]:
    """Version of each Lease that an operator holds, by namespace; without those of tests, which keep to their own."""
    tests = {one["metadata"]["name"] for one in await admin.all(NAMESPACES, None, BENCH)}
    return {
        lease["metadata"]["namespace"]: lease["metadata"]["resourceVersion"]
        for lease in await admin.all(LEASES, None)
        if lease["metadata"]["name"] == "pdpool-operator"
        and (lease.get("spec") or {}).get("holderIdentity")
        and lease["metadata"]["namespace"] not in tests
    }


async def _alone(admin: Admin, before: dict[str, str]) -> None:
    """Fail if an operator of somebody else leads: it may serve all namespaces, and write on ours."""
    strangers = [ns for ns, version in (await _leases(admin)).items() if before.get(ns) != version]
    assert not strangers, f"an operator leads in {strangers} and may write on the tests' objects: uninstall it"


@dataclass
class Operator:
    """One operator process."""

    env: dict[str, str]
    log: Path
    url: str
    process: asyncio.subprocess.Process | None = None

    async def start(self, *, ready: bool = True) -> "Operator":
        with self.log.open("ab") as log:
            command = (*ENDS_WITH_US, sys.executable, "-W", "error", "-m", "pdpool_operator")
            self.process = await asyncio.create_subprocess_exec(*command, env=self.env, stderr=log, cwd=ROOT)
        if ready:
            await self.until("leader")
        return self

    async def until(self, state: str, within_s: float = 40.0) -> None:
        async def is_so() -> bool:
            assert self.process is not None
            assert self.process.returncode is None, self.logged()[-3000:]
            with contextlib.suppress(aiohttp.ClientError):
                return (await self.get("/readyz")).strip() == state
            return False

        await eventually(is_so, within_s=within_s)

    async def get(self, path: str) -> str:
        async with aiohttp.ClientSession() as http, http.get(self.url + path) as answer:
            return await answer.text()

    async def calls(self) -> dict[tuple[str, str], float]:
        """Calls of the API so far, by (verb, resource)."""
        counts: dict[tuple[str, str], float] = {}
        for line in (await self.get("/metrics")).splitlines():
            if line.startswith("pdpool_api_calls_total{"):
                labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
                key = (labels["verb"].strip('"'), labels["resource"].strip('"'))
                counts[key] = counts.get(key, 0) + float(line.rsplit(" ", 1)[1])
        return counts

    async def reconciles(self) -> float:
        """Reconciles so far."""
        lines = (await self.get("/metrics")).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("pdpool_reconcile_total{"))

    async def quiet_reconciles(self) -> float:
        """Reconciles so far, once two looks, 2 s apart, see no further one."""
        last = -1.0

        async def same() -> bool:
            nonlocal last
            now = await self.reconciles()
            quiet, last = now == last, now
            return quiet

        await eventually(same, every_s=2.0, within_s=60)
        return last

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def stop(self, number: int = signal.SIGTERM, within_s: float = 10.0) -> float:
        """End it; seconds it took."""
        assert self.process is not None
        started = time.monotonic()
        if self.process.returncode is None:
            self.send(number)
        async with asyncio.timeout(within_s):
            await self.process.wait()
        return time.monotonic() - started

    def logged(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@dataclass
class Engine:
    """A stand-in for an engine pod's processes: enough of HTTP for samplers and routers, under the test's control."""

    ip: str
    running: int = 0
    queues: dict[str, int] = field(default_factory=dict)
    runners: list[web.AppRunner] = field(default_factory=list)

    async def start(self) -> "Engine":
        for port, routes in ((ADMIN_PORT, {"/v1/state": self._state}), (ENGINE_HTTP_PORT, self._http())):
            app = web.Application()
            for path, handler in routes.items():
                app.router.add_get(path, handler)
            runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, self.ip, port).start()
            self.runners.append(runner)
        return self

    async def stop(self) -> None:
        for runner in self.runners:
            await runner.cleanup()
        self.runners.clear()

    def _http(self) -> dict[str, Any]:
        async def info(_: web.Request) -> web.Response:
            return web.json_response({"model_path": "tiny", "served_model_name": "tiny", "is_generation": True})

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

        async def ok(_: web.Request) -> web.Response:
            return web.Response()

        async def loads(_: web.Request) -> web.Response:
            load = {"dp_rank": 0, "num_running_reqs": self.running, "num_waiting_reqs": 0, "disaggregation": {}}
            return web.json_response({"loads": [load]})

        paths = {"/health": ok, "/health_generate": ok, "/v1/loads": loads, "/v1/models": models}
        return paths | dict.fromkeys(("/server_info", "/get_server_info", "/model_info", "/get_model_info"), info)

    async def _state(self, _: web.Request) -> web.Response:
        queues = {
            name: {"reqs": n, "oldest_s": 1.0 if n else None, "moved_total": 5} for name, n in self.queues.items()
        }
        return web.json_response(
            {
                "version": 1,
                "incarnation": self.ip,
                "uptime_s": 10.0,
                "loop_lag_s": 0.001,
                "engine_beat_age_s": 0.01,
                "draining": False,
                "queues": queues,
                "holds": 0,
                "peers": [],
            }
        )


class Bench:
    """One test's namespace, and everything in it."""

    def __init__(self, admin: Admin, folder: Path) -> None:
        self.admin = admin
        self.folder = folder
        self.namespace = f"op-{secrets.token_hex(4)}"
        self.operators: list[Operator] = []
        self.engines: dict[str, Engine] = {}
        self.processes: list[asyncio.subprocess.Process] = []

    async def set_up(self) -> None:
        """The namespace, with an account that has exactly the rights that the chart gives the operator."""
        ns = self.namespace
        await self.admin.make(NAMESPACES, {"metadata": {"name": ns, "labels": {BENCH: ""}}})
        await self.admin.make(ACCOUNTS, {"metadata": {"name": "operator", "namespace": ns}})
        table = yaml.safe_load((ROOT / "charts/pdpool/files/rbac.yaml").read_text())
        meta = {"name": "operator", "namespace": ns}
        await self.admin.make(ROLES, {"metadata": meta, "rules": table["pools"] + table["own"]})
        reference = {"apiGroup": ROLES.group, "kind": "Role", "name": "operator"}
        subject = {"kind": "ServiceAccount", "name": "operator", "namespace": ns}
        await self.admin.make(BINDINGS, {"metadata": meta, "roleRef": reference, "subjects": [subject]})
        token = await self.admin._call(
            "create",
            ACCOUNTS,
            ACCOUNTS.path(ns, "operator", "token"),
            body={
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": 3600, "audiences": []},
            },
        )
        self._write_kubeconfig(token["status"]["token"])
        (self.folder / "seed").write_bytes(base64.b64encode(secrets.token_bytes(48)))

    def _write_kubeconfig(self, token: str) -> None:
        whole = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
        current = next(c["context"] for c in whole["contexts"] if c["name"] == whole["current-context"])
        cluster = next(c for c in whole["clusters"] if c["name"] == current["cluster"])
        mine = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [cluster],
            "users": [{"name": "operator", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": cluster["name"], "user": "operator"}}],
            "current-context": "x",
        }
        (self.folder / "kubeconfig").write_text(yaml.safe_dump(mine))

    async def tear_down(self) -> None:
        for operator in self.operators:
            if operator.process is not None and operator.process.returncode is None:
                await operator.stop(signal.SIGKILL)
        for process in self.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        for engine in self.engines.values():
            await engine.stop()
        for pod in await self.admin.all(PODS, self.namespace):
            if pod["metadata"].get("finalizers"):
                await self.admin.edit(PODS, self.namespace, pod["metadata"]["name"], {"metadata": {"finalizers": None}})
        await self.admin.drop(NAMESPACES, None, self.namespace)

    def operator(self, **env: str) -> Operator:
        """An operator for this namespace, not started yet."""
        number, ip = len(self.operators), next(ADDRESSES)
        settings = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "operator"),
            "KUBECONFIG": str(self.folder / "kubeconfig"),
            "PDPOOL_NAMESPACE": self.namespace,
            "PDPOOL_WATCH_NAMESPACES": self.namespace,
            "PDPOOL_ENGINE_IMAGE": "localhost/pdpool-engine:dev",
            "PDPOOL_ROUTER_IMAGE": "localhost/pdpool-router:dev",
            "PDPOOL_ROUTER_SEED_FILE": str(self.folder / "seed"),
            "PDPOOL_LISTEN": f"{ip}:8080",
        }
        operator = Operator(settings | env, self.folder / f"operator-{number}.log", f"http://{ip}:8080")
        self.operators.append(operator)
        return operator

    async def pool(self, kind: str, name: str = "chat", **spec: Any) -> Object:
        """Make a pool whose pods no scheduler takes."""
        template = spec.pop("template", {"spec": {"schedulerName": NOBODY}})
        body = {"metadata": {"name": name, "namespace": self.namespace}, "spec": {"template": template, **spec}}
        return await self.admin.make(POOLS[kind], body)

    async def service(self, name: str = "chat", **spec: Any) -> Object:
        refs = {side: {"poolRef": {"name": "chat"}} for side in ("prefill", "decode")}
        body = {"metadata": {"name": name, "namespace": self.namespace}, "spec": refs | spec}
        return await self.admin.make(SERVICES_PD, body)

    async def see(self, resource: Resource, name: str) -> Object | None:
        return await self.admin.get(resource, self.namespace, name)

    async def condition(self, kind: str, type_: str, name: str = "chat") -> Object:
        body = await self.see(POOLS[kind], name)
        assert body is not None
        return next((c for c in body.get("status", {}).get("conditions", []) if c["type"] == type_), {})

    async def until(self, kind: str, type_: str, within_s: float = 30.0, name: str = "chat", **wanted: str) -> Object:
        """Wait until a condition has these fields."""

        async def check() -> Object:
            found = await self.condition(kind, type_, name)
            assert all(found.get(key) == value for key, value in wanted.items()), found
            return found

        result: Object = await eventually(check, within_s=within_s)
        return result

    async def pod(self, name: str, but_not: str = "") -> Object:
        """The pod of that name, as soon as there is one (with another uid than `but_not`)."""

        async def check() -> Object | None:
            pod = await self.see(PODS, name)
            return pod if pod and pod["metadata"]["uid"] != but_not else None

        result: Object = await eventually(check)
        return result

    async def run_pod(self, name: str, *, engine: bool = True, ready: bool = True, but_not: str = "") -> str:
        """Be the kubelet: the pod runs at an address of its own, with a stand-in engine there."""
        pod = await self.pod(name, but_not)
        ip = next(ADDRESSES)
        if engine:
            if name in self.engines:
                await self.engines[name].stop()
            self.engines[name] = await Engine(ip).start()
        await self.set_ready(pod["metadata"]["name"], ready, ip)
        return ip

    @contextlib.asynccontextmanager
    async def kubelet(self) -> AsyncIterator[None]:
        """Run every pod of an engine that appears, at once, with a stand-in engine."""

        async def keep_running() -> None:
            while True:
                for pod in await self.admin.all(PODS, self.namespace, "pdpool.dev/instance"):
                    if "podIP" not in pod["status"] and "deletionTimestamp" not in pod["metadata"]:
                        with contextlib.suppress(ApiError, AssertionError):
                            await self.run_pod(pod["metadata"]["name"])
                await asyncio.sleep(0.2)

        task = asyncio.create_task(keep_running())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def set_ready(self, name: str, ready: bool, ip: str | None = None) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": stamp}
        status: Object = {"phase": "Running", "conditions": [condition]}
        if ip:
            status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
        await self.admin.edit(PODS, self.namespace, name, {"status": status}, "status")


@contextlib.asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    """A namespace for one test, gone afterwards with all processes."""
    client = await connect()
    try:
        one = Bench(Admin(client), folder)
        leases = await _leases(one.admin)
        try:
            await one.set_up()
            yield one
        finally:
            try:
                await _alone(one.admin, leases)
            finally:
                await one.tear_down()
    finally:
        await client.close()

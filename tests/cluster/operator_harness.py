"""Base of the operator's cluster tests.

Each test has a namespace. The operator is a local process with the permissions that the chart grants. The test takes
the place of the kubelet, so it decides when pods start and end.

Pods name a scheduler that does not exist. A test marks them Running at a loopback address, where it may serve an
engine.
"""

import asyncio
import base64
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pdpool_operator.runtime.api_errors import ApiError, NotFoundError
from pdpool_operator.runtime.api_transport import connect
from pdpool_operator.runtime.resources import LEASES, PODS, Resource

from tests.cluster.hands import NAMESPACES, POOLS, Admin, Object, eventually
from tests.cluster.operator_engine import Engine
from tests.cluster.operator_process import ROOT, Operator

ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
CLUSTER_ROLES = Resource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole")
CLUSTER_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding")

ON_CLUSTER = (
    pytest.mark.cluster,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
    pytest.mark.usefixtures("crds"),
)
"""Marks of every test of an operator process."""
BENCH = "pdpool.dev/operator-tests"
"""Label of the namespaces that these tests created. An operator in one of them serves no other."""
NOBODY = "pdpool-tests-no-such-scheduler"


def _addresses() -> Iterator[str]:
    """Yield loopback addresses that no other test process uses, from networks that this process has taken."""
    for network in range(os.getpid(), os.getpid() + 256):
        mark = socket.socket()
        try:
            mark.bind((f"127.88.{network % 256}.254", 1024))
        except OSError:
            mark.close()
            continue
        mark.detach()  # taken until this process ends
        yield from (f"127.88.{network % 256}.{i}" for i in range(1, 254))


ADDRESSES = _addresses()


async def _leases(admin: Admin) -> dict[str, str]:
    """Return the version of each Lease that an operator holds, by namespace. Leases of tests are left out: their
    operators serve only their own namespace.
    """
    before = await admin.all(NAMESPACES, None, BENCH)
    leases = await admin.all(LEASES, None)
    after = await admin.all(NAMESPACES, None, BENCH)
    tests = {one["metadata"]["name"] for one in before + after}  # other tests start and end meanwhile
    return {
        lease["metadata"]["namespace"]: lease["metadata"]["resourceVersion"]
        for lease in leases
        if lease["metadata"]["name"] == "pdpool-operator"
        and (lease.get("spec") or {}).get("holderIdentity")
        and lease["metadata"]["namespace"] not in tests
    }


async def _alone(admin: Admin, before: dict[str, str]) -> None:
    """Fail if a foreign operator leads: it may serve all namespaces and write on the tests' objects."""
    strangers = [ns for ns, version in (await _leases(admin)).items() if before.get(ns) != version]
    assert not strangers, f"an operator leads in {strangers} and may write on the tests' objects: uninstall it"


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
        """Create the namespace, with an account that has exactly the permissions of the operator in the chart."""
        ns = self.namespace
        made = await self.admin.make(NAMESPACES, {"metadata": {"name": ns, "labels": {BENCH: ""}}})
        await self.admin.make(ACCOUNTS, {"metadata": {"name": "operator", "namespace": ns}})
        table = yaml.safe_load((ROOT / "charts/pdpool/files/rbac.yaml").read_text())
        meta = {"name": "operator", "namespace": ns}
        await self.admin.make(ROLES, {"metadata": meta, "rules": table["pools"] + table["own"]})
        reference = {"apiGroup": ROLES.group, "kind": "Role", "name": "operator"}
        subject = {"kind": "ServiceAccount", "name": "operator", "namespace": ns}
        await self.admin.make(BINDINGS, {"metadata": meta, "roleRef": reference, "subjects": [subject]})
        # The garbage collector removes these with the namespace.
        owner = {"apiVersion": "v1", "kind": "Namespace", "name": ns, "uid": made["metadata"]["uid"]}
        owned = {"name": ns, "ownerReferences": [owner]}
        await self.admin.make(CLUSTER_ROLES, {"metadata": owned, "rules": table["cluster"]})
        reference = {"apiGroup": ROLES.group, "kind": "ClusterRole", "name": ns}
        await self.admin.make(CLUSTER_BINDINGS, {"metadata": owned, "roleRef": reference, "subjects": [subject]})
        token = await self.admin.call(
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
                with contextlib.suppress(NotFoundError):
                    name, free = pod["metadata"]["name"], {"metadata": {"finalizers": None}}
                    await self.admin.edit(PODS, self.namespace, name, free)
        await self.admin.drop(NAMESPACES, None, self.namespace)

    def operator(self, **env: str) -> Operator:
        """Return an operator for this namespace, not started yet."""
        number, ip = len(self.operators), next(ADDRESSES)
        settings = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "operator"),
            "KUBECONFIG": str(self.folder / "kubeconfig"),
            "PDPOOL_NAMESPACE": self.namespace,
            "PDPOOL_LEASE": "pdpool-operator",
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
        """Create a pool whose pods no scheduler takes, and whose instances keep their numbers in an update."""
        template = spec.pop("template", {"spec": {"schedulerName": NOBODY}})
        spec = {"model": {"path": "tiny"}, "rollout": {"surge": "Never"}, "template": template, **spec}
        body = {"metadata": {"name": name, "namespace": self.namespace}, "spec": spec}
        return await self.admin.make(POOLS[kind], body)

    async def service(self, name: str = "chat", **spec: Any) -> Object:
        refs = {side: {"poolRef": {"name": "chat"}} for side in ("prefill", "decode")}
        body = {"metadata": {"name": name, "namespace": self.namespace}, "spec": refs | spec}
        return await self.admin.make(POOLS["DisaggregatedService"], body)

    async def see(self, resource: Resource, name: str) -> Object | None:
        return await self.admin.get(resource, self.namespace, name)

    async def condition(self, kind: str, type_: str, name: str = "chat") -> Object:
        """Return a condition for the newest spec. Empty if there is none of that type."""
        body = await self.see(POOLS[kind], name)
        assert body is not None
        told = (c for c in body.get("status", {}).get("conditions", []) if c["type"] == type_)
        return next((c for c in told if c.get("observedGeneration") == body["metadata"]["generation"]), {})

    async def until(self, kind: str, type_: str, within_s: float = 90.0, name: str = "chat", **wanted: str) -> Object:
        """Wait until a condition has these fields."""

        async def check() -> Object:
            found = await self.condition(kind, type_, name)
            assert all(found.get(key) == value for key, value in wanted.items()), found
            return found

        result: Object = await eventually(check, within_s=within_s)
        return result

    async def pod(self, name: str, but_not: str = "") -> Object:
        """Return the pod of that name once it exists (with another uid than `but_not`)."""

        async def check() -> Object | None:
            pod = await self.see(PODS, name)
            return pod if pod and pod["metadata"]["uid"] != but_not else None

        result: Object = await eventually(check)
        return result

    async def bind_pod(self, name: str, node: str) -> None:
        """Act as the scheduler: give the pod a node, which need not exist."""
        await self.pod(name)
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        await self.admin.call("create", PODS, PODS.path(self.namespace, name, "binding"), body=body)

    async def run_pod(self, name: str, *, engine: bool = True, ready: bool = True, but_not: str = "") -> str:
        """Act as the kubelet: run the pod at an address of its own, with a stand-in engine there."""
        return await self._run(await self.pod(name, but_not), engine=engine, ready=ready)

    async def _run(self, pod: Object, *, engine: bool = True, ready: bool = True) -> str:
        """Run the pod. Raises ApiError if that very pod is gone."""
        name, uid, ip = pod["metadata"]["name"], pod["metadata"]["uid"], next(ADDRESSES)
        if engine:
            if name in self.engines:
                await self.engines[name].stop()
            self.engines[name] = await Engine(ip, uid).start()
        await self.set_ready(name, ready, ip, uid)
        return ip

    @contextlib.asynccontextmanager
    async def kubelet(self) -> AsyncIterator[None]:
        """Act as the kubelet: run every new engine pod at once, with a stand-in engine."""

        async def keep_running() -> None:
            while True:
                with contextlib.suppress(ApiError):  # a pod that was deleted meanwhile, or a failed call: try again
                    for pod in await self.admin.all(PODS, self.namespace, "pdpool.dev/instance"):
                        if "podIP" not in pod["status"] and "deletionTimestamp" not in pod["metadata"]:
                            await self._run(pod)
                await asyncio.sleep(0.2)

        task = asyncio.create_task(keep_running())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    async def set_ready(self, name: str, ready: bool, ip: str | None = None, uid: str | None = None) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": stamp}
        status: Object = {"phase": "Running", "conditions": [condition]}
        if ip:
            status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
        meta = {"uid": uid} if uid else {}
        await self.admin.edit(PODS, self.namespace, name, {"metadata": meta, "status": status}, "status")

    async def end_container(self, name: str) -> None:
        """Act as the kubelet: report that the engine container of a terminating pod has ended."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ended = {"containerID": f"containerd://{name}", "exitCode": 0, "startedAt": stamp, "finishedAt": stamp}
        container = {"name": "engine", "state": {"terminated": ended}, "ready": False, "restartCount": 0}
        statuses = [container | {"image": "x", "imageID": ""}]
        status = {"phase": "Failed", "containerStatuses": statuses}
        await self.admin.edit(PODS, self.namespace, name, {"status": status}, "status")


@contextlib.asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    """A namespace for one test. It is removed afterwards, with all processes."""
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
        await client.close()  # type: ignore[no-untyped-call]

"""An operator that gets SIGTERM while it starts: it ends soon, in order, and holds no Lease afterwards.

The real process against an API server of the test's own. The kernel drops a signal to process 1 of a container that it
does not handle. Here SIGTERM is ignored from the start instead, which is the same until a handler is there.
"""

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from pdpool_operator.runtime.lease import LEASE_DURATION_S

from tests.serving import serving

ROOT = Path(__file__).parents[2]
LEASES = "/apis/coordination.k8s.io/v1/namespaces/pdpool-system/leases"
LEASE = f"{LEASES}/pdpool-operator"
POOLS = "/apis/pdpool.dev/v1alpha1/prefillpools"
REACHED_S = 60.0
ENDED_S = 10.0
"""A third of a pod's grace period."""

pytestmark = pytest.mark.timeout(120)
Answer = tuple[int, Any]


class ApiServer:
    """One Lease, and no other object. `hold` keeps a request back, by method and path, until `go_on` is set."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.kinds_served = True
        self.hold: tuple[str, str] | None = None
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self.lease_writes: list[str] = []
        """Holder in each write of the Lease."""
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(text) if (text := await request.text()) else None
        if self.hold is not None and (request.method, request.path) == self.hold:
            self.reached.set()
            await self.go_on.wait()
        if request.path.startswith(LEASES):
            status, answer = self._lease(request.method, body)
        elif self.kinds_served:
            status, answer = 200, {"metadata": {"resourceVersion": "1"}, "items": [], "versions": [], "groups": []}
        else:
            status, answer = 404, {"reason": "NotFound", "message": "no such kind"}
        return web.json_response(answer, status=status)

    def _lease(self, method: str, body: Any) -> Answer:
        if method == "GET":
            return (200, self.lease) if self.lease else (404, {"reason": "NotFound", "message": "no"})
        self.lease_writes.append(body["spec"]["holderIdentity"])
        version = int(self.lease["metadata"]["resourceVersion"]) + 1 if self.lease else 1
        self.lease = body | {"metadata": body["metadata"] | {"resourceVersion": str(version)}}
        return (201 if method == "POST" else 200), self.lease

    def take(self, holder: str) -> None:
        now = datetime.now(UTC).isoformat()
        spec = {"holderIdentity": holder, "leaseDurationSeconds": LEASE_DURATION_S, "renewTime": now}
        self.lease = {"metadata": {"name": "pdpool-operator", "resourceVersion": "1"}, "spec": spec}

    @property
    def holder(self) -> str:
        return self.lease["spec"]["holderIdentity"] if self.lease else ""


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    one = ApiServer()
    async with serving(one.handle) as one.url:
        yield one


class Process:
    """The operator's process and its log."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process, self._log = process, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + REACHED_S
        while not condition():
            assert self.process.returncode is None, self.log
            assert time.monotonic() < deadline, f"not {what}: {self.log}"
            await asyncio.sleep(0.02)

    async def told_to_end(self) -> None:
        """Send SIGTERM and wait until it is taken notice of."""
        self.process.send_signal(signal.SIGTERM)
        await self.until("told to end", lambda: "SIGTERM: stopping" in self.log)

    async def ended(self) -> None:
        async with asyncio.timeout(ENDED_S):
            assert await self.process.wait() == 0, self.log
        assert "traceback" not in self.log


@asynccontextmanager
async def operator(server: ApiServer, folder: Path, **env: str) -> AsyncIterator[Process]:
    (folder / "seed").write_bytes(secrets.token_bytes(48))
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "x", "cluster": {"server": server.url}}],
        "users": [{"name": "x", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))
    settings = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT / "operator"),
        "KUBECONFIG": str(folder / "kubeconfig"),
        "PDPOOL_NAMESPACE": "pdpool-system",
        "PDPOOL_LEASE": "pdpool-operator",
        "PDPOOL_ENGINE_IMAGE": "engine",
        "PDPOOL_ROUTER_IMAGE": "router",
        "PDPOOL_ROUTER_SEED_FILE": str(folder / "seed"),
        "PDPOOL_LISTEN": "127.0.0.1:0",
    }
    command = [sys.executable, "-m", "pdpool_operator"]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=settings | env,
            stderr=log,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        )
    try:
        yield Process(process, folder / "log")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def reaches(server: ApiServer, one: Process) -> None:
    await one.until(f"asked for {server.hold}", server.reached.is_set)


async def test_while_it_still_imports_it_ends_at_once(server: ApiServer, tmp_path: Path):
    slow = tmp_path / "slow"
    slow.mkdir()
    reached = tmp_path / "reached"
    (slow / "kopf.py").write_text(f"import pathlib, time\npathlib.Path({str(reached)!r}).touch()\ntime.sleep(100)\n")
    async with operator(server, tmp_path, PYTHONPATH=f"{slow}:{ROOT / 'operator'}") as one:
        await one.until("importing", reached.exists)
        one.process.send_signal(signal.SIGTERM)
        await one.ended()
    assert not server.lease_writes


async def test_before_it_knows_the_lease_it_does_not_take_it(server: ApiServer, tmp_path: Path):
    server.hold = ("GET", LEASE)
    async with operator(server, tmp_path) as one:
        await reaches(server, one)
        await one.told_to_end()
        server.go_on.set()  # no operator holds it
        await one.ended()
        assert "leading as" not in one.log
    assert not server.lease_writes


async def test_while_it_takes_the_lease_it_gives_it_back(server: ApiServer, tmp_path: Path):
    server.hold = ("POST", LEASES)
    async with operator(server, tmp_path) as one:
        await reaches(server, one)
        await one.told_to_end()
        server.go_on.set()
        await one.ended()
        assert "leading as" not in one.log
    assert len(server.lease_writes) == 2
    assert server.holder == ""


async def test_as_a_standby_it_leaves_the_lease_alone(server: ApiServer, tmp_path: Path):
    server.take("another")
    server.hold = ("GET", LEASE)
    async with operator(server, tmp_path) as one:
        await reaches(server, one)
        server.go_on.set()
        await one.told_to_end()
        await one.ended()
    assert not server.lease_writes
    assert server.holder == "another"


@pytest.mark.parametrize(
    "hold",
    [
        pytest.param(POOLS, id="the list of pools that nobody answers"),
        pytest.param("", id="kinds that are not served yet"),
        pytest.param("/api", id="kopf's first question"),
    ],
)
async def test_as_a_leader_that_waits_it_gives_the_lease_back(server: ApiServer, tmp_path: Path, hold: str):
    server.kinds_served = bool(hold)
    async with operator(server, tmp_path) as one:
        if hold:
            server.hold = ("GET", hold)
            await reaches(server, one)
        else:
            await one.until("waiting for kinds", lambda: "a CRD is not installed" in one.log)
        await one.told_to_end()
        await one.ended()
    assert server.holder == ""

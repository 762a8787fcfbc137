"""An operator that gets SIGTERM while it starts: it ends soon, in order, and holds no Lease afterwards.

The real process against an API server of the test's own. The kernel drops a signal to process 1 of a container that it
does not handle. Here SIGTERM is ignored from the start instead, which is the same until a handler is there.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pdpool_operator.runtime.lease import LEASE_DURATION_S

from tests.operator_process import ROOT, Process, operator
from tests.serving import serving

LEASES = "/apis/coordination.k8s.io/v1/namespaces/pdpool-system/leases"
LEASE = f"{LEASES}/pdpool-operator"
POOLS = "/apis/pdpool.dev/v1alpha1/prefillpools"

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

"""An operator whose connection to a real API server freezes: it goes on in the same process, and notices changes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from pdpool_operator.runtime.resources import LEASES, STATEFUL_SETS

from tests.cluster.hands import eventually
from tests.cluster.operator_harness import ON_CLUSTER, Bench

pytestmark = [*ON_CLUSTER, pytest.mark.timeout(300, func_only=True)]
FROZEN_S = 75.0
NOTICED_S = 25.0


class Relay:
    """Passes bytes on to the API server while `flows` is set. It keeps connections open while it is not."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port, self.flows = host, port, asyncio.Event()
        self.flows.set()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.flows.wait()
        server_reader, server_writer = await asyncio.open_connection(self.host, self.port)
        try:
            await asyncio.gather(self._pump(reader, server_writer), self._pump(server_reader, writer))
        finally:
            writer.close()
            server_writer.close()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self.flows.wait()
                target.write(data)
                await target.drain()
        target.close()


@pytest.fixture
async def relay(here: Bench, tmp_path: Path) -> AsyncIterator[Relay]:
    config = yaml.safe_load((tmp_path / "kubeconfig").read_text())
    cluster = config["clusters"][0]["cluster"]
    server = urlsplit(cluster["server"])
    one = Relay(server.hostname or "127.0.0.1", server.port or 443)
    async with await asyncio.start_server(one.connection, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        cluster |= {"server": f"https://127.0.0.1:{port}", "tls-server-name": server.hostname}
        (tmp_path / "through-relay").write_text(yaml.safe_dump(config))
        yield one
        one.flows.set()
        listener.close()


@pytest.mark.long
async def test_frozen_api_server_ends_no_process(here: Bench, relay: Relay, tmp_path: Path):
    operator = await here.operator(KUBECONFIG=str(tmp_path / "through-relay")).start()
    lease = await here.see(LEASES, "pdpool-operator")
    relay.flows.clear()
    await operator.until("not ready")
    await here.pool("PrefillPool")
    await asyncio.sleep(FROZEN_S)  # the outage
    assert operator.process is not None
    assert operator.process.returncode is None, operator.logged()[-3000:]
    assert "ok, but no" in await operator.get("/healthz")
    relay.flows.set()
    await eventually(lambda: here.see(STATEFUL_SETS, "chat-prefill-0"), within_s=NOTICED_S)
    await operator.until("leader")
    after = await here.see(LEASES, "pdpool-operator")
    assert after["spec"]["holderIdentity"] == lease["spec"]["holderIdentity"]

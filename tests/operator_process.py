"""The operator's process against an API server of a test's own, on loopback."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp
import yaml
from pdpool_operator.runtime.resources import STATEFUL_SETS

from tests.cluster.hands import eventually
from tests.fake_api import FakeApi

ROOT = Path(__file__).parents[1]
REACHED_S = 60.0
ENDED_S = 10.0
"""A third of a pod's grace period."""
NOTICED_S = 25.0
"""From the end of a fault until a change made during it has had its effect: the longest pause, and a reconcile."""
SPEC = {"model": {"path": "/models/tiny"}, "replicas": 1}


class Server(Protocol):
    """An API server that runs."""

    url: str


def write_kubeconfig(file: Path, url: str) -> None:
    """Write a file by which a client reaches an API server that asks for no proof of identity."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "x", "cluster": {"server": url}}],
        "users": [{"name": "x", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "current-context": "x",
    }
    file.write_text(yaml.safe_dump(config))


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
async def operator(server: Server, folder: Path, **env: str) -> AsyncIterator[Process]:
    (folder / "seed").write_bytes(secrets.token_bytes(48))
    write_kubeconfig(folder / "kubeconfig", server.url)
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


@dataclass
class World:
    api: FakeApi
    process: Process
    url: str

    def alive(self) -> None:
        assert self.process.process.returncode is None, self.process.log[-3000:]

    async def probe(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as http, http.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def until(self, what: Callable[[], bool], within_s: float = NOTICED_S) -> None:
        async def holds() -> bool:
            self.alive()
            return what()

        await eventually(holds, within_s=within_s)

    async def until_ready(self, text: str, within_s: float = 60.0) -> None:
        async def is_so() -> bool:
            self.alive()
            with contextlib.suppress(aiohttp.ClientError):
                return (await self.probe("/readyz"))[1] == f"{text}\n"
            return False

        await eventually(is_so, within_s=within_s)

    def made(self, pool: str) -> bool:
        return ("llm", f"{pool}-prefill-0") in self.api.objects.get(STATEFUL_SETS, {})


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@asynccontextmanager
async def running(api: FakeApi, folder: Path) -> AsyncIterator[World]:
    """Run an operator on an API server that is served."""
    listen = f"127.0.0.1:{free_port()}"
    async with operator(api, folder, PDPOOL_LISTEN=listen) as process:
        yield World(api, process, f"http://{listen}")

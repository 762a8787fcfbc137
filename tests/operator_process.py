"""The operator's process against an API server of a test's own, on loopback."""

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import yaml

ROOT = Path(__file__).parents[1]
REACHED_S = 60.0
ENDED_S = 10.0
"""A third of a pod's grace period."""


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

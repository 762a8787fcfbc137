"""The operator as a process of a test: started, stopped, killed, and queried for its metrics."""

import asyncio
import contextlib
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.cluster.hands import at_rest, eventually

ROOT = Path(__file__).parents[2]
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Prefix of a command: it ends with a test session that is killed."""


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

    async def until(self, state: str, within_s: float = 90.0) -> None:
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
        """Return the number of API calls so far, by (verb, resource)."""
        counts: dict[tuple[str, str], float] = {}
        for line in (await self.get("/metrics")).splitlines():
            if line.startswith("pdpool_api_calls_total{"):
                labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
                key = (labels["verb"].strip('"'), labels["resource"].strip('"'))
                counts[key] = counts.get(key, 0) + float(line.rsplit(" ", 1)[1])
        return counts

    async def reconciles(self) -> float:
        """Return the number of reconciles so far."""
        lines = (await self.get("/metrics")).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("pdpool_reconcile_total{"))

    async def quiet_reconciles(self) -> float:
        """Return the number of reconciles once two readings, 2 s apart, are equal."""
        return await at_rest(self.reconciles, every_s=2.0, within_s=60)

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def stop(self, number: int = signal.SIGTERM, within_s: float = 30.0) -> float:
        """Stop the operator. Return the seconds it took."""
        assert self.process is not None
        started = time.monotonic()
        if self.process.returncode is None:
            self.send(number)
        async with asyncio.timeout(within_s):
            await self.process.wait()
        return time.monotonic() - started

    def logged(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

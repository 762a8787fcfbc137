"""Real routers in the place of the containers of a service's router pods."""

import asyncio
import base64
import os
import sys
import time

import aiohttp
from pdpool_operator.observe.http import Unanswered
from pdpool_operator.observe.model import RouterWorker
from pdpool_operator.observe.routers import RouterClient
from pdpool_operator.runtime.resources import CONFIG_MAPS, PODS, SECRETS

from tests.cluster.hands import Object, eventually
from tests.cluster.operator_harness import Bench
from tests.cluster.operator_process import ROOT


class Routers:
    """Real routers at the addresses of the Deployment's pods, which no scheduler takes."""

    def __init__(self, here: Bench, http: aiohttp.ClientSession) -> None:
        self.here = here
        self.client = RouterClient(http)
        self.ips: dict[str, str] = {}
        self.pods: dict[str, str] = {}

    async def key(self) -> str:
        secret = await eventually(lambda: self.here.see(SECRETS, "pdpool-keys"))
        return base64.b64decode(secret["data"]["router-1.key"]).decode()

    async def _pod(self, name: str) -> Object:
        """Take a pod of the Deployment that runs no router yet."""

        async def free() -> Object:
            pods = await self.here.admin.all(PODS, self.here.namespace, "pdpool.dev/role=router")
            found = [pod for pod in pods if pod["metadata"]["name"] not in self.pods.values()]
            assert found, f"no router pod beside {self.pods}"
            return found[0]

        pod: Object = await eventually(free)
        self.pods[name] = pod["metadata"]["name"]
        return pod

    async def start(self, name: str) -> str:
        """Start a router of the Deployment, with the image's entry point at its address."""
        pod = await self._pod(name)
        config = await eventually(lambda: self.here.see(CONFIG_MAPS, "chat-router"))
        file = self.here.folder / f"{name}.json"
        file.write_text(config["data"]["workers.json"])
        key = self.here.folder / f"{name}.key"
        key.write_text(await self.key())
        self.ips[name] = await self.here.run_pod(pod["metadata"]["name"], engine=False, ready=False)
        await self.launch(name)
        return self.ips[name]

    async def launch(self, name: str) -> None:
        """Start the process of a router whose pod runs."""
        file, key, ip = self.here.folder / f"{name}.json", self.here.folder / f"{name}.key", self.ips[name]
        files = {"PDPOOL_ROUTER_KEY_FILE": str(key), "PDPOOL_ROUTER_WORKERS": str(file)}
        env = {"PATH": os.environ["PATH"], **files}
        with (self.here.folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(ROOT / "images/router/start_router.py"),
                *("--host", ip, "--prometheus-host", ip),
                env=env,
                stdout=log,
                stderr=log,
            )
        self.here.processes.append(process)

    async def listed(self, name: str) -> tuple[RouterWorker, ...]:
        try:
            return await self.client.workers(self.ips[name], await self.key())
        except Unanswered as silence:
            raise AssertionError(str(silence)) from silence

    async def until(self, name: str, *engines: str, within_s: float = 90.0) -> float:
        """Wait until this router lists exactly these pods' engines. Return the seconds."""
        started = time.monotonic()
        wanted = {f"http://{self.here.engines[engine].ip}:30000" for engine in engines}

        async def same() -> bool:
            listed = {worker.url for worker in await self.listed(name)}
            ready = await self.here.condition("DisaggregatedService", "Ready")
            assert listed == wanted, (sorted(listed), sorted(wanted), ready)
            return True

        await eventually(same, within_s=within_s, every_s=0.02)
        return time.monotonic() - started

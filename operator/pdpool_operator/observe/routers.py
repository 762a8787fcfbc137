"""Reads and changes the worker lists of router replicas (sglang-router in PD mode).

Each replica has its own list, so each is addressed by its pod address. Changes are asynchronous (202). A change counts
once the list that is read back shows it.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Annotated

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..api.names import Role, router_url
from ..runtime.write_budget import within_budget
from .http import Unanswered, invalid, request
from .model import RouterWorker

TIMEOUT_S = 2.0
POLL_S = (0.0, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0)
"""Pauses before the list is read back. A removal shows within 5 ms. An addition shows once the router has requested the
engine's health, model and server information.
"""


class _Worker(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    id: Annotated[str, Field(max_length=128, pattern="^[A-Za-z0-9._-]+$")]
    url: Annotated[str, Field(max_length=512)]
    worker_type: str
    bootstrap_port: int | None = None


class _Workers(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    workers: Annotated[list[_Worker], Field(max_length=10_000)]


_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


class RouterClient:
    """Client for the control endpoints of router replicas.

    `write_budget` is called before every change, as for the API server. A process that lost the Lease while it was
    frozen would otherwise change lists by an outdated state.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        timeout_s: float = TIMEOUT_S,
        write_budget: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._write_budget = write_budget

    async def workers(self, ip: str, key: str) -> tuple[RouterWorker, ...]:
        """Return the worker list of one replica; raises Unanswered."""
        status, body = await self._request("GET", ip, "/workers", key)
        if status != 200:
            raise Unanswered(f"http {status}")
        return parse_workers(body)

    async def add(self, ip: str, key: str, url: str, role: Role, bootstrap_port: int | None) -> bool:
        """Add an engine at a replica. Return True once it is listed, False if that takes longer (the replica keeps
        trying).
        """
        worker: dict[str, str | int] = {"url": url, "worker_type": str(role)}
        if bootstrap_port is not None:
            worker["bootstrap_port"] = bootstrap_port
        status, body = await self._request("POST", ip, "/workers", key, json=worker)
        if status not in (200, 201, 202):
            raise Unanswered(f"http {status}: {body[:200].decode(errors='replace')}")
        return await self._settled(ip, key, lambda workers: any(w.url == url and w.role == role for w in workers))

    async def remove(self, ip: str, key: str, worker_id: str) -> bool:
        """Remove a worker at a replica, so that it gets no more requests. Return True once it is unlisted."""
        status, body = await self._request("DELETE", ip, f"/workers/{worker_id}", key)
        if status not in (200, 202, 204, 404):
            raise Unanswered(f"http {status}: {body[:200].decode(errors='replace')}")
        return await self._settled(ip, key, lambda workers: all(w.id != worker_id for w in workers))

    async def _settled(self, ip: str, key: str, done: Callable[[tuple[RouterWorker, ...]], bool]) -> bool:
        for pause in POLL_S:
            await asyncio.sleep(pause)
            if done(await self.workers(ip, key)):
                return True
        return False

    async def _request(
        self, method: str, ip: str, path: str, key: str, json: dict[str, str | int] | None = None
    ) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {key}"}
        url, timeout_s = router_url(ip) + path, self._timeout_s
        if method != "GET":
            timeout_s = min(timeout_s, within_budget(self._write_budget, f"{method} {url}"))
        return await request(self._http, method, url, timeout_s=timeout_s, headers=headers, json=json)


def parse_workers(body: bytes) -> tuple[RouterWorker, ...]:
    """Parse the answer of `GET /workers`; raises Unanswered if it is invalid.

    A worker of a type that PD mode does not use gets the role `router`. It matches no engine, so it is removed.
    """
    try:
        listed = _Workers.model_validate_json(body).workers
    except ValidationError as error:
        raise Unanswered(invalid(error)) from error
    return tuple(RouterWorker(w.id, w.url, _ROLES.get(w.worker_type, Role.ROUTER), w.bootstrap_port) for w in listed)

"""Helpers of a test in the cluster: create, change and remove objects, and wait for the reaction."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from pdpool_operator.runtime.api import MERGE_PATCH, Api
from pdpool_operator.runtime.api_errors import ApiError, NotFoundError
from pdpool_operator.runtime.api_transport import Request
from pdpool_operator.runtime.resources import DECODE_POOLS, PREFILL_POOLS, SERVICES_PD, Resource

NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
POOLS = {"PrefillPool": PREFILL_POOLS, "DecodePool": DECODE_POOLS, "DisaggregatedService": SERVICES_PD}

Object = dict[str, Any]


async def eventually(what: Callable[[], Awaitable[Any]], *, within_s: float = 90.0, every_s: float = 0.1) -> Any:
    """Return the value of `what` once it is true. If it never is, fail with its last value or error."""
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


async def at_rest(read: Callable[[], Awaitable[float]], *, every_s: float, within_s: float) -> float:
    """Return a number once two readings, `every_s` apart, are equal."""
    last = float("nan")

    async def same() -> bool:
        nonlocal last
        now = await read()
        quiet, last = now == last, now
        return quiet

    await eventually(same, every_s=every_s, within_s=within_s)
    return last


class Admin(Api):
    """Direct access of the test to the cluster."""

    async def call(
        self, verb: str, resource: Resource, path: str, body: Object | None = None, patch_type: str = "", **query: str
    ) -> Object:
        return await self._transport.call(Request(verb, resource, path, query, body, patch_type=patch_type))

    async def drop(self, resource: Resource, namespace: str | None, name: str, **options: Any) -> None:
        with contextlib.suppress(NotFoundError):
            body = {"apiVersion": "v1", "kind": "DeleteOptions"} | options
            await self.call("delete", resource, resource.path(namespace, name), body)

    async def make(self, resource: Resource, body: Object) -> Object:
        path = resource.path(body["metadata"].get("namespace"))
        kind = {"apiVersion": resource.api_version, "kind": resource.kind}
        return await self.call("create", resource, path, kind | body)

    async def edit(
        self, resource: Resource, namespace: str, name: str, patch: Object, sub: str | None = None
    ) -> Object:
        path = resource.path(namespace, name, sub)
        return await self.call("patch", resource, path, patch, MERGE_PATCH)

    async def all(self, resource: Resource, namespace: str | None, labels: str = "") -> list[Object]:
        return [item async for item in self.list(resource, namespace, labels)]

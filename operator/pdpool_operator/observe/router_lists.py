"""Reads which routers list each instance of a pool.

A terminating router accepts requests until it receives SIGTERM, and answers until then. After that it only finishes
streams, which takes minutes. The operator does not wait for that. A silent router that is not Ready gets no requests
either, as on a lost node.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..api import names
from ..api.base import Metadata
from ..runtime.resources import DEPLOYMENTS, PODS, REPLICA_SETS
from . import parse
from .http import Unanswered
from .model import ObservedInstance, ObservedPod, ObservedPool, ObservedRouter
from .reads import Reads, listed
from .router_pods import own_pods
from .routers import RouterClient


class RouterLists:
    """Reads the worker lists of routers.

    Args:
        client: Sends the requests.
        key: Returns the key of a namespace's routers for an epoch.
    """

    def __init__(self, client: RouterClient, key: Callable[[str, int], str]) -> None:
        self._client, self._key = client, key

    async def of(self, reads: Reads, service: Metadata) -> tuple[ObservedRouter, ...]:
        """Return the router pods of a service with their worker lists."""
        namespace, selector = service.namespace, names.selector_string(names.router_selector(service.name))
        pods, sets, deployment = await asyncio.gather(
            listed(reads, PODS, namespace, selector),
            listed(reads, REPLICA_SETS, namespace, selector, metadata_only=True),
            reads.get(DEPLOYMENTS, namespace, names.router(service.name)),
        )
        own = map(parse.observed_pod, own_pods(service.uid, deployment, sets, pods))
        return tuple(await asyncio.gather(*(self._router(namespace, pod) for pod in own)))

    async def _router(self, namespace: str, pod: ObservedPod) -> ObservedRouter:
        if not pod.ip or pod.phase != "Running":
            return ObservedRouter(pod, None, f"pod is {pod.phase}")
        try:
            return ObservedRouter(pod, await self._client.workers(pod.ip, self._key(namespace, pod.keys.newest)))
        except Unanswered as error:
            return ObservedRouter(pod, None, str(error))


def with_routers(pool: ObservedPool, routers: Iterable[ObservedRouter]) -> ObservedPool:
    """Return the pool with the routers that list each instance."""
    running = [r for r in routers if r.pod.phase == "Running"]
    lists = [(r.pod.name, r.workers) for r in running if r.workers is not None or r.pod.takes_requests]

    def listed_by(instance: ObservedInstance) -> tuple[str, ...] | None:
        if any(workers is None for _, workers in lists):
            return None
        ip = instance.pod.ip if instance.pod else None
        url = names.engine_url(ip) if ip else None
        return tuple(name for name, workers in lists if any(worker.url == url for worker in workers or ()))

    return replace(pool, instances=tuple(replace(i, listed_by=listed_by(i)) for i in pool.instances))

"""Finds what no watch shows: whether the kinds are served, what pods did while no operator led, and missed changes."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

from .api import names
from .api.pools import POOL_KINDS
from .observe.keys import Key
from .runtime.api import Api
from .runtime.api_errors import ApiError, NotFoundError, UnavailableError
from .runtime.resources import OPERATIONS, PODS, POOL_RESOURCES, SERVICES_PD, Object, Resource

RESYNC_S = 600.0
AGAIN_S = 3.0
"""Delay after a call that failed."""
INSTALL_CRDS = "`kubectl apply --server-side -f crds` in a checkout of this version"

log = logging.getLogger(__name__)


class CatchUp:
    """Reads the API server when this process begins to lead, and at intervals.

    Args:
        api: Reads.
        namespaces: Those that are watched. None is the whole cluster.
        note_pod: Takes in a former state of a pod. Returns whether another of its containers has ended.
        check_fields: Checks which fields the installed CRDs have.
        operations: Returns the operations that are known.
        enqueue: Queues an object.
        nudge: Queues the objects that an operation concerns.
    """

    def __init__(
        self,
        api: Api,
        namespaces: Sequence[str | None],
        *,
        note_pod: Callable[[Object], bool],
        check_fields: Callable[[], Awaitable[None]],
        operations: Callable[[], Iterable[Object]],
        enqueue: Callable[[Key], object],
        nudge: Callable[[Object], None],
    ) -> None:
        self._api, self._namespaces = api, namespaces
        self._note_pod, self._check_fields, self._operations = note_pod, check_fields, operations
        self._enqueue, self._nudge = enqueue, nudge
        self.has_operations = False
        """Whether the API server served PoolOperations when this process began to watch."""
        self.listed = asyncio.Event()
        """Set once all objects were queued."""

    async def wait_for_kinds(self) -> None:
        """Wait until the kinds are served. kopf looks for them only once."""
        while True:
            try:
                async for _ in self._keys():
                    pass
                self.has_operations = await self._serves_operations()
            except NotFoundError as error:
                log.warning("a CRD is not installed, retrying soon: %s; run %s", error, INSTALL_CRDS)
            except ApiError as error:
                log.warning("cannot list pools and services, retrying soon: %s", error)
            else:
                return
            await asyncio.sleep(AGAIN_S)

    async def run(self, inherited: Callable[[], str]) -> None:
        """Recall and resync, for ever. `inherited` returns up to which resourceVersion of pods an operator led."""
        await asyncio.gather(self._recall(inherited), self._resync())

    async def _recall(self, inherited: Callable[[], str]) -> None:
        """Read what kubelets reported while no operator was leading, as far back as the API server remembers."""
        while since := inherited():
            reads = (self._api.history(PODS, one, names.SELECT_MADE, since) for one in self._namespaces)
            try:
                states = await asyncio.gather(*reads)
            except UnavailableError as error:
                log.warning("cannot read the history of pods, retrying soon: %s", error)
                await asyncio.sleep(AGAIN_S)
            except ApiError as error:
                log.warning("the history of pods is not available: %s", error)
                return
            else:
                added = sum(self._note_pod(pod) for some in states for pod in some)
                log.info("read the history of pods: %d ended containers", added)
                return

    async def _resync(self) -> None:
        """Queue all objects at intervals. This finds what a watch has missed."""
        while True:
            await self._check_fields()
            try:
                async for key in self._keys():
                    self._enqueue(key)
                for operation in self._operations():
                    self._nudge(operation)
                self.listed.set()
            except ApiError as error:
                log.warning("resync failed, retrying soon: %s", error)
                await asyncio.sleep(AGAIN_S)
                continue
            await asyncio.sleep(RESYNC_S * random.uniform(0.9, 1.1))  # noqa: S311 - spreads load, guards nothing

    async def _keys(self) -> AsyncIterator[Key]:
        for resource in (*(POOL_RESOURCES[kind] for kind in POOL_KINDS), SERVICES_PD):
            async for body in self._bodies(resource):
                yield Key(resource.kind, body["metadata"]["namespace"], body["metadata"]["name"])

    async def _serves_operations(self) -> bool:
        """Whether PoolOperations are served. An upgrade that leaves the CRDs alone must not stop the operator."""
        try:
            async for _ in self._bodies(OPERATIONS):
                pass
        except NotFoundError as error:
            log.warning(
                "PoolOperations are not available until their CRD is installed and the operator restarts: %s; run %s",
                error,
                INSTALL_CRDS,
            )
            return False
        return True

    async def _bodies(self, resource: Resource) -> AsyncIterator[Object]:
        for namespace in self._namespaces:
            async for body in self._api.list(resource, namespace):
                yield body

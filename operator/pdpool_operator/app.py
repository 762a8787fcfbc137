"""Uses kopf as the informer: watches objects and queues the keys that may need a reconcile.

This is the only module that imports kopf. Its handlers only enqueue. They write nothing on objects: no finalizer, no
annotation, no event. A reconcile reads the objects itself and does not use the content of an event. `WatchFeeds`
carries kopf's requests and keeps failures of the API server from it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import kopf

from .api import names
from .runtime.resources import (
    CONFIG_MAPS,
    DECODE_POOLS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    OPERATIONS,
    PODS,
    PREFILL_POOLS,
    REPLICA_SETS,
    SERVICES,
    SERVICES_PD,
    STATEFUL_SETS,
    Resource,
)
from .runtime.watch_feeds import WATCH_S, WatchFeeds

PRIMARY = (PREFILL_POOLS, DECODE_POOLS, SERVICES_PD, OPERATIONS)
OWNED = (PODS, STATEFUL_SETS, DEPLOYMENTS, REPLICA_SETS, SERVICES, DISRUPTION_BUDGETS, CONFIG_MAPS, NETWORK_POLICIES)
WHOLE = (*PRIMARY, STATEFUL_SETS)
"""Resources of which all objects are watched. A StatefulSet without our labels may have a name that a pool needs."""


def _registry(nudge: Callable[[Mapping[str, Any]], None], feeds: WatchFeeds) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    async def on_event(body: kopf.Body, **_: Any) -> None:  # noqa: ANN401 - kopf's calling convention
        nudge(body)

    async def login(**_: Any) -> kopf.AiohttpSession:  # noqa: ANN401 - kopf's calling convention
        return kopf.AiohttpSession(server="", aiohttp_session=cast("Any", feeds))

    for resource in (*PRIMARY, *OWNED):
        kopf.on.event(*_selector(resource), id=f"see-{resource.plural}", registry=registry)(on_event)
    kopf.on.login(registry=registry)(login)
    return registry


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True  # otherwise kopf watches namespaces and CRDs, which needs permissions
    settings.watching.inactivity_timeout = 2 * WATCH_S  # the feeds give up silent watches earlier
    settings.process.ultimate_exiting_timeout = 30
    for resource in set(OWNED) - set(WHOLE):
        settings.watching.label_selectors[_selector(resource)] = names.SELECT_MADE
    return settings


def _selector(resource: Resource) -> tuple[str, str] | tuple[str, str, str]:
    short = (resource.version, resource.plural)
    return (resource.group, *short) if resource.group else short


async def watch(
    nudge: Callable[[Mapping[str, Any]], None],
    feeds: WatchFeeds,
    namespaces: Iterable[str],
    *,
    identity: str,
    stop: asyncio.Event,
    ready: asyncio.Event,
    started: Callable[[], None],
) -> None:
    """Watch until `stop` is set.

    `nudge` is called with the body of every object that is added, changed or deleted. `feeds` sends kopf's requests.
    `started` is called when kopf has installed its own signal handlers, before any signal can reach them. `identity` is
    the name of this process. Without it, kopf looks up the user's name, which a container may not have.
    """
    wanted = list(namespaces)
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=_registry(nudge, feeds),
        settings=_settings(),
        clusterwide=not wanted,
        namespaces=wanted,
        standalone=True,
        identity=cast("Any", identity),  # a NewType of str that kopf does not export
        stop_flag=stop,
        ready_flag=ready,
    )
    started()
    await kopf.run_tasks(tasks, ignored=others)

"""Explains why an instance has no pod, or why its pod is not Ready: by events, or by a pod that occupies its name.

Only a few instances are asked about at once, and none in its first seconds.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from ..api import names
from ..api.pools import Pool
from ..runtime.resources import EVENTS, PODS
from . import parse
from .model import ObservedInstance
from .parse import Object
from .reads import Reads, listed

EVENTS_AFTER = timedelta(seconds=3)
"""Age from which events are read for a pod that is not Ready, or for an instance without a pod."""
MAX_EVENT_LOOKUPS = 8
MAX_WARNINGS = 5


async def explained(
    reads: Reads, pool: Pool, instances: list[ObservedInstance], bodies: Mapping[str, Object], now: datetime
) -> list[ObservedInstance]:
    """Return the instances of a pool, with the reasons of those that are not Ready. `bodies` are their StatefulSets."""
    silent = [i for i in instances if not i.deleting and _is_silent(i, bodies[i.uid], now)][:MAX_EVENT_LOOKUPS]
    by_uid = {one.uid: one for one in await asyncio.gather(*(_explained(reads, pool, one) for one in silent))}
    return [by_uid.get(instance.uid, instance) for instance in instances]


def _is_silent(instance: ObservedInstance, body: Object, now: datetime) -> bool:
    pod = instance.pod
    born = pod.created_at if pod else parse.moment(body["metadata"]["creationTimestamp"])
    return (pod is None or not pod.ready) and born is not None and now - born > EVENTS_AFTER


async def _explained(reads: Reads, pool: Pool, instance: ObservedInstance) -> ObservedInstance:
    pod, namespace = instance.pod, pool.metadata.namespace
    events = await listed(reads, EVENTS, namespace, fields=f"regarding.uid={pod.uid if pod else instance.uid}")
    if pod:
        return replace(instance, pod=replace(pod, warnings=warnings(events)))
    refused = warnings(events, "FailedCreate")
    why = await _occupant(reads, pool, instance) or (refused[0] if refused else "")
    return replace(instance, create_error=why)


async def _occupant(reads: Reads, pool: Pool, instance: ObservedInstance) -> str:
    """Return which pod occupies the name of the instance's pod.

    The StatefulSet releases a pod whose labels do not match. It then cannot create its own, and reports nothing.
    """
    selector = names.instance_selector(pool.metadata.name, pool.role, instance.index)
    for pod in await listed(reads, PODS, pool.metadata.namespace, fields=f"metadata.name={instance.name}-0"):
        if parse.controller_uid(pod) != instance.uid:
            return _occupied(pod, selector)
    return ""


def _occupied(pod: Object, wanted: Mapping[str, str]) -> str:
    """Return why a StatefulSet whose selector is `wanted` cannot use a pod that has the name of its own."""
    name, found = pod["metadata"]["name"], parse.labels_of(pod)
    wrong = [
        f"its label {key} is {f'{found[key]!r}' if key in found else 'missing'} (must be {value!r})"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if wrong:
        return f"pod {name} occupies the name, but {', '.join(wrong)}; restore the label or delete the pod"
    return f"pod {name} occupies the name and belongs to {parse.controller(pod) or 'no controller'}; delete the pod"


def warnings(events: Iterable[Object], reason: str | None = None) -> tuple[str, ...]:
    """Return messages of Warning events (with this reason, if given): newest first, each once, at most MAX_WARNINGS."""
    told = [e for e in events if e.get("type") == "Warning" and (reason is None or e.get("reason") == reason)]
    told.sort(key=_last_seen, reverse=True)
    notes = dict.fromkeys(str(event.get("note", "")) for event in told)
    return tuple(notes)[:MAX_WARNINGS]


def _last_seen(event: Object) -> datetime:
    series = event.get("series") or {}
    stamps = (
        series.get("lastObservedTime"),
        event.get("deprecatedLastTimestamp"),
        event.get("eventTime"),
        event["metadata"].get("creationTimestamp"),
    )
    return next((at for stamp in stamps if (at := parse.moment(stamp))), datetime.fromtimestamp(0, UTC))

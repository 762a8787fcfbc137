"""`status`: each service and pool with its conditions and instances."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from pdpool_operator.api import names
from pdpool_operator.api.services import WatchedInstanceStatus
from pdpool_operator.plan.selection import AT_FAULT
from pdpool_operator.status.transition import WELL

from .access import Access
from .fleet import Fleet, PoolView, ServiceView, View, attention
from .text import age, table


def status_lines(fleet: Fleet, access: Access, now: datetime) -> Iterator[str]:
    """Yield the text of `status`."""
    for service in fleet.services:
        yield from _service(service, now)
        yield ""
    for pool in fleet.pools:
        yield f"{pool.kind} {pool.namespace}/{pool.name}: {_ready(pool)}"
        yield from _body(pool, now, "  ")
        yield ""
    if not fleet.services and not fleet.pools:
        yield access.nothing()


def _service(service: ServiceView, now: datetime) -> Iterator[str]:
    status = service.status
    router = "" if status.instances else f"{status.router_replicas} router"
    facts = [status.ready or "no status yet", router, status.url]
    yield f"{service.kind} {service.namespace}/{service.name}: {', '.join(filter(None, facts))}"
    yield from _conditions(service, now, "  ")
    yield from _watched(service, status.instances)
    for pool in service.pools:
        yield f"  {pool.kind} {pool.name}: {_ready(pool)}"
        yield from _body(pool, now, "    ")


def _watched(service: ServiceView, pods: Sequence[WatchedInstanceStatus]) -> Iterator[str]:
    """Yield the pods of a service with selectors, which something else runs."""
    if not pods:
        return
    rows = [(one.pod, one.role, _yes(yes=one.ready), one.verdict) for one in pods]
    yield from table(("POD", "ROLE", "READY", "VERDICT"), rows, "  ")
    said = [condition.message for condition in attention(service)]
    for one in pods:
        if one.verdict not in WELL and one.message and not any(one.message in message for message in said):
            yield f"  ! {one.pod} is {one.verdict}: {one.message}"


def _ready(pool: PoolView) -> str:
    queues = f", queues {pool.status.queues}" if pool.status.queues else ""
    waiting = pool.status.oldest_waiting_since
    since = f", oldest request waits since {waiting:%FT%TZ}" if waiting is not None else ""
    return f"{pool.status.ready_replicas}/{pool.wanted} ready{queues}{since}"


def _body(pool: PoolView, now: datetime, indent: str) -> Iterator[str]:
    yield from _conditions(pool, now, indent)
    instances = pool.status.instances
    if not instances:
        return
    rows = [
        (
            names.instance(pool.name, pool.role, i.index),
            _yes(yes=i.ready),
            _yes(yes=i.updated),
            i.verdict,
            i.pod or "-",
        )
        for i in instances
    ]
    yield from table(("INSTANCE", "READY", "UPDATED", "VERDICT", "POD"), rows, indent)
    for name, verdict, message in unsaid(pool):
        yield f"{indent}! {name} is {verdict}: {message}"


def _conditions(view: View, now: datetime, indent: str) -> Iterator[str]:
    if (note := outdated(view)) is not None:
        yield f"{indent}{note}"
    conditions = view.status.conditions
    if not conditions:
        return
    rows = [(c.type, str(c.status), c.reason, age(c.last_transition_time, now)) for c in conditions]
    yield from table(("CONDITION", "STATUS", "REASON", "SINCE"), rows, indent)
    for c in attention(view):
        yield f"{indent}! {c.type}: {c.message}"


def unsaid(pool: PoolView) -> Iterator[tuple[str, str, str]]:
    """Yield name, verdict and message of the instances that call for something which no condition says already."""
    said = [condition.message for condition in attention(pool)]
    for i in pool.status.instances:
        if i.verdict not in WELL and i.message and not any(i.message in message for message in said):
            yield names.instance(pool.name, pool.role, i.index), i.verdict, i.message


def outdated(view: View) -> str | None:
    """Return why the status may not describe the object, or None."""
    if not view.status.conditions:
        return "the operator has not written a status that this version understands: kubectl pdpool doctor"
    if view.status.observed_generation != view.generation:
        seen = view.status.observed_generation
        return f"the status belongs to generation {seen}; the spec is of generation {view.generation}"
    return None


def at_fault(pool: PoolView) -> Iterator[tuple[int, str, str | None]]:
    """Yield index, verdict and pod of the instances that are themselves at fault."""
    for instance in pool.status.instances:
        if instance.verdict in AT_FAULT:
            yield instance.index, instance.verdict, instance.pod


def _yes(*, yes: bool) -> str:
    return "yes" if yes else "no"

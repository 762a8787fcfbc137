"""Decides when an instance is drained. Pure predicates over its observed state.

An instance is *drained* when no new work can reach it and no old work is left:

    drained  <=>  no router lists it
             and  every rank has answered a request sent after  drain_seen + SETTLE_S
             and  running = waiting = queues = holds = 0  on every rank, leaked requests not counted
             and  no rank is paused: SGLang counts requests nowhere that it has retracted for a pause

`drain_seen` is when this process first saw the drain. Samples are stamped by the same clock. The operator that began
the drain may have had another clock.

The drain is given up at  drain_started + drainTimeoutSeconds,  even if work is left. Unknown values count as work left:
a missing answer is not a zero. The pod's preStop hook begins a drain of its own, which then has at most
`GIVEN_UP_GRACE_S`. The kubelet gives the engine 2 s more. In that time the engine fails the rest and notifies its
peers.

Without a router of pdpool's, nothing but the pod's own state keeps requests away from an engine. So the pod is deleted
with its whole grace period: it leaves the EndpointSlices at once, and its preStop hook lets the requests end.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from ..observe.model import ObservedInstance

SETTLE_S = 2.0
"""Time for requests in flight: a router that has removed an engine may still send it a request assigned before."""
GIVEN_UP_GRACE_S = 5
"""Termination grace period of a pod whose drain was given up."""


def has_work_to_lose(instance: ObservedInstance) -> bool:
    """Whether replacing the instance right now could cut a request.

    A pod that is Ready may be serving even if it does not answer. A pod that is not Ready counts if it is known to hold
    work. It also counts if a router is known to list it, because that router may still send it requests.
    """
    pod = instance.pod
    if pod is None or pod.terminating or pod.ended:
        return False
    return pod.ready or bool(instance.listed_by) or any(_known_work(instance, number) for number in instance.ranks)


def needs_drain(instance: ObservedInstance, *, routed: bool) -> bool:
    """Whether the operator must drain the instance before its pod is deleted.

    Args:
        instance: the instance.
        routed: whether a service with a router binds its pool. A router that was turned off may still list the engine.
    """
    return has_work_to_lose(instance) and (routed or instance.listed_by != ())


def work_left(instance: ObservedInstance, *, routed: bool) -> tuple[str, ...]:
    """Return what a draining instance still waits for, as text. Empty if it is drained."""
    return tuple(_left(instance)) if needs_drain(instance, routed=routed) else ()


def deadline(drain_started: datetime, timeout_s: int) -> datetime:
    """Return when the drain of an instance is given up."""
    return drain_started + timedelta(seconds=timeout_s)


def _left(instance: ObservedInstance) -> Iterator[str]:
    seen = instance.drain_seen
    if instance.listed_by is None:
        yield "a router did not return its worker list"
    elif instance.listed_by:
        yield f"in the worker list of {', '.join(instance.listed_by)}"
    if not instance.ranks:
        yield "no rank has been sampled"
    for number, rank in sorted(instance.ranks.items()):
        if (rank.connector is None and rank.has_connector) or rank.engine_error:
            yield f"rank {number} does not answer ({rank.connector_error or rank.engine_error})"
        elif known := _known_work(instance, number):
            yield f"rank {number} has {', '.join(known)}"
        elif rank.connector is not None and rank.connector.paused:
            yield f"rank {number} is paused on request, and hides its work"
        elif seen is None or rank.asked_at < seen + timedelta(seconds=SETTLE_S):
            yield f"rank {number} has not been sampled since it left the rotation"


def _known_work(instance: ObservedInstance, number: int) -> tuple[str, ...]:
    """Return the known work of a rank, as text. No drain can wait for leaked requests."""
    rank, leaked = instance.ranks[number], instance.leaked.get(number, {})
    work: dict[str, int] = {}
    if rank.engine is not None:
        work |= {"running": rank.engine.running, "waiting": rank.engine.waiting}
        work |= {f"in {name}": reqs - leaked.get(name, 0) for name, reqs in rank.engine.queues.items()}
    if rank.connector is not None:
        work |= {f"in {name}": queue.reqs for name, queue in rank.connector.queues.items()}
        work["held"] = rank.connector.holds
    return tuple(f"{count} {what}" for what, count in work.items() if count > 0)

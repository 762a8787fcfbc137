"""Decides when an instance is drained. Pure predicates over its observed state.

An instance is *drained* when no new work can reach it and no old work is left:

    drained  <=>  no router lists it
             and  every rank has answered a request sent after  drain_started + SETTLE_S
             and  running = waiting = queues = holds = 0  on every rank

The drain is given up at  drain_started + drainTimeoutSeconds,  even if work is left. Unknown values count as work left:
a missing answer is not a zero. The pod's preStop hook begins a drain of its own, which then has at most
`GIVEN_UP_GRACE_S`. The kubelet gives the engine 2 s more. In that time the engine fails the rest and notifies its
peers.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from ..observe.model import ObservedInstance, RankSample

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
    if pod is None or pod.terminating or pod.phase in {"Succeeded", "Failed"}:
        return False
    return pod.ready or bool(instance.listed_by) or any(_known_work(rank) for rank in instance.ranks.values())


def work_left(instance: ObservedInstance, drain_started: datetime) -> tuple[str, ...]:
    """Return what a draining instance still waits for, as text. Empty if it is drained."""
    if not has_work_to_lose(instance):
        return ()
    return tuple(_left(instance, drain_started + timedelta(seconds=SETTLE_S)))


def deadline(drain_started: datetime, timeout_s: int) -> datetime:
    """Return when the drain of an instance is given up."""
    return drain_started + timedelta(seconds=timeout_s)


def _left(instance: ObservedInstance, settled: datetime) -> Iterator[str]:
    if instance.listed_by is None:
        yield "a router did not return its worker list"
    elif instance.listed_by:
        yield f"in the worker list of {', '.join(instance.listed_by)}"
    if not instance.ranks:
        yield "no rank has been sampled"
    for number, rank in sorted(instance.ranks.items()):
        if (rank.connector is None and rank.has_connector) or rank.engine_error:
            yield f"rank {number} does not answer ({rank.connector_error or rank.engine_error})"
        elif known := list(_known_work(rank)):
            yield f"rank {number} has {', '.join(known)}"
        elif rank.asked_at < settled:
            yield f"rank {number} has not been sampled since it left the rotation"


def _known_work(rank: RankSample) -> tuple[str, ...]:
    """Return the known work of a rank, as text."""
    work: dict[str, int] = {}
    if rank.engine is not None:
        work |= {"running": rank.engine.running, "waiting": rank.engine.waiting}
        work |= {f"in {name}": reqs for name, reqs in rank.engine.queues.items()}
    if rank.connector is not None:
        work |= {f"in {name}": queue.reqs for name, queue in rank.connector.queues.items()}
        work["held"] = rank.connector.holds
    return tuple(f"{count} {what}" for what, count in work.items() if count > 0)

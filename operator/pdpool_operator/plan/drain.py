"""When is an instance drained? Pure predicates over what was observed of it.

An instance is *drained* when nothing can come to it any more and nothing of what came is left:

    drained  <=>  no router lists it
             and  every rank has answered what was asked after  drain_started + SETTLE_S
             and  running = waiting = 0, every hand-off queue = 0, holds = 0  on every rank

It is given up at  drain_started + drainTimeoutSeconds,  whatever is left then. What cannot be seen counts as left: an
answer that did not come is not a zero. The pod's preStop hook, which begins a drain of its own, then has no more than
`GIVEN_UP_GRACE_S`; the kubelet leaves the engine 2 s after it, in which it fails what is left and tells its peers.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from ..observe.model import ObservedInstance, RankSample

SETTLE_S = 2.0
"""A router that was told to forget an engine may still be about to send it a request that it had assigned before."""
GIVEN_UP_GRACE_S = 5
"""Termination grace of a pod whose drain was given up."""


def has_work_to_lose(instance: ObservedInstance) -> bool:
    """Whether replacing the instance right now could cut a request.

    A pod that is Ready may be serving even if it cannot be asked. One that is not Ready counts for what it is known to
    hold, and while a router is known to list it, which may still send it requests.
    """
    pod = instance.pod
    if pod is None or pod.terminating or pod.phase in {"Succeeded", "Failed"}:
        return False
    return pod.ready or bool(instance.listed_by) or any(_known_work(rank) for rank in instance.ranks.values())


def work_left(instance: ObservedInstance, drain_started: datetime) -> tuple[str, ...]:
    """What an instance that drains still waits for, in words; empty when it is drained."""
    if not has_work_to_lose(instance):
        return ()
    return tuple(_left(instance, drain_started + timedelta(seconds=SETTLE_S)))


def deadline(drain_started: datetime, timeout_s: int) -> datetime:
    """When an instance that drains is given up."""
    return drain_started + timedelta(seconds=timeout_s)


def _left(instance: ObservedInstance, settled: datetime) -> Iterator[str]:
    if instance.listed_by is None:
        yield "a router cannot be asked whether it still lists it"
    elif instance.listed_by:
        yield f"in the worker list of {', '.join(instance.listed_by)}"
    if not instance.ranks:
        yield "no rank has been sampled"
    for number, rank in sorted(instance.ranks.items()):
        if rank.connector is None or rank.engine_error:
            yield f"rank {number} does not answer ({rank.connector_error or rank.engine_error})"
        elif known := list(_known_work(rank)):
            yield f"rank {number} has {', '.join(known)}"
        elif rank.asked_at < settled:
            yield f"rank {number} has not been asked since it left the rotation"


def _known_work(rank: RankSample) -> tuple[str, ...]:
    """Work that a rank is known to have, in words."""
    work: dict[str, int] = {}
    if rank.engine is not None:
        work |= {"running": rank.engine.running, "waiting": rank.engine.waiting}
        work |= {f"in {name}": reqs for name, reqs in rank.engine.queues.items()}
    if rank.connector is not None:
        work |= {f"in {name}": queue.reqs for name, queue in rank.connector.queues.items()}
        work["held"] = rank.connector.holds
    return tuple(f"{count} {what}" for what, count in work.items() if count > 0)

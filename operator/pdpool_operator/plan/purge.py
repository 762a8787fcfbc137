"""Decides what a purge sends to the ranks of its instance, and when all have done it. Pure.

A `PoolOperation` or repair orders a purge. Each rank is asked to end its hand-offs of at least this age:

    cut-off = started - older_than_s

    age     = max(now - cut-off, older_than_s)

`started` is in a status before the first request is sent. So a repeated request, also of another operator, ends
nothing that was opened after the cut-off. The seconds that it takes on its way are the only addition. It does no harm:
it finds what the first one left. The second bound is for an operator whose clock is behind that of its predecessor.

A pod that was replaced meanwhile is asked as well. It has nothing from before the cut-off.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from ..observe.model import ObservedInstance, ObservedPod
from .model import Purge, Purged
from .operation_step import shortened
from .ranks import ranks_of, silence

MAX_REASON = 256
"""Characters that a connector accepts."""


@dataclass(frozen=True, slots=True)
class PurgeOrder:
    """What is to be ended."""

    older_than_s: float
    """Age of the hand-offs at `started`, in seconds."""
    started: datetime
    reason: str
    """For the log of the connector, and for its peers."""


@dataclass(frozen=True, slots=True)
class PurgeProgress:
    """How far a purge is."""

    send: tuple[Purge, ...]
    """To the ranks that have not done it, and that answer."""
    ended: int
    """Hand-offs that have ended."""
    waits: str
    """Ranks that have not done it, with the reason. Empty if all have."""
    refused: str
    """Which rank has refused, with its words. Empty if none has."""


def purge_progress(
    order: PurgeOrder, instance: ObservedInstance, answers: Iterable[Purged], now: datetime
) -> PurgeProgress:
    """Return how far the purge of an instance is.

    Args:
        order: What is to be ended.
        instance: Where.
        answers: The last answer of each rank of each pod to this order.
        now: The present time.
    """
    pod, answers = instance.pod, tuple(answers)
    ended = sum(one.count for one in answers)
    if pod is None:
        return PurgeProgress((), ended, "it has no pod", "")
    last = {one.purge.rank: one for one in answers if one.purge.pod_uid == pod.uid}
    silent = {rank: silence(rank, pod, instance.ranks) for rank in ranks_of(instance.ranks)}
    left = [rank for rank in silent if rank not in last or last[rank].outcome != "given"]
    age_s = _age_s(order, now)
    send = tuple(_purge(order, pod, rank, age_s) for rank in left if not silent[rank])
    waits = [f"rank {rank} {silent[rank] or _unanswered(last.get(rank))}" for rank in left]
    refused = next((one for one in last.values() if one.outcome == "refused"), None)
    return PurgeProgress(
        send=send,
        ended=ended,
        waits=shortened(waits),
        refused="" if refused is None else f"rank {refused.purge.rank} of {instance.name} refused it: {refused.words}",
    )


def _age_s(order: PurgeOrder, now: datetime) -> float:
    return order.older_than_s + max((now - order.started).total_seconds(), 0.0)


def _purge(order: PurgeOrder, pod: ObservedPod, rank: int, age_s: float) -> Purge:
    assert pod.ip is not None, "the rank has answered at this address"
    return Purge(
        pod_uid=pod.uid,
        ip=pod.ip,
        rank=rank,
        older_than_s=age_s,
        reason=order.reason[:MAX_REASON],
        key_epoch=pod.keys.newest,
    )


def _unanswered(answer: Purged | None) -> str:
    return "has not answered yet" if answer is None else f"did not answer ({answer.words})"

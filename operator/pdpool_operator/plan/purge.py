"""Decides what an operation of type Purge sends to the ranks of its instance, and when all have done it. Pure.

Each rank is asked to end its hand-offs of at least this age:

    cut-off = startedAt - olderThanSeconds

    age     = max(now - cut-off, olderThanSeconds)

`startedAt` is in the status before the first request is sent. So a repeated request, also of another operator, ends
nothing that was opened after the cut-off. The seconds that it takes on its way are the only addition. It does no harm:
it finds what the first one left. The second bound is for an operator whose clock is behind that of its predecessor.

A pod that was replaced meanwhile is asked as well. It has nothing from before the cut-off.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from ..api.operations import PoolOperation
from ..observe.model import ObservedInstance, ObservedPod
from .model import Purge, Purged
from .operation_step import shortened
from .ranks import ranks_of, silence

MAX_REASON = 256
"""Characters that a connector accepts."""


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
    operation: PoolOperation, instance: ObservedInstance, answers: Iterable[Purged], now: datetime
) -> PurgeProgress:
    """Return how far the purge of an instance is.

    Args:
        operation: An operation in the phase Purging.
        instance: Its instance.
        answers: The last answer of each rank of each pod to this operation.
        now: The present time.
    """
    pod, answers = instance.pod, tuple(answers)
    ended = sum(one.count for one in answers)
    if pod is None:
        return PurgeProgress((), ended, "it has no pod", "")
    last = {one.purge.rank: one for one in answers if one.purge.pod_uid == pod.uid}
    silent = {rank: silence(rank, pod, instance.ranks) for rank in ranks_of(instance.ranks)}
    left = [rank for rank in silent if rank not in last or last[rank].outcome != "given"]
    age_s = _age_s(operation, now)
    send = tuple(_purge(operation, pod, rank, age_s) for rank in left if not silent[rank])
    waits = [f"rank {rank} {silent[rank] or _unanswered(last.get(rank))}" for rank in left]
    refused = next((one for one in last.values() if one.outcome == "refused"), None)
    return PurgeProgress(
        send=send,
        ended=ended,
        waits=shortened(waits),
        refused="" if refused is None else f"rank {refused.purge.rank} of {instance.name} refused it: {refused.words}",
    )


def _age_s(operation: PoolOperation, now: datetime) -> float:
    started = operation.status.started_at or operation.metadata.creation_timestamp
    return operation.older_than_s + max((now - started).total_seconds(), 0.0)


def _purge(operation: PoolOperation, pod: ObservedPod, rank: int, age_s: float) -> Purge:
    assert pod.ip is not None, "the rank has answered at this address"
    return Purge(
        pod_uid=pod.uid,
        ip=pod.ip,
        rank=rank,
        older_than_s=age_s,
        reason=f"PoolOperation {operation.metadata.name}"[:MAX_REASON],
        key_epoch=pod.keys.newest,
    )


def _unanswered(answer: Purged | None) -> str:
    return "has not answered yet" if answer is None else f"did not answer ({answer.words})"

"""Decides which fences to send: proofs that a peer has ended, for the engines that hold memory for it.

An engine holds memory for a process P. At pairing, P reported its pod U and its run of a container C. Let h be the time
at which the engine reported the hold. P has ended if the kubelet has reported

    that the engine container of U is terminated, and will not be started again in U;

    or that a run of it is terminated, and a sample of U that began after h found another run than C

A pod has one run of a container at a time. The run that answers after h is not C, so C ended before it. The second half
is needed because the kubelet's report arrives late: by then P itself may be the next run.

Silence, NotReady, a deleted pod object, force deletion: none of these ends a process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..observe.model import ObservedPod, PodLife
from ..observe.samples import HoldSample, RankSample
from .held import held_by
from .model import ContainerEnded, Fence


@dataclass(frozen=True, slots=True)
class Unproven:
    """An engine holds memory for a process that has left the cluster, and no kubelet has reported its end."""

    holder: str
    """Name of the pod that holds the memory."""
    rank: int
    hold: HoldSample
    why: str


@dataclass(frozen=True, slots=True)
class Fencing:
    """Fences to send now, and holds that cannot be proved."""

    fences: tuple[Fence, ...] = ()
    unproven: tuple[Unproven, ...] = ()


def plan_fences(
    holders: Sequence[ObservedPod],
    looks: Mapping[str, Mapping[int, RankSample]],
    lives: Callable[[str], PodLife | None],
    node_of: Callable[[str], str | None],
) -> Fencing:
    """Decide which fences to send to these pods, for each of their ranks separately.

    Args:
        holders: pods that may hold memory.
        looks: the newest sample of each rank of every existing pod, by UID. A pod that is not in it is gone.
        lives: returns the kubelet's reports of ended containers of the pod with this UID.
        node_of: returns the node of the pod with this UID. None if it is not known.
    """
    fences: list[Fence] = []
    unproven: list[Unproven] = []
    for held in held_by(holders, looks):
        if life := _ended(held.process, held.sample.at, looks, lives):
            fences.append(held.fence(life.name, ContainerEnded(held.process.pod_uid, life.container_id)))
        elif why := _hopeless(held.process, looks, node_of):
            unproven.append(Unproven(held.holder.name, held.rank, held.process, why))
    return Fencing(tuple(fences), tuple(unproven))


def _ended(
    hold: HoldSample,
    said_at: datetime,
    looks: Mapping[str, Mapping[int, RankSample]],
    lives: Callable[[str], PodLife | None],
) -> PodLife | None:
    life = lives(hold.pod_uid)
    if life is None or life.over:
        return life
    anew = any(_is_another_run(hold, said_at, look) for look in looks.get(hold.pod_uid, {}).values())
    return life if anew else None


def _is_another_run(hold: HoldSample, said_at: datetime, look: RankSample) -> bool:
    seen = look.connector
    if seen is None or look.asked_at <= said_at or seen.pod_uid != hold.pod_uid:
        return False
    return bool(hold.container) and bool(seen.container) and seen.container != hold.container


def _hopeless(
    hold: HoldSample, looks: Mapping[str, Mapping[int, RankSample]], node_of: Callable[[str], str | None]
) -> str:
    """Return why no proof is possible. Empty while proof is possible."""
    if not hold.pod_uid:
        return "it did not report its pod"
    if hold.pod_uid not in looks:
        node = node_of(hold.pod_uid)
        where = f"its pod on the node {node}" if node is not None else "its pod"
        return f"{where} is gone from all pools, and no kubelet reported the end of its container"
    return ""

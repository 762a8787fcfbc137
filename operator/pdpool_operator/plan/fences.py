"""Whose end can be vouched for: which engines are told that a peer for which they hold memory runs no more.

An engine holds memory for a process P that told, when they were paired, its pod U and its run of a container C. Let h
be the time at which the engine said so. P has ended if the kubelet has said

    that the engine container of U is terminated, and will not be started again in U;     or
    that a run of it is terminated, and a look at U that began after h met another run than C

for a pod has one run of a container at a time: the one that answers after h is not C, so C ended before it. (The
second half is needed, because the kubelet's word reaches us late: by then P itself may be the next run.)

Silence, NotReady, a pod object that is gone, deletion by force: none of these ends a process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..observe.model import HoldSample, ObservedPod, PodLife, RankSample
from .model import Fence


@dataclass(frozen=True, slots=True)
class Unproven:
    """An engine holds memory for a process that is gone from the cluster, without anybody having seen it end."""

    holder: str
    """Name of the pod that holds."""
    rank: int
    hold: HoldSample
    why: str


@dataclass(frozen=True, slots=True)
class Fencing:
    """Fences to give now, and holds for which there will be no proof."""

    fences: tuple[Fence, ...] = ()
    unproven: tuple[Unproven, ...] = ()


def plan_fences(
    holders: Sequence[ObservedPod],
    looks: Mapping[str, Mapping[int, RankSample]],
    lives: Callable[[str], PodLife | None],
) -> Fencing:
    """What to tell these pods, each of their ranks for itself.

    Args:
        holders: pods whose memory is at stake.
        looks: the newest look at each rank of every pod that is there, by UID; a pod that is not in it is gone.
        lives: what the kubelet has said of ended containers of the pod with this UID.
    """
    fences: list[Fence] = []
    unproven: list[Unproven] = []
    for holder, rank, sample, hold in _holds(holders, looks):
        if life := _ended(hold, sample.at, looks, lives):
            assert holder.ip is not None
            fences.append(
                Fence(
                    pod=holder.name,
                    pod_uid=holder.uid,
                    ip=holder.ip,
                    rank=rank,
                    incarnation=hold.incarnation,
                    peer=life.name,
                    peer_uid=hold.pod_uid,
                    container_id=life.container_id,
                )
            )
        elif why := _hopeless(hold, looks):
            unproven.append(Unproven(holder.name, rank, hold, why))
    return Fencing(tuple(fences), tuple(unproven))


def _holds(
    holders: Sequence[ObservedPod], looks: Mapping[str, Mapping[int, RankSample]]
) -> Iterator[tuple[ObservedPod, int, RankSample, HoldSample]]:
    for holder in holders:
        for rank, sample in sorted(looks.get(holder.uid, {}).items()):
            # An address may have passed on to another pod since.
            if holder.ip is not None and sample.connector is not None and sample.connector.pod_uid == holder.uid:
                for hold in sample.connector.held_for:
                    yield holder, rank, sample, hold


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


def _hopeless(hold: HoldSample, looks: Mapping[str, Mapping[int, RankSample]]) -> str:
    """Why no proof is to be expected; empty while it is."""
    if not hold.pod_uid:
        return "it did not say in which pod it runs"
    if hold.pod_uid not in looks:
        return "no pool has its pod any more, and nobody saw its container end"
    return ""

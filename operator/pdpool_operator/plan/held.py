"""Memory that engines hold for processes of the other side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..observe.model import ObservedPod
from ..observe.samples import HoldSample, RankSample
from .model import ContainerEnded, Fence, HoldKey, NodeOff


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that one rank holds for one process."""

    holder: ObservedPod
    ip: str
    """Address at which the holder has answered."""
    rank: int
    sample: RankSample
    """It reports this."""
    process: HoldSample

    @property
    def hold_key(self) -> HoldKey:
        """UID of the holder's pod, rank, and incarnation of the process."""
        return self.holder.uid, self.rank, self.process.incarnation

    def __str__(self) -> str:
        return f"{self.holder.name} rank {self.rank} for process {self.process.incarnation[:8]}"

    def fence(self, peer: str, proof: ContainerEnded | NodeOff) -> Fence:
        """Return the fence that sends the holder the proof that the process has ended. `peer`: its name for people."""
        return Fence(
            pod=self.holder.name,
            pod_uid=self.holder.uid,
            ip=self.ip,
            rank=self.rank,
            incarnation=self.process.incarnation,
            peer=peer,
            proof=proof,
            key_epoch=self.holder.keys.newest,
        )


def held_by(holders: Sequence[ObservedPod], looks: Mapping[str, Mapping[int, RankSample]]) -> Iterator[Held]:
    """Yield what these pods hold. `looks`: the newest sample of each rank, by UID of the pod."""
    for holder in holders:
        for rank, sample in sorted(looks.get(holder.uid, {}).items()):
            # The address may belong to another pod by now.
            if holder.ip is not None and sample.connector is not None and sample.connector.pod_uid == holder.uid:
                for process in sample.connector.held_for:
                    yield Held(holder, holder.ip, rank, sample, process)

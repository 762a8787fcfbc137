"""What the steps of a pool's plan decide by: which instances are surplus, outdated, draining, or kept out."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..api.names import ANNOTATION_BUILD_HASH
from ..api.pools import Pool
from ..observe.model import DrainReason, ObservedInstance, ObservedPool
from .drain import needs_drain
from .model import Patch
from .selection import Selection, Selector


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool with its selection, and what the builders render for it."""

    pool: Pool
    observed: ObservedPool
    selector: Selector
    selection: Selection
    wanted: dict[int, dict[str, Any]]
    """StatefulSets of the present and the missing instances, by index."""
    avoided: dict[int, str]
    """Nodes that pods avoid, by index of the instance."""
    now: datetime

    @property
    def present(self) -> list[ObservedInstance]:
        """Instances that are not being deleted."""
        return [instance for instance in self.observed.instances if not instance.deleting]

    @property
    def spec_hash(self) -> str:
        """Hash of the current spec."""
        return self.selector.spec_hash

    def build_hash(self, instance: ObservedInstance) -> str:
        """Hash of what the builders render for the instance now."""
        return str(self.wanted[instance.index]["metadata"]["annotations"][ANNOTATION_BUILD_HASH])

    def surplus(self, instance: ObservedInstance) -> bool:
        """Whether the instance goes."""
        return instance in self.selection.surplus

    def outdated(self, instance: ObservedInstance) -> bool:
        """Whether its pod was built from another spec."""
        return self.selector.outdated(instance)

    def needs_drain(self, instance: ObservedInstance) -> bool:
        """Whether the instance must be drained before its pod is deleted."""
        return needs_drain(instance, routed=self.observed.routed)

    def replaced_by_surge(self, instance: ObservedInstance) -> bool:
        """Whether a surplus instance goes because one of the current spec takes its place."""
        alone = self.pool.spec.replicas == 1 and self.outdated(instance)
        return alone and any(not self.outdated(kept) for kept in self.selection.kept)

    def cancelled(self, instance: ObservedInstance) -> bool:
        """Whether the reason of a drain no longer holds."""
        if instance.drain_started is None or instance.drain_reason == DrainReason.OPERATION or self.surplus(instance):
            return False
        return instance.drain_reason == DrainReason.SCALE_DOWN or not self.outdated(instance)

    @property
    def draining(self) -> list[ObservedInstance]:
        """Instances that the pool itself drains."""
        own = [i for i in self.present if i.drain_started is not None and i.drain_reason != DrainReason.OPERATION]
        return [instance for instance in own if not self.cancelled(instance)]

    @property
    def kept_out(self) -> list[ObservedInstance]:
        """Instances that operations keep out of the rotation."""
        return [instance for instance in self.present if instance.kept_out_by]


def stateful_set_patch(instance: ObservedInstance, body: dict[str, Any]) -> Patch:
    """Return a patch of the instance's StatefulSet, and of no later one with its name."""
    meta = {"uid": instance.uid, **body.get("metadata", {})}
    return Patch("StatefulSet", instance.name, {**body, "metadata": meta})

"""Steps 1 and 2 of a pool's plan: the StatefulSets that are missing, and those to update without disturbing a pod."""

from typing import Any

from ..api.reasons import Reason
from ..api.wording import some
from ..build.pool import PODS_PER_INSTANCE
from ..observe.model import ObservedInstance
from .model import Event, EventType, Patch, Plan, Progress
from .objects import EDITED, UNLABELLED, edited, lost_labels, restored_events
from .pool_state import PoolState, stateful_set_patch


def create(state: PoolState) -> Plan:
    """Step 1 for instances: create those that are missing."""
    missing = [state.wanted[index] for index in state.selection.missing]
    if not missing:
        return Plan()
    what = ", ".join(wanted["metadata"]["name"] for wanted in missing)
    creating = Progress(Reason.SCALING_UP, f"Creating {what}")
    if state.selection.surge and state.selection.kept:
        old = some([instance.name for instance in state.selection.kept])
        creating = Progress(Reason.UPDATING, f"Creating {what}, which replaces {old} once it serves")
    return Plan(
        apply=tuple(missing),
        events=(Event(EventType.NORMAL, Reason.INSTANCE_CREATED, f"Created {what}"),),
        progress=creating,
    )


def align(state: PoolState) -> Plan:
    """Step 2. Under `OnDelete` a changed template disturbs no running pod."""
    apply: list[dict[str, Any]] = []
    patches: list[Patch] = []
    reverted: list[str] = []
    unlabelled: list[str] = []
    for instance in state.present:
        if state.surplus(instance):
            continue
        wanted = state.wanted[instance.index]
        outdated = state.outdated(instance)
        late = instance.spec_hash != state.spec_hash and not outdated
        moves = instance.avoids_node != state.avoided.get(instance.index, "") and not outdated
        if late or moves or _is_edited(state, instance):
            apply.append(wanted)
            reverted += [] if late or moves else [f"StatefulSet {instance.name}"]
            continue
        lost = lost_labels(wanted["metadata"]["labels"], instance.labels)
        unlabelled += [f"StatefulSet {instance.name}"] if lost else []
        body = ({"metadata": {"labels": lost}} if lost else {}) | (
            {"spec": {"replicas": PODS_PER_INSTANCE}} if instance.replicas != PODS_PER_INSTANCE else {}
        )
        if body:
            patches.append(stateful_set_patch(instance, body))
    events = (*restored_events(reverted, EDITED), *restored_events(unlabelled, UNLABELLED))
    return Plan(apply=tuple(apply), patch=tuple(patches), events=events)


def _is_edited(state: PoolState, instance: ObservedInstance) -> bool:
    """Whether others have edited what this operator version built.

    A StatefulSet that another version built stays as it is: reverting an edit would update it. If the hash of the build
    was removed, the pod's counts.
    """
    build_hash = state.build_hash(instance)
    lost = not instance.build_hash and instance.pod is not None and instance.pod.build_hash == build_hash
    if instance.spec_hash != state.spec_hash or not (lost or instance.build_hash == build_hash):
        return False
    return lost or edited(state.wanted[instance.index], instance.owners)

"""Plans the next safe actions for one pool.

Let n = spec.replicas and H = the hash of the user's spec without replicas. An instance (one StatefulSet) is

    surplus     the pool has too many, and `selection` chose it

    outdated    its pod was built from another spec than H (without a pod: its StatefulSet)

    available   its pod is Ready, does not terminate, and the instance does not drain

Goal: exactly n instances exist, none is outdated, none drains. Each call takes all steps below that apply. The state
between calls is only in the cluster: two annotations on the StatefulSet. An operator that is killed at any point
continues from there.

1. Create every missing instance. Create or update the pool's other objects that are missing or built differently.
2. Update StatefulSets where that disturbs no pod. A cause is a template whose pod is already of H. Others are a changed
   `replicas`, removed labels, and an edit by another manager of what this operator built. Repair may let the next pod
   of an instance avoid a node.
3. Cancel drains whose reason no longer holds.
4. Continue drains. When an instance is drained, or its time is over, remove it (surplus) or replace it (outdated).
   To replace means: apply the new template, then delete the pod by its UID.
5. Remove surplus instances that need no drain. If nothing drains, begin one drain: of the first surplus instance,
   else of the first outdated one. `selection` has the order. An outdated instance that needs no drain is replaced.

Step 5 takes an outdated instance only while every instance of H is available and not at fault. An instance of H that is
not available was just replaced, was just created, or fails. This rule has three effects. A serving instance is taken
only if all others are available. At most one instance at a time is unavailable because of the operator. A spec that
does not start stops at the first instance. The only instance of a pool is taken when a second one serves.

Nothing is taken out of service while the template is invalid, a name is taken, or the API server refuses an object.
Desired instances that drain return to service, because the error may last long. Their drain starts again when the error
is fixed.

A `PoolOperation` may keep an instance out of the rotation. Step 4 leaves such an instance alone. While there is one,
step 5 takes no outdated instance. A surplus one is still removed, and the one that is kept out goes first.

A change of what the builders render under an unchanged H (another operator version) is no step: see `UpdateAvailable`.
Kubernetes restarts failed pods, as long as the StatefulSet exists.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ..api import names
from ..api.base import format_time
from ..api.names import ANNOTATION_BUILD_HASH
from ..api.pools import Pool
from ..api.reasons import Reason
from ..build.pool import PODS_PER_INSTANCE, instance_stateful_set, pool_objects, pool_spec_hash
from ..build.settings import BuildSettings
from ..build.template import TemplateInvalid
from ..observe.model import ObservedInstance, ObservedPool
from .drain import GIVEN_UP_GRACE_S, deadline, needs_drain, work_left
from .model import Delete, DrainReason, Event, EventType, Fault, Patch, Plan, Progress
from .objects import (
    EDITED,
    UNLABELLED,
    Standing,
    blocked,
    edited,
    lost_labels,
    missing_or_changed,
    restored,
    restored_events,
    surplus_policies,
)
from .repair_model import avoided_nodes
from .selection import Selection, Selector, available

DRAIN_POLL_S = 1.0
"""How often a drain is checked: queues change without an event in the cluster."""

HOLD_POLL_S = 10.0
"""Fallback interval for changes that the cluster announces by events."""


def plan_pool(
    observed: ObservedPool, settings: BuildSettings, now: datetime, at_fault: Collection[int] = frozenset()
) -> Plan:
    """Return the next actions for the pool. Empty if the goal is reached.

    Args:
        observed: The pool as it is.
        settings: For the builders.
        now: The present time.
        at_fault: Indexes of the instances whose verdict is one of `selection.AT_FAULT`.
    """
    pool = observed.pool
    if pool.metadata.deletion_timestamp is not None:
        return Plan()
    ours = [instance for instance in observed.instances if instance.belongs_to(pool.metadata.uid)]
    keys, avoided = observed.keys, avoided_nodes(pool.status.repairs, now)
    invalid: TemplateInvalid | None = None
    wanted: dict[int, dict[str, Any]] = {}
    try:
        wanted = {
            one.index: instance_stateful_set(pool, one.index, settings, keys, avoided.get(one.index, ""))
            for one in ours
        }
    except TemplateInvalid as error:
        invalid = error
    builds = {index: sts["metadata"]["annotations"][ANNOTATION_BUILD_HASH] for index, sts in wanted.items()}
    selector = Selector(pool, pool_spec_hash(pool, keys), builds, at_fault, now)
    selection = selector.select(ours)
    surplus = tuple(instance.name for instance in selection.surplus)
    put_back = _put_back(ours, selection)
    if taken := blocked(pool, _standing(observed)):
        return replace(taken, patch=put_back, surplus=surplus)
    try:
        wanted |= {
            index: instance_stateful_set(pool, index, settings, keys, avoided.get(index, ""))
            for index in selection.missing
        }
    except TemplateInvalid as error:
        invalid = error
    if invalid is not None and pool.spec.replicas > 0:
        return Plan(faults=(Fault(Reason.TEMPLATE_INVALID, str(invalid)),), patch=put_back, surplus=surplus)
    context = _Context(pool, observed, selector, selection, wanted, avoided, now)
    objects = pool_objects(pool, settings)
    support = missing_or_changed(objects, observed.objects)
    events = restored(objects, observed.objects, set_up=pool.status.observed_generation > 0)
    plan = _join(
        [
            Plan(apply=support, events=events, delete=surplus_policies(objects, observed.objects)),
            _create(context),
            _align(context),
            _cancel(context),
            _go_on(context),
            _begin(context),
        ]
    )
    lacking = _lacking_room(context)
    plan = _join([lacking, plan])
    return replace(
        plan,
        put_back=put_back,
        progress=plan.progress or _waiting(context),
        surplus=surplus,
        stops_serving=lacking.progress.message if lacking.progress else "",
        same_build=tuple(
            i.name
            for i in context.present
            if i.pod and i.pod.spec_hash != context.spec_hash and not context.outdated(i)
        ),
        update_available=_built_otherwise(context),
    )


@dataclass(frozen=True, slots=True)
class _Context:
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
        return [instance for instance in self.observed.instances if not instance.deleting]

    @property
    def spec_hash(self) -> str:
        return self.selector.spec_hash

    def surplus(self, instance: ObservedInstance) -> bool:
        return instance in self.selection.surplus

    def outdated(self, instance: ObservedInstance) -> bool:
        return self.selector.outdated(instance)

    def needs_drain(self, instance: ObservedInstance) -> bool:
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


def _create(context: _Context) -> Plan:
    missing = [context.wanted[index] for index in context.selection.missing]
    if not missing:
        return Plan()
    what = ", ".join(wanted["metadata"]["name"] for wanted in missing)
    creating = Progress(Reason.SCALING_UP, f"Creating {what}")
    if context.selection.surge and context.selection.kept:
        old = _list([instance.name for instance in context.selection.kept])
        creating = Progress(Reason.UPDATING, f"Creating {what}, which replaces {old} once it serves")
    return Plan(
        apply=tuple(missing),
        events=(Event(EventType.NORMAL, Reason.INSTANCE_CREATED, f"Created {what}"),),
        progress=creating,
    )


def _align(context: _Context) -> Plan:
    """Step 2. Under `OnDelete` a changed template disturbs no running pod."""
    apply: list[dict[str, Any]] = []
    patches: list[Patch] = []
    reverted: list[str] = []
    unlabelled: list[str] = []
    for instance in context.present:
        if context.surplus(instance):
            continue
        wanted = context.wanted[instance.index]
        outdated = context.outdated(instance)
        late = instance.spec_hash != context.spec_hash and not outdated
        moves = instance.avoids_node != context.avoided.get(instance.index, "") and not outdated
        if late or moves or _is_edited(context, instance):
            apply.append(wanted)
            reverted += [] if late or moves else [f"StatefulSet {instance.name}"]
            continue
        lost = lost_labels(wanted["metadata"]["labels"], instance.labels)
        unlabelled += [f"StatefulSet {instance.name}"] if lost else []
        body = ({"metadata": {"labels": lost}} if lost else {}) | (
            {"spec": {"replicas": PODS_PER_INSTANCE}} if instance.replicas != PODS_PER_INSTANCE else {}
        )
        if body:
            patches.append(_patch(instance, body))
    events = (*restored_events(reverted, EDITED), *restored_events(unlabelled, UNLABELLED))
    return Plan(apply=tuple(apply), patch=tuple(patches), events=events)


def _is_edited(context: _Context, instance: ObservedInstance) -> bool:
    """Whether others have edited what this operator version built.

    A StatefulSet that another version built stays as it is: reverting an edit would update it. If the hash of the build
    was removed, the pod's counts.
    """
    wanted = context.wanted[instance.index]
    build_hash = wanted["metadata"]["annotations"][ANNOTATION_BUILD_HASH]
    lost = not instance.build_hash and instance.pod is not None and instance.pod.build_hash == build_hash
    if instance.spec_hash != context.spec_hash or not (lost or instance.build_hash == build_hash):
        return False
    return lost or edited(wanted, instance.owners)


def _cancel(context: _Context) -> Plan:
    cancelled = [instance for instance in context.present if context.cancelled(instance)]
    still_old = [i for i in cancelled if i.drain_reason == DrainReason.SCALE_DOWN]
    return Plan(
        patch=tuple(_annotate(instance, None, None) for instance in cancelled),
        events=tuple(
            Event(EventType.NORMAL, Reason.DRAIN_CANCELLED, f"{instance.name} is needed again")
            for instance in still_old
        ),
    )


def _put_back(ours: Sequence[ObservedInstance], selection: Selection) -> tuple[Patch, ...]:
    """End the drains of instances that the pool needs. While an object is refused, nothing can replace them."""
    return tuple(
        _annotate(instance, None, None)
        for instance in ours
        if instance.drain_started is not None and not instance.deleting
        if instance.drain_reason != DrainReason.OPERATION
        if instance not in selection.surplus or instance.drain_reason == DrainReason.UPDATE
    )


def _go_on(context: _Context) -> Plan:
    return _join([_go_on_with(context, instance) for instance in context.draining])


def _go_on_with(context: _Context, instance: ObservedInstance) -> Plan:
    assert instance.drain_started is not None
    left = work_left(instance, routed=context.observed.routed)
    timeout_s = context.pool.spec.drain_timeout_seconds
    given_up = bool(left) and context.now >= deadline(instance.drain_started, timeout_s)
    if left and not given_up:
        return Plan(
            progress=Progress(Reason.DRAINING, f"{instance.name} finishes its requests"),
            requeue_after_s=DRAIN_POLL_S,
        )
    events: tuple[Event, ...] = ()
    if given_up:
        message = f"{instance.name} was not drained after {timeout_s} s: {'; '.join(left)}"
        events = (Event(EventType.WARNING, Reason.DRAIN_TIMED_OUT, message),)
    finish = _remove if context.surplus(instance) else _replace
    return _join([Plan(events=events), finish(context, instance, given_up=given_up)])


def _begin(context: _Context) -> Plan:
    """Step 5."""
    surplus = [instance for instance in context.selection.surplus if instance not in context.draining]
    idle = [instance for instance in surplus if not context.needs_drain(instance)]
    if idle:
        return _join([_remove(context, instance, given_up=False) for instance in idle])
    if context.draining:
        return Plan()
    if surplus:
        reason = DrainReason.UPDATE if context.replaced_by_surge(surplus[0]) else DrainReason.SCALE_DOWN
        return _drain(context, surplus[0], reason)
    outdated = context.selector.in_turn(
        [i for i in context.present if context.outdated(i) and not context.cancelled(i)]
    )
    if not outdated or context.kept_out or _on_its_way(context):
        return Plan()
    chosen = outdated[0]
    if context.selection.surge and not any(available(other) for other in context.present if other is not chosen):
        return Plan()
    if not context.needs_drain(chosen):
        return _replace(context, chosen, given_up=False)
    return replace(_drain(context, chosen, DrainReason.UPDATE), verify=(context.wanted[chosen.index],))


def _on_its_way(context: _Context) -> list[ObservedInstance]:
    """Instances of the current spec that are not available, and instances whose deletion has not ended."""
    leaving = [instance for instance in context.observed.instances if instance.deleting]
    return leaving + [
        i for i in context.present if not context.surplus(i) and not context.outdated(i) and not _comes_back(context, i)
    ]


def _comes_back(context: _Context, instance: ObservedInstance) -> bool:
    """Whether the instance serves, or will once its drain is cancelled."""
    if context.cancelled(instance):
        instance = replace(instance, drain_started=None)
    return context.selector.serves(instance)


def _drain(context: _Context, instance: ObservedInstance, reason: DrainReason) -> Plan:
    why = "is surplus" if reason is DrainReason.SCALE_DOWN else "runs an earlier spec"
    message = f"{instance.name} {why} and drains"
    stops = context.pool.spec.replicas > 0 and not any(available(i) for i in context.present if i is not instance)
    if stops:
        successor = context.selection.awaited.name if context.selection.awaited else "its replacement"
        message += f". No other instance serves: the pool serves nothing until {successor} is Ready"
    return Plan(
        patch=(_annotate(instance, format_time(context.now), reason),),
        events=(Event(EventType.WARNING if stops else EventType.NORMAL, Reason.DRAIN_STARTED, message),),
        progress=Progress(Reason.DRAINING, message),
        requeue_after_s=DRAIN_POLL_S,
    )


def _remove(context: _Context, instance: ObservedInstance, *, given_up: bool) -> Plan:
    """Delete a surplus instance. Kubernetes deletes its pod with it, unless the drain was given up."""
    replaced = context.replaced_by_surge(instance)
    why = "which runs an earlier spec" if replaced else "which is surplus"
    deletions = [Delete("StatefulSet", instance.name, instance.uid)]
    if given_up and instance.pod is not None:
        deletions.append(Delete("Pod", instance.pod.name, instance.pod.uid, GIVEN_UP_GRACE_S))
    return Plan(
        delete=tuple(deletions),
        events=(Event(EventType.NORMAL, Reason.INSTANCE_DELETED, f"Deleted {instance.name}, {why}"),),
        progress=Progress(
            Reason.UPDATING if replaced else Reason.SCALING_DOWN,
            f"Removing {instance.name}, {why}; spec.replicas is {context.pool.spec.replicas}",
        ),
    )


def _replace(context: _Context, instance: ObservedInstance, *, given_up: bool) -> Plan:
    """Apply the new template, then delete the pod, so that Kubernetes creates it again."""
    apply = () if instance.spec_hash == context.spec_hash else (context.wanted[instance.index],)
    progress = Progress(Reason.UPDATING, f"Replacing {instance.name}")
    pod = instance.pod
    if pod is None or pod.terminating:
        return Plan(apply=apply, progress=progress, requeue_after_s=HOLD_POLL_S)
    return Plan(
        apply=apply,
        delete=(Delete("Pod", pod.name, pod.uid, GIVEN_UP_GRACE_S if given_up else None),),
        events=(Event(EventType.NORMAL, Reason.INSTANCE_REPLACED, f"Replaced {pod.name} to apply the current spec"),),
        progress=progress,
        requeue_after_s=HOLD_POLL_S,
    )


def _waiting(context: _Context) -> Progress | None:
    """Return what the plan waits for when it has no action."""
    leaving = [instance.name for instance in context.observed.instances if instance.deleting]
    if leaving:
        return Progress(Reason.SCALING_DOWN, f"Waiting for {', '.join(leaving)} to be deleted")
    outdated = [instance for instance in context.present if context.outdated(instance)]
    if context.kept_out:
        what = _list([f"{i.name} out of the rotation (PoolOperation {i.kept_out_by})" for i in context.kept_out])
        pauses = "; the update waits for its end" if outdated else ""
        return Progress(Reason.DRAINING, f"An operation keeps {what}{pauses}")
    waiting = [instance.name for instance in context.present if not available(instance)]
    if outdated:
        at_fault = [i.name for i in context.present if i.index in context.selector.at_fault and i.name not in waiting]
        what = _list(waiting + at_fault)
        return Progress(Reason.UPDATING, f"{len(outdated)} instances run an earlier spec; waiting for {what}")
    if waiting:
        return Progress(Reason.STARTING, f"Waiting for {_list(waiting)} to be Ready")
    return None


def _lacking_room(context: _Context) -> Plan:
    """Announce that the only serving instance will be drained to make room for its successor."""
    for new in context.present if context.selection.surge else ():
        until = None if context.outdated(new) else context.selector.no_room_until(new)
        if until is not None:
            old = _list([i.name for i in context.present if context.outdated(i)])
            cause = new.pod.unschedulable or "; ".join(new.pod.warnings) if new.pod else new.create_error
            message = (
                f"There is no room for {new.name} beside {old}: {cause}. At {format_time(until)} {old} will be "
                f"drained to make room. The pool then serves nothing until {new.name} is Ready. Add capacity to avoid "
                f"that"
            )
            return Plan(
                progress=Progress(Reason.UPDATING, message),
                requeue_after_s=max(DRAIN_POLL_S, (until - context.now).total_seconds()),
            )
    return Plan()


def _built_otherwise(context: _Context) -> tuple[str, ...]:
    """Return instances of the current spec whose pod another version of the builders rendered."""
    return tuple(
        instance.name
        for instance in context.present
        if instance.pod is not None
        and not context.surplus(instance)
        and not context.outdated(instance)
        and instance.pod.build_hash != context.wanted[instance.index]["metadata"]["annotations"][ANNOTATION_BUILD_HASH]
    )


def _list(items: list[str]) -> str:
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def _annotate(instance: ObservedInstance, started: str | None, reason: DrainReason | None) -> Patch:
    return _patch(
        instance,
        {
            "metadata": {
                "annotations": {
                    names.ANNOTATION_DRAIN_STARTED: started,
                    names.ANNOTATION_DRAIN_REASON: None if reason is None else str(reason),
                }
            }
        },
    )


def _patch(instance: ObservedInstance, body: dict[str, Any]) -> Patch:
    meta = {"uid": instance.uid, **body.get("metadata", {})}
    return Patch("StatefulSet", instance.name, {**body, "metadata": meta})


def _standing(observed: ObservedPool) -> list[tuple[str, Standing]]:
    return [
        *(("StatefulSet", instance) for instance in observed.instances),
        *((obj.kind, obj) for obj in observed.objects),
    ]


def _join(plans: list[Plan]) -> Plan:
    """Merge plans into one: the first progress, the earliest requeue."""
    requeues = [plan.requeue_after_s for plan in plans if plan.requeue_after_s is not None]
    return Plan(
        verify=tuple(obj for plan in plans for obj in plan.verify),
        apply=tuple(obj for plan in plans for obj in plan.apply),
        patch=tuple(patch for plan in plans for patch in plan.patch),
        delete=tuple(deletion for plan in plans for deletion in plan.delete),
        events=tuple(event for plan in plans for event in plan.events),
        progress=next((plan.progress for plan in plans if plan.progress is not None), None),
        requeue_after_s=min(requeues, default=None),
    )

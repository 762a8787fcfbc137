"""Plans the next safe actions for one pool.

Let n = spec.replicas and H = the hash of the user's spec without replicas. An instance i (one StatefulSet) is

    surplus     i >= n
    outdated    its pod was built from another spec than H (without a pod: its StatefulSet)

    available   its pod is Ready, does not terminate, and the instance does not drain

Goal: exactly the instances 0..n-1 exist, none is outdated, none drains. Each call takes all steps below that apply. The
state between calls is only in the cluster: two annotations on the StatefulSet. An operator that is killed at any point
continues from there.

1. Create every missing instance. Create or update the pool's other objects that are missing or built differently.
2. Update StatefulSets where that disturbs no pod. Causes are a template whose pod is already of H, a changed
   `replicas`, or an edit by another manager of what this operator built.
3. Cancel drains whose reason no longer holds.
4. Continue drains. When an instance is drained, or its time is over, remove it (surplus) or replace it (outdated).
   To replace means: apply the new template, then delete the pod by its UID.
5. If nothing drains, begin one drain: of the highest surplus instance, else of the highest outdated one. Instances
   without work to lose need no drain and go first, then those that are not available.

Step 5 takes an outdated instance only while every instance of H is available. An instance of H that is not available
was just replaced, was just created, or fails. This rule has three effects. A serving instance is taken only if all
others are available. At most one instance at a time is unavailable because of the operator. A spec that does not start
stops at the first instance.

Nothing is taken out of service while the template is invalid, a name is taken, or the API server refuses an object.
Desired instances that drain return to service, because the error may last long. Their drain starts again when the error
is fixed.

A change of what the builders render under an unchanged H (another operator version) is no step: see `UpdateAvailable`.
Kubernetes restarts failed pods, as long as the StatefulSet exists.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ..api import names
from ..api.base import format_time
from ..api.models import Pool
from ..api.names import ANNOTATION_BUILD_HASH
from ..api.reasons import Reason
from ..build.pool import PODS_PER_INSTANCE, instance_stateful_set, pool_objects, pool_spec_hash
from ..build.settings import BuildSettings
from ..build.template import TemplateInvalid
from ..observe.model import ObservedInstance, ObservedPool
from .drain import GIVEN_UP_GRACE_S, deadline, has_work_to_lose, work_left
from .model import Delete, DrainReason, Event, EventType, Fault, Patch, Plan, Progress
from .objects import (
    EDITED,
    Standing,
    blocked,
    edited,
    missing_or_changed,
    restored,
    restored_events,
    surplus_policies,
)

DRAIN_POLL_S = 1.0
"""How often a drain is checked: queues change without an event in the cluster."""

HOLD_POLL_S = 10.0
"""Fallback interval for changes that the cluster announces by events."""


def plan_pool(observed: ObservedPool, settings: BuildSettings, now: datetime) -> Plan:
    """Return the next actions for the pool. Empty if the goal is reached."""
    pool = observed.pool
    if pool.metadata.deletion_timestamp is not None:
        return Plan()
    if taken := blocked(pool, _standing(observed)):
        return replace(taken, patch=_put_back(observed))
    try:
        wanted = [instance_stateful_set(pool, index, settings, observed.keys) for index in range(pool.spec.replicas)]
    except TemplateInvalid as invalid:
        return Plan(faults=(Fault(Reason.TEMPLATE_INVALID, str(invalid)),), patch=_put_back(observed))
    context = _Context(pool, observed, pool_spec_hash(pool, observed.keys), wanted, now)
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
    return replace(
        plan,
        put_back=_put_back(observed),
        progress=plan.progress or _waiting(context),
        update_available=_built_otherwise(context),
    )


@dataclass(frozen=True, slots=True)
class _Context:
    pool: Pool
    observed: ObservedPool
    spec_hash: str
    wanted: list[dict[str, Any]]
    """StatefulSets of the instances 0..n-1."""
    now: datetime

    @property
    def present(self) -> list[ObservedInstance]:
        return [instance for instance in self.observed.instances if not instance.deleting]

    def surplus(self, instance: ObservedInstance) -> bool:
        return instance.index >= self.pool.spec.replicas

    def outdated(self, instance: ObservedInstance) -> bool:
        made_from = instance.pod.spec_hash if instance.pod is not None else instance.spec_hash
        return made_from != self.spec_hash

    def cancelled(self, instance: ObservedInstance) -> bool:
        """Whether the reason of a drain no longer holds."""
        if instance.drain_started is None or self.surplus(instance):
            return False
        return instance.drain_reason == DrainReason.SCALE_DOWN or not self.outdated(instance)

    @property
    def draining(self) -> list[ObservedInstance]:
        return [i for i in self.present if i.drain_started is not None and not self.cancelled(i)]


def available(instance: ObservedInstance) -> bool:
    """Whether the instance serves: Ready, and not being removed."""
    pod = instance.pod
    if pod is None or instance.deleting or instance.drain_started is not None:
        return False
    return pod.ready and not pod.terminating


def _create(context: _Context) -> Plan:
    existing = {instance.index for instance in context.observed.instances}
    missing = [wanted for index, wanted in enumerate(context.wanted) if index not in existing]
    if not missing:
        return Plan()
    what = ", ".join(wanted["metadata"]["name"] for wanted in missing)
    return Plan(
        apply=tuple(missing),
        events=(Event(EventType.NORMAL, Reason.INSTANCE_CREATED, f"Created {what}"),),
        progress=Progress(Reason.SCALING_UP, f"Creating {what}"),
    )


def _align(context: _Context) -> Plan:
    """Step 2. Under `OnDelete` a changed template disturbs no running pod."""
    apply: list[dict[str, Any]] = []
    patches: list[Patch] = []
    reverted: list[str] = []
    for instance in context.present:
        if context.surplus(instance):
            continue
        late = instance.spec_hash != context.spec_hash and not context.outdated(instance)
        if late or _is_edited(context, instance):
            apply.append(context.wanted[instance.index])
            reverted += [] if late else [f"StatefulSet {instance.name}"]
        elif instance.replicas != PODS_PER_INSTANCE:
            patches.append(_patch(instance, {"spec": {"replicas": PODS_PER_INSTANCE}}))
    return Plan(apply=tuple(apply), patch=tuple(patches), events=restored_events(reverted, EDITED))


def _is_edited(context: _Context, instance: ObservedInstance) -> bool:
    """Whether others have edited what this operator version built.

    A StatefulSet that another version built stays as it is: reverting an edit would update it.
    """
    wanted = context.wanted[instance.index]
    annotations = wanted["metadata"]["annotations"]
    made = instance.spec_hash, instance.build_hash
    if made != (context.spec_hash, annotations[ANNOTATION_BUILD_HASH]):
        return False
    return edited(wanted, instance.owners)


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


def _put_back(observed: ObservedPool) -> tuple[Patch, ...]:
    """End the drains of desired instances. While an object is refused, nothing can replace them."""
    ours, replicas = observed.pool.metadata.uid, observed.pool.spec.replicas
    return tuple(
        _annotate(instance, None, None)
        for instance in observed.instances
        if instance.controller_uid == ours and instance.index < replicas
        if instance.drain_started is not None and not instance.deleting
    )


def _go_on(context: _Context) -> Plan:
    return _join([_go_on_with(context, instance) for instance in context.draining])


def _go_on_with(context: _Context, instance: ObservedInstance) -> Plan:
    assert instance.drain_started is not None
    left = work_left(instance, instance.drain_started)
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
    if context.draining:
        return Plan()
    surplus = sorted((i for i in context.present if context.surplus(i)), key=_idle_first)
    if surplus:
        return _begin_removal(context, surplus)
    outdated = sorted((i for i in context.present if context.outdated(i) and not context.cancelled(i)), key=_idle_first)
    if not outdated or _on_its_way(context):
        return Plan()
    chosen = outdated[0]
    if not has_work_to_lose(chosen):
        return _replace(context, chosen, given_up=False)
    return replace(_drain(context, chosen, DrainReason.UPDATE), verify=(context.wanted[chosen.index],))


def _begin_removal(context: _Context, surplus: list[ObservedInstance]) -> Plan:
    idle = [instance for instance in surplus if not has_work_to_lose(instance)]
    if idle:
        return _join([_remove(context, instance, given_up=False) for instance in idle])
    return _drain(context, surplus[0], DrainReason.SCALE_DOWN)


def _on_its_way(context: _Context) -> list[ObservedInstance]:
    """Instances of the current spec that are not available, and instances whose deletion has not ended."""
    leaving = [instance for instance in context.observed.instances if instance.deleting]
    return leaving + [
        i for i in context.present if not context.surplus(i) and not context.outdated(i) and not _comes_back(context, i)
    ]


def _comes_back(context: _Context, instance: ObservedInstance) -> bool:
    """Whether the instance is available, or will be once its drain is cancelled."""
    return available(instance) or (context.cancelled(instance) and available(replace(instance, drain_started=None)))


def _idle_first(instance: ObservedInstance) -> tuple[bool, bool, int]:
    """Order in which instances are taken out: without work to lose first, then those not available, then the rest."""
    return has_work_to_lose(instance), available(instance), -instance.index


def _drain(context: _Context, instance: ObservedInstance, reason: DrainReason) -> Plan:
    why = "is surplus" if reason is DrainReason.SCALE_DOWN else "runs an earlier spec"
    return Plan(
        patch=(_annotate(instance, format_time(context.now), reason),),
        events=(Event(EventType.NORMAL, Reason.DRAIN_STARTED, f"{instance.name} {why} and drains"),),
        progress=Progress(Reason.DRAINING, f"{instance.name} {why} and drains"),
        requeue_after_s=DRAIN_POLL_S,
    )


def _remove(context: _Context, instance: ObservedInstance, *, given_up: bool) -> Plan:
    """Delete a surplus instance. Kubernetes deletes its pod with it, unless the drain was given up."""
    deletions = [Delete("StatefulSet", instance.name, instance.uid)]
    if given_up and instance.pod is not None:
        deletions.append(Delete("Pod", instance.pod.name, instance.pod.uid, GIVEN_UP_GRACE_S))
    return Plan(
        delete=tuple(deletions),
        events=(Event(EventType.NORMAL, Reason.INSTANCE_DELETED, f"Deleted {instance.name}, which is surplus"),),
        progress=Progress(
            Reason.SCALING_DOWN, f"Removing {instance.name}; spec.replicas is {context.pool.spec.replicas}"
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
    waiting = [instance.name for instance in context.present if not available(instance)]
    if outdated:
        return Progress(Reason.UPDATING, f"{len(outdated)} instances run an earlier spec; waiting for {_list(waiting)}")
    if waiting:
        return Progress(Reason.STARTING, f"Waiting for {_list(waiting)} to be Ready")
    return None


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

"""Steps 3 to 5 of a pool's plan: which drains end, go on, and begin. `plan.pool` has the rule."""

from collections.abc import Sequence
from dataclasses import replace

from ..api import names
from ..api.base import format_time
from ..api.reasons import Reason
from ..observe.model import DrainReason, ObservedInstance
from .drain import GIVEN_UP_GRACE_S, deadline, work_left
from .model import Delete, Event, EventType, Patch, Plan, Progress, join
from .pool_state import PoolState, stateful_set_patch
from .selection import Selection, available

DRAIN_POLL_S = 1.0
"""How often a drain is checked: queues change without an event in the cluster."""

HOLD_POLL_S = 10.0
"""Fallback interval for changes that the cluster announces by events."""


def cancel(state: PoolState) -> Plan:
    """Step 3."""
    cancelled = [instance for instance in state.present if state.cancelled(instance)]
    still_old = [i for i in cancelled if i.drain_reason == DrainReason.SCALE_DOWN]
    return Plan(
        patch=tuple(_annotated(instance, None, None) for instance in cancelled),
        events=tuple(
            Event(EventType.NORMAL, Reason.DRAIN_CANCELLED, f"{instance.name} is needed again")
            for instance in still_old
        ),
    )


def put_back(ours: Sequence[ObservedInstance], selection: Selection) -> tuple[Patch, ...]:
    """End the drains of instances that the pool needs. While an object is refused, nothing can replace them."""
    return tuple(
        _annotated(instance, None, None)
        for instance in ours
        if instance.drain_started is not None and not instance.deleting
        if instance.drain_reason != DrainReason.OPERATION
        if instance not in selection.surplus or instance.drain_reason == DrainReason.UPDATE
    )


def go_on(state: PoolState) -> Plan:
    """Step 4."""
    return join([_go_on_with(state, instance) for instance in state.draining])


def _go_on_with(state: PoolState, instance: ObservedInstance) -> Plan:
    assert instance.drain_started is not None
    left = work_left(instance, routed=state.observed.routed)
    timeout_s = state.pool.spec.drain_timeout_seconds
    given_up = bool(left) and state.now >= deadline(instance.drain_started, timeout_s)
    if left and not given_up:
        return Plan(
            progress=Progress(Reason.DRAINING, f"{instance.name} finishes its requests"),
            requeue_after_s=DRAIN_POLL_S,
        )
    events: tuple[Event, ...] = ()
    if given_up:
        message = f"{instance.name} was not drained after {timeout_s} s: {'; '.join(left)}"
        events = (Event(EventType.WARNING, Reason.DRAIN_TIMED_OUT, message),)
    finish = _remove if state.surplus(instance) else _replace
    return join([Plan(events=events), finish(state, instance, given_up=given_up)])


def begin(state: PoolState) -> Plan:
    """Step 5."""
    surplus = [instance for instance in state.selection.surplus if instance not in state.draining]
    idle = [instance for instance in surplus if not state.needs_drain(instance)]
    if idle:
        return join([_remove(state, instance, given_up=False) for instance in idle])
    if state.draining:
        return Plan()
    if surplus:
        reason = DrainReason.UPDATE if state.replaced_by_surge(surplus[0]) else DrainReason.SCALE_DOWN
        return _drain(state, surplus[0], reason)
    outdated = state.selector.in_turn([i for i in state.present if state.outdated(i) and not state.cancelled(i)])
    if not outdated or state.kept_out or _on_its_way(state):
        return Plan()
    chosen = outdated[0]
    if state.selection.surge and not any(available(other) for other in state.present if other is not chosen):
        return Plan()
    if not state.needs_drain(chosen):
        return _replace(state, chosen, given_up=False)
    return replace(_drain(state, chosen, DrainReason.UPDATE), verify=(state.wanted[chosen.index],))


def _on_its_way(state: PoolState) -> list[ObservedInstance]:
    """Instances of the current spec that are not available, and instances whose deletion has not ended."""
    leaving = [instance for instance in state.observed.instances if instance.deleting]
    return leaving + [
        i for i in state.present if not state.surplus(i) and not state.outdated(i) and not _comes_back(state, i)
    ]


def _comes_back(state: PoolState, instance: ObservedInstance) -> bool:
    """Whether the instance serves, or will once its drain is cancelled."""
    if state.cancelled(instance):
        instance = replace(instance, drain_started=None)
    return state.selector.serves(instance)


def _drain(state: PoolState, instance: ObservedInstance, reason: DrainReason) -> Plan:
    why = "is surplus" if reason is DrainReason.SCALE_DOWN else "runs an earlier spec"
    message = f"{instance.name} {why} and drains"
    stops = state.pool.spec.replicas > 0 and not any(available(i) for i in state.present if i is not instance)
    if stops:
        successor = state.selection.awaited.name if state.selection.awaited else "its replacement"
        message += f". No other instance serves: the pool serves nothing until {successor} is Ready"
    return Plan(
        patch=(_annotated(instance, format_time(state.now), str(reason)),),
        events=(Event(EventType.WARNING if stops else EventType.NORMAL, Reason.DRAIN_STARTED, message),),
        progress=Progress(Reason.DRAINING, message),
        requeue_after_s=DRAIN_POLL_S,
    )


def _remove(state: PoolState, instance: ObservedInstance, *, given_up: bool) -> Plan:
    """Delete a surplus instance. Kubernetes deletes its pod with it, unless the drain was given up."""
    replaced = state.replaced_by_surge(instance)
    why = "which runs an earlier spec" if replaced else "which is surplus"
    deletions = [Delete("StatefulSet", instance.name, instance.uid)]
    if given_up and instance.pod is not None:
        deletions.append(Delete("Pod", instance.pod.name, instance.pod.uid, GIVEN_UP_GRACE_S))
    return Plan(
        delete=tuple(deletions),
        events=(Event(EventType.NORMAL, Reason.INSTANCE_DELETED, f"Deleted {instance.name}, {why}"),),
        progress=Progress(
            Reason.UPDATING if replaced else Reason.SCALING_DOWN,
            f"Removing {instance.name}, {why}; spec.replicas is {state.pool.spec.replicas}",
        ),
    )


def _replace(state: PoolState, instance: ObservedInstance, *, given_up: bool) -> Plan:
    """Apply the new template, then delete the pod, so that Kubernetes creates it again."""
    apply = () if instance.spec_hash == state.spec_hash else (state.wanted[instance.index],)
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


def _annotated(instance: ObservedInstance, started: str | None, reason: str | None) -> Patch:
    annotations = {names.ANNOTATION_DRAIN_STARTED: started, names.ANNOTATION_DRAIN_REASON: reason}
    return stateful_set_patch(instance, {"metadata": {"annotations": annotations}})

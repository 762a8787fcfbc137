"""Plans the next safe actions for one service: its router's objects, and the rotation at each router replica.

The router's Deployment is applied when it is missing, when the user's spec has changed, or when others have edited it.
A changed number of replicas is a patch of that number alone. So a change of what the builders render under an unchanged
spec restarts no router (see `UpdateAvailable`). The worker lists are level-triggered: the pods give the desired list,
each replica reports its own, and the next call reads every change back. `rotation` defines the desired list.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..api import names
from ..api.reasons import Reason
from ..api.services import DisaggregatedService
from ..api.wording import some
from ..build import router
from ..build.common import keys_secret
from ..build.network_policy import router_network_policy
from ..build.settings import BuildSettings
from ..build.template import TemplateInvalid
from ..observe.model import ObservedService
from .model import Delete, Event, EventType, Fault, Patch, Plan, Progress, WorkerAction, WorkerChange
from .objects import (
    EDITED,
    LOST,
    UNLABELLED,
    ExistingObject,
    blocked,
    edited,
    lost_labels,
    missing_or_changed,
    restored,
    restored_events,
    surplus_policies,
)
from .rotation import Rotation, desired_rotation, worker_changes
from .router_reach import label_routers

READ_BACK_S = 1.0
"""Delay after a change of a worker list: a router carries it out after it has answered."""

ASK_AGAIN_S = 2.0
"""Delay after a router did not return its list."""


def plan_service(observed: ObservedService, settings: BuildSettings) -> Plan:
    """Return the next actions for the service. Empty if the goal is reached."""
    service = observed.service
    if service.metadata.deletion_timestamp is not None:
        return Plan()
    if not service.spec.router.enabled:
        return _remove_router(observed)
    deployment = observed.deployment
    standing: list[tuple[str, ExistingObject]] = [(obj.kind, obj) for obj in observed.objects]
    if deployment is not None:
        standing.append(("Deployment", deployment))
    if taken := blocked(service, standing):
        return taken
    rotation = desired_rotation(observed)
    keys = keys_secret(service.metadata.namespace, settings.keys)
    policies = () if settings.peers is None else (router_network_policy(service, settings.peers),)
    try:
        support = (
            keys,
            router.worker_list_config_map(service, router.workers_json(rotation.prefill, rotation.decode)),
            router.router_service(service, keys),
            router.router_disruption_budget(service),
            *policies,
        )
        built = router.router_deployment(service, settings)
    except TemplateInvalid as invalid:
        # The routers that run stay as they are, and their worker lists are still kept.
        fault = Fault(Reason.TEMPLATE_INVALID, str(invalid))
        return _with_rotation(Plan(faults=(fault,)), observed, rotation)
    plan = _deployment(observed, built)
    events = restored(support, observed.objects, set_up=service.status.observed_generation > 0)
    plan = replace(
        plan,
        apply=missing_or_changed(support, observed.objects) + plan.apply,
        delete=surplus_policies(support, observed.objects),
        events=events + plan.events,
    )
    return replace(_with_rotation(plan, observed, rotation), update_available=_built_otherwise(observed, built))


def _deployment(observed: ObservedService, built: dict[str, Any]) -> Plan:
    service, present = observed.service, observed.deployment
    wanted = service.spec.router.replicas
    reverts = _edited(observed, built)
    if present is None or present.spec_hash != _spec_hash(built) or reverts:
        lost = present is None and service.status.observed_generation > 0
        what = [f"Deployment {built['metadata']['name']}"]
        return Plan(
            apply=(built,),
            events=restored_events(what, LOST) if lost else restored_events(what if reverts else [], EDITED),
            progress=Progress(Reason.UPDATING, "Applying the router's Deployment"),
        )
    if labels := lost_labels(built["metadata"]["labels"], present.labels):
        return Plan(
            patch=(Patch("Deployment", present.name, {"metadata": {"uid": present.uid, "labels": labels}}),),
            events=restored_events([f"Deployment {present.name}"], UNLABELLED),
            progress=Progress(Reason.UPDATING, "Restoring the labels of the router's Deployment"),
        )
    if present.replicas != wanted:
        body = {"metadata": {"uid": present.uid}, "spec": {"replicas": wanted}}
        reason = Reason.SCALING_UP if wanted > present.replicas else Reason.SCALING_DOWN
        return Plan(
            patch=(Patch("Deployment", present.name, body),),
            progress=Progress(reason, f"Scaling the router from {present.replicas} to {wanted}"),
        )
    if present.observed_generation < present.generation or present.updated_replicas < wanted:
        return Plan(
            progress=Progress(Reason.UPDATING, f"{present.updated_replicas} of {wanted} routers are up to date")
        )
    if present.ready_replicas < wanted:
        return Plan(progress=Progress(Reason.STARTING, f"{present.ready_replicas} of {wanted} routers are Ready"))
    return Plan()


def _edited(observed: ObservedService, built: Mapping[str, Any]) -> bool:
    """Whether others have edited what this operator version built.

    A Deployment that an earlier version built stays as it is: reverting an edit would update it.
    """
    if observed.deployment is None or _built_otherwise(observed, built):
        return False
    return edited(built, observed.deployment.owners)


def _spec_hash(built: Mapping[str, Any]) -> str:
    return str(built["metadata"]["annotations"][names.ANNOTATION_SPEC_HASH])


def _built_otherwise(observed: ObservedService, built: Mapping[str, Any]) -> tuple[str, ...]:
    present = observed.deployment
    if present is None or present.spec_hash != _spec_hash(built):
        return ()
    same = present.build_hash == built["metadata"]["annotations"][names.ANNOTATION_BUILD_HASH]
    return () if same else (present.name,)


def _with_rotation(plan: Plan, observed: ObservedService, rotation: Rotation) -> Plan:
    changes = tuple(change for router in observed.routers for change in worker_changes(router, rotation))
    silent = [router.pod.name for router in observed.routers if router.workers is None and not router.pod.terminating]
    labels, label_events = label_routers(observed.routers)
    progress = plan.progress
    if changes:
        progress = progress or Progress(Reason.ROUTER_LIST_OUTDATED, f"{len(changes)} changes of worker lists to make")
    elif silent:
        progress = progress or Progress(Reason.ROUTER_LIST_OUTDATED, f"No worker list from {', '.join(silent)}")
    requeue = READ_BACK_S if changes else ASK_AGAIN_S if silent else plan.requeue_after_s
    return replace(
        plan,
        workers=changes,
        patch=plan.patch + labels,
        events=plan.events + label_events,
        progress=progress,
        requeue_after_s=requeue,
    )


def worker_events(changes: tuple[WorkerChange, ...]) -> tuple[Event, ...]:
    """Return the events about changes of worker lists that routers accepted."""
    words = (
        (WorkerAction.REMOVE, Reason.WORKER_REMOVED, "Removing from rotation"),
        (WorkerAction.ADD, Reason.WORKER_ADDED, "Adding to rotation"),
    )
    events: list[Event] = []
    for action, reason, verb in words:
        urls = sorted({f"{change.role} {change.url}" for change in changes if change.action is action})
        if urls:
            events.append(Event(EventType.NORMAL, reason, f"{verb}: {some(urls)}"))
    return tuple(events)


def _remove_router(observed: ObservedService) -> Plan:
    """Delete the router's objects that are ours when the router is turned off.

    Clients must not reach a router that the operator no longer manages.
    """
    uid = observed.service.metadata.uid
    ours = [obj for obj in observed.objects if obj.controller_uid == uid]
    deletions = [Delete(obj.kind, obj.name, obj.uid) for obj in ours]
    if observed.deployment is not None and observed.deployment.controller_uid == uid:
        deletions.insert(0, Delete("Deployment", observed.deployment.name, observed.deployment.uid))
    return Plan(delete=tuple(deletions))


def router_url(service: DisaggregatedService) -> str:
    """Return the URL at which clients inside the cluster reach the service's router; empty without a router."""
    if not service.spec.router.enabled:
        return ""
    meta = service.metadata
    return f"http://{names.router(meta.name)}.{meta.namespace}.svc:{service.spec.router.port}"

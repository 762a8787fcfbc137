"""Turns objects as the API server returns them into the types of `observe.model`. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from ..api import names
from ..api.key_epochs import FIRST_KEYS, KeyEpochs
from ..runtime.resources import controller_of
from .model import (
    CRASH_LOOP,
    OUT_OF_SERVICE,
    FieldOwners,
    ObservedDeployment,
    ObservedInstance,
    ObservedNode,
    ObservedObject,
    ObservedPod,
    PodLife,
)

Object = Mapping[str, Any]

LOOPS_FROM = 2
"""Restarts. One alone may be an accident."""
SOON = timedelta(minutes=10)
"""After a run of this length, the kubelet forgets the failures before it."""
MAX_LAST_WORDS = 256


def moment(text: str | None) -> datetime | None:
    """Parse a Kubernetes time stamp (seconds or microseconds). Return None for other text: annotations may hold
    anything.
    """
    try:
        return datetime.fromisoformat(text or "").astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def controller_uid(obj: Object) -> str:
    """Return the UID of the controlling owner reference, or an empty text."""
    return str(controller_of(obj).get("uid", ""))


def controller(obj: Object) -> str:
    """Return the controlling owner as `kind/name`, or an empty text."""
    owner = controller_of(obj)
    return f"{owner['kind']}/{owner['name']}" if owner else ""


def annotation(obj: Object, key: str) -> str:
    """Return the value of an annotation, or an empty text."""
    return str((obj["metadata"].get("annotations") or {}).get(key, ""))


def key_epochs(pod: Object) -> KeyEpochs | None:
    """Return the epochs of a pod's keys, or None: engines without a connector have no keys."""
    return KeyEpochs.parse(annotation(pod, names.ANNOTATION_KEY_EPOCH))


def labels_of(obj: Object) -> Mapping[str, str]:
    """Return the labels."""
    return dict(obj["metadata"].get("labels") or {})


def condition(obj: Object, type_: str) -> Mapping[str, Any]:
    """Return a condition of the status, or an empty dict."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == type_), {})


def observed_pod(pod: Object) -> ObservedPod:
    """Parse a pod."""
    meta, status, spec = pod["metadata"], pod.get("status") or {}, pod.get("spec") or {}
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    looping: Object | None = next((c for c in containers if _keeps_ending(c)), None)
    again: Object | None = next((c for c in containers if _runs_again(c)), None)
    waits: Object = looping or again or next((c for c in containers if (c.get("state") or {}).get("waiting")), {})
    waiting: Mapping[str, str] = (waits.get("state") or {}).get("waiting") or {}
    scheduled = condition(pod, "PodScheduled")
    return ObservedPod(
        name=meta["name"],
        uid=meta["uid"],
        ip=status.get("podIP"),
        phase=status.get("phase", "Unknown"),
        ready=condition(pod, "Ready").get("status") == "True",
        terminating="deletionTimestamp" in meta,
        spec_hash=annotation(pod, names.ANNOTATION_SPEC_HASH),
        build_hash=annotation(pod, names.ANNOTATION_BUILD_HASH),
        created_at=moment(meta["creationTimestamp"]) or datetime.fromtimestamp(0, UTC),
        keys=key_epochs(pod) or FIRST_KEYS,
        node=spec.get("nodeName", ""),
        ready_since=_ready_since(pod),
        node_silent=_node_silent(pod),
        was_ready=_was_ready(pod),
        gone_by=moment(meta.get("deletionTimestamp")),
        waiting_container=waits.get("name", ""),
        waiting_reason=CRASH_LOOP if looping else waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        keeps_ending=bool(looping or again),
        last_end=_last_end(waits),
        unschedulable=scheduled.get("message", "") if scheduled.get("status") == "False" else "",
        labelled_reachable=(meta.get("labels") or {}).get(names.LABEL_REACHABLE, ""),
    )


def observed_node(name: str, node: Object | None, asked_at: datetime) -> ObservedNode:
    """Parse a Node. None: there is no such Node."""
    if node is None:
        return ObservedNode(name, asked_at, exists=False)
    taints = (node.get("spec") or {}).get("taints") or ()
    return ObservedNode(
        name,
        asked_at,
        ready=str(condition(node, "Ready").get("status", "")),
        out_of_service=any(taint.get("key") == OUT_OF_SERVICE for taint in taints),
    )


def observed_instance(
    index: int, sts: Object, pod: Object | None, labels: Mapping[str, str], now: datetime
) -> ObservedInstance:
    """Parse a StatefulSet with its pod.

    Args:
        index: number of the instance.
        sts: the StatefulSet.
        pod: its pod, if there is one.
        labels: those that an instance of the pool has.
        now: the present time. A drain that began later counts as none, because a clock ahead of ours wrote it. It
            would be given up too late, or never.
    """
    meta = sts["metadata"]
    started = moment(annotation(sts, names.ANNOTATION_DRAIN_STARTED))
    return ObservedInstance(
        index=index,
        name=meta["name"],
        uid=meta["uid"],
        controller_uid=controller_uid(sts),
        deleting="deletionTimestamp" in meta,
        spec_hash=annotation(sts, names.ANNOTATION_SPEC_HASH),
        build_hash=annotation(sts, names.ANNOTATION_BUILD_HASH),
        replicas=int((sts.get("spec") or {}).get("replicas", 1)),
        drain_started=None if started is not None and started > now else started,
        drain_reason=annotation(sts, names.ANNOTATION_DRAIN_REASON),
        pod=observed_pod(pod) if pod else None,
        controller=controller(sts),
        owners=field_owners(sts),
        labels=labels_of(sts),
        labelled=names.has_labels(sts, labels),
        avoids_node=annotation(sts, names.ANNOTATION_AVOID_NODE),
    )


def _was_ready(pod: Object) -> bool:
    """Whether a pod that is not Ready was Ready before.

    The kubelet stamps the condition as False just before it sets startTime (kubelet/status, updateStatusInternal). A
    later transition can only be from True.
    """
    ready = condition(pod, "Ready")
    changed, taken_up = moment(ready.get("lastTransitionTime")), moment(_status(pod).get("startTime"))
    if ready.get("status") == "True" or changed is None or taken_up is None:
        return False
    return changed > taken_up


def _ready_since(pod: Object) -> datetime | None:
    ready = condition(pod, "Ready")
    return moment(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None


def _node_silent(pod: Object) -> bool:
    """Whether the node controller made the pod not Ready, because its kubelet does not report.

    It changes only the status of the condition Ready (controller/util/node, MarkPodsNotReady). A kubelet that makes a
    pod not Ready gives a reason, or its containers are not ready either.
    """
    ready = condition(pod, "Ready")
    return (
        ready.get("status") == "False"
        and not ready.get("reason")
        and condition(pod, "ContainersReady").get("status") == "True"
    )


def _keeps_ending(container: Object) -> bool:
    """Whether the container failed again and will be restarted. Between two waits it shows as terminated."""
    state = container.get("state") or {}
    ended, waiting = state.get("terminated") or {}, state.get("waiting") or {}
    return waiting.get("reason") == CRASH_LOOP or bool(ended.get("exitCode") and container.get("restartCount"))


def _runs_again(container: Object) -> bool:
    """Whether a container that has failed again and again runs, and is not ready yet."""
    if container.get("ready") or not (container.get("state") or {}).get("running"):
        return False
    ended = (container.get("lastState") or {}).get("terminated") or {}
    if container.get("restartCount", 0) < LOOPS_FROM or not ended.get("exitCode"):
        return False
    began, end = moment(ended.get("startedAt")), moment(ended.get("finishedAt"))
    return began is not None and end is not None and end - began < SOON


def _last_end(container: Object) -> str:
    """Return how a container's last run ended, with its last line of output: `exit code 1: no such model`."""
    states = (container.get(key) or {} for key in ("state", "lastState"))
    ended: Object | None = next((state["terminated"] for state in states if state.get("terminated") is not None), None)
    if ended is None:
        return ""
    why = f"{ended['reason']}, " if ended.get("reason", "Error") != "Error" else ""
    lines = [line for line in str(ended.get("message", "")).splitlines() if line.strip()]
    last = "".join(c if c.isprintable() else " " for c in lines[-1].strip()) if lines else ""
    words = last if len(last) <= MAX_LAST_WORDS else f"{last[: MAX_LAST_WORDS - 1]}…"
    return f"{why}exit code {ended.get('exitCode', 'unknown')}" + (f": {words}" if words else "")


def pod_life(pod: Object) -> PodLife | None:
    """Return the kubelet's reports of ended runs of the engine container, or None if there are none.

    Only a status with the container's id counts, because only the kubelet writes it. A pod that is deleted,
    force-deleted, or marked lost by the node controller is no proof: its processes may still run. A deletion time stamp
    is no proof either. A kubelet that is cut off does not see it, and may restart a container whose end it has
    reported.
    """
    engine: Object = next(
        (c for c in _status(pod).get("containerStatuses") or () if c.get("name") == names.ENGINE_CONTAINER), {}
    )
    now, last = ((engine.get(key) or {}).get("terminated") or {} for key in ("state", "lastState"))
    if container_id := now.get("containerID"):
        return PodLife(pod["metadata"]["name"], container_id, over=_ended_for_good(pod))
    if container_id := last.get("containerID"):
        return PodLife(pod["metadata"]["name"], container_id, over=False)
    return None


def _ended_for_good(pod: Object) -> bool:
    """Whether the kubelet has set the pod's final phase, which it does when no container runs or will run any more.

    See kubelet/status, mergePodStatus (since 1.24); for deleted pods too (since 1.27). The pod garbage collector also
    sets that phase, on pods whose Node object is gone. It marks them, and they do not count.
    """
    collected = condition(pod, "DisruptionTarget").get("reason") == "DeletionByPodGC"
    return _status(pod).get("phase") in {"Succeeded", "Failed"} and not collected


def _status(pod: Object) -> Object:
    return pod.get("status") or {}


def observed_object(obj: Object, labels: Mapping[str, str]) -> ObservedObject:
    """Parse an object that we create other than an instance. `labels` are those that we give it."""
    meta = obj["metadata"]
    return ObservedObject(
        kind=obj["kind"],
        name=meta["name"],
        uid=meta["uid"],
        controller_uid=controller_uid(obj),
        build_hash=annotation(obj, names.ANNOTATION_BUILD_HASH),
        controller=controller(obj),
        owners=field_owners(obj),
        labels=labels_of(obj),
        labelled=names.has_labels(obj, labels),
    )


def field_owners(obj: Object) -> FieldOwners:
    """Return the managers that set the fields which we apply.

    Fields that a merge patch of the operator has set are ours too. The API server lists them apart from those that it
    has applied.
    """
    ours: Object = {}
    others: list[Object] = []
    for entry in obj["metadata"].get("managedFields") or ():
        fields = entry.get("fieldsV1") or {}
        if entry.get("subresource"):
            continue
        if entry.get("manager") == names.FIELD_MANAGER:
            ours = _joined(ours, fields)
        else:
            others.append(fields)
    return FieldOwners(ours, tuple(others))


def _joined(one: Object, other: Object) -> Object:
    """Return the fields of both, in the form of fieldsV1."""
    return {**one, **other, **{name: _joined(one[name], other[name]) for name in one.keys() & other.keys()}}


def observed_deployment(obj: Object, labels: Mapping[str, str]) -> ObservedDeployment:
    """Parse the router's Deployment. `labels` are those that we give it."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    failure = condition(obj, "ReplicaFailure")
    return ObservedDeployment(
        name=meta["name"],
        uid=meta["uid"],
        controller_uid=controller_uid(obj),
        spec_hash=annotation(obj, names.ANNOTATION_SPEC_HASH),
        build_hash=annotation(obj, names.ANNOTATION_BUILD_HASH),
        replicas=int(spec.get("replicas", 1)),
        ready_replicas=int(status.get("readyReplicas", 0)),
        updated_replicas=int(status.get("updatedReplicas", 0)),
        generation=int(meta.get("generation", 0)),
        observed_generation=int(status.get("observedGeneration", 0)),
        failure=failure.get("message", "") if failure.get("status") == "True" else "",
        controller=controller(obj),
        owners=field_owners(obj),
        labels=labels_of(obj),
        labelled=names.has_labels(obj, labels),
    )

"""Finds why a pod does not start, from what Kubernetes reports. One function per cause, in the order of a chain."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..api.reasons import Reason
from ..observe.model import ObservedPod
from .chain import Rule, Violation, first_violation

IMAGE_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
CONFIG_REASONS = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError"}

_NOT_FOUND = re.compile(
    r"(?P<kind>secrets?|configmaps?|serviceaccounts?|persistentvolumeclaims?|priorityclass(?:es)?(?:\.scheduling\.k8s\.io)?)"
    r"\s+\"(?P<name>[^\"]+)\"\s+not found",
    re.IGNORECASE,
)
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*": (ErrImagePull: )?')

_SINGULAR = {
    "secret": "Secret",
    "configmap": "ConfigMap",
    "serviceaccount": "ServiceAccount",
    "persistentvolumeclaim": "PersistentVolumeClaim",
    "priorityclass": "PriorityClass",
}


@dataclass(frozen=True, slots=True)
class PodFacts:
    """A desired pod, or why Kubernetes could not create it."""

    owner: str
    """Name of the workload, for messages."""
    pod: ObservedPod | None
    create_error: str = ""


def missing_reference(facts: PodFacts) -> Violation | None:
    """A Secret, ConfigMap, service account or claim that the template names does not exist."""
    for text in _texts(facts):
        match = _NOT_FOUND.search(text)
        if match:
            kind = _kind(match["kind"])
            reason = Reason.MISSING_SECRET if kind == "Secret" else Reason.MISSING_REFERENCE
            return Violation(
                reason, f"{facts.owner}: {kind} {match['name']} does not exist; create it or fix the template"
            )
    return None


def rejected(facts: PodFacts) -> Violation | None:
    """Kubernetes refuses to create the pod: admission, quota, pod security."""
    if facts.pod is None and facts.create_error:
        return Violation(Reason.POD_REJECTED, f"{facts.owner}: {facts.create_error}")
    return None


def image_not_pulled(facts: PodFacts) -> Violation | None:
    """The image does not exist, or may not be pulled."""
    pod = facts.pod
    if pod is None or pod.waiting_reason not in IMAGE_REASONS:
        return None
    # The kubelet alternates between the error and a back-off that quotes it.
    why = _BACK_OFF.sub("", pod.waiting_message) or pod.waiting_reason
    return Violation(Reason.IMAGE_PULL_FAILED, f"{pod.name} cannot pull its image: {why}")


def configured_wrongly(facts: PodFacts) -> Violation | None:
    """The runtime cannot make the container as the template says."""
    return _waiting(facts, CONFIG_REASONS, Reason.CONTAINER_CONFIG_INVALID)


def crash_looping(facts: PodFacts) -> Violation | None:
    """A container ends again and again."""
    pod = facts.pod
    if pod is None or not pod.keeps_ending:
        return None
    end = f" ({pod.last_end})" if pod.last_end else ""
    where = f"{pod.name} -c {pod.waiting_container}" if pod.waiting_container else pod.name
    message = f"{pod.name} keeps ending{end}; see kubectl logs --previous {where}"
    return Violation(Reason.CRASH_LOOP, message)


def unschedulable(facts: PodFacts) -> Violation | None:
    """No node takes the pod."""
    if facts.pod is not None and facts.pod.unschedulable:
        return Violation(Reason.UNSCHEDULABLE, f"{facts.pod.name}: {facts.pod.unschedulable}")
    return None


POD_CHAIN: Sequence[Rule[PodFacts]] = (
    missing_reference,
    rejected,
    image_not_pulled,
    configured_wrongly,
    crash_looping,
    unschedulable,
)


def pod_trouble(pods: Sequence[PodFacts]) -> Violation | None:
    """Return the first cause that keeps a pod from starting, with the number of other pods that have problems."""
    troubles = [
        trouble for facts in pods if _may_have_trouble(facts) and (trouble := first_violation(POD_CHAIN, facts))
    ]
    if not troubles:
        return None
    first = troubles[0]
    more = f" ({len(troubles) - 1} more have problems)" if len(troubles) > 1 else ""
    return Violation(first.reason, first.message + more)


def _may_have_trouble(facts: PodFacts) -> bool:
    return facts.pod is None or not (facts.pod.ready or facts.pod.terminating)


def _waiting(facts: PodFacts, reasons: set[str], reason: Reason) -> Violation | None:
    pod = facts.pod
    if pod is None or pod.waiting_reason not in reasons:
        return None
    detail = f": {pod.waiting_message}" if pod.waiting_message else ""
    return Violation(reason, f"{pod.name}: {pod.waiting_reason}{detail}")


def _texts(facts: PodFacts) -> tuple[str, ...]:
    if facts.pod is None:
        return (facts.create_error,)
    return facts.pod.waiting_message, *facts.pod.warnings, facts.pod.unschedulable


def _kind(word: str) -> str:
    word = word.lower().partition(".")[0]
    return next((kind for singular, kind in _SINGULAR.items() if word.startswith(singular)), word)

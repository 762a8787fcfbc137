"""The Secret with keys, which the operator applies and never reads: whether it stands as it was applied.

Two things show it: an annotation of the Service that was applied after it, and containers that wait for it.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from ..api import names
from . import parse
from .model import ObservedObject, ObservedPod
from .parse import Object

SECRET_MISSED_AFTER = timedelta(seconds=10)
"""Age from which a container that is not created yet may lack its Secret."""


def applied_keys(
    service: Object | None, pods: Iterable[ObservedPod | None], now: datetime
) -> tuple[ObservedObject, ...]:
    """Return the Secret as it was applied before this Service of a pool or router, or nothing.

    There is nothing without the annotation, or while one of the pods may lack the Secret.
    """
    applied = parse.annotation(service, names.ANNOTATION_KEYS_HASH) if service is not None else ""
    if not applied or any(pod is not None and _lacks_volume(pod, now) for pod in pods):
        return ()
    return (ObservedObject("Secret", names.KEYS_SECRET, uid="", controller_uid="", build_hash=applied),)


def _lacks_volume(pod: ObservedPod, now: datetime) -> bool:
    """Whether a container has waited so long that a Secret may be missing."""
    return pod.waiting_reason == "ContainerCreating" and now - pod.created_at > SECRET_MISSED_AFTER

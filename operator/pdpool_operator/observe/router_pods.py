"""Finds the router pods of a service that really are its own, so that no other pod is sent the routers' key.

A pod is the service's own if its controllers are a ReplicaSet, the service's Deployment, and the service itself. Only
the UIDs of these objects count: labels and names can be copied.
"""

from collections.abc import Iterable

from . import parse
from .parse import Object


def own_pods(
    service_uid: str, deployment: Object | None, replica_sets: Iterable[Object], pods: Iterable[Object]
) -> list[Object]:
    """Return the pods whose chain of controllers ends at the service. Without a Deployment there are none."""
    if deployment is None or parse.controller_uid(deployment) != service_uid:
        return []
    above = deployment["metadata"]["uid"]
    sets = {one["metadata"]["uid"] for one in replica_sets if parse.controller_uid(one) == above}
    return [pod for pod in pods if parse.controller_uid(pod) in sets]

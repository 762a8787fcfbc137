"""The algorithm of kstatus for custom resources (cli-utils, pkg/kstatus/status: generic.go and core.go)."""

from pdpool_operator.api.base import Metadata
from pdpool_operator.api.pools import PoolStatus
from pdpool_operator.api.services import DisaggregatedServiceStatus

Status = PoolStatus | DisaggregatedServiceStatus


def kstatus(metadata: Metadata, status: Status) -> str:
    """Return what Flux and `helm --wait` conclude from an object."""
    if metadata.deletion_timestamp is not None:
        return "Terminating"
    if status.observed_generation != metadata.generation:
        return "InProgress"
    for condition in status.conditions:
        if condition.type == "Reconciling" and condition.status == "True":
            return "InProgress"
        if condition.type == "Stalled" and condition.status == "True":
            return "Failed"
    ready = [condition for condition in status.conditions if condition.type == "Ready"]
    return "Current" if not ready or ready[0].status == "True" else "InProgress"


def kubectl_wait(metadata: Metadata, status: Status, kind: str) -> bool:
    """Return whether `kubectl wait --for=condition=KIND` ends: conditions of an earlier generation do not count."""
    return any(
        condition.type == kind and condition.status == "True" and condition.observed_generation >= metadata.generation
        for condition in status.conditions
    )

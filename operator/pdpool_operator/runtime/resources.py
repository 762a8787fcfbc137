"""Resources of the Kubernetes API, and objects as the API server stores them: plain dicts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ..api import names
from ..api.operations import PoolOperation
from ..api.pools import DecodePool, PrefillPool
from ..api.services import DisaggregatedService

Object = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    """A resource of the API."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """Return `group/version`, or the version alone for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path. Without a namespace it is that of the whole cluster."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part is not None]
        return "/" + "/".join(quote(part, safe="") for part in parts)


PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
NODES = Resource("", "v1", "nodes", "Node")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
OPENAPI = Resource("", "v3", "openapi", "OpenAPI")
"""Names the API server's description of itself in metrics. Every authenticated user may read it."""

PREFILL_POOLS = Resource(names.GROUP, names.VERSION, PrefillPool.plural, "PrefillPool")
DECODE_POOLS = Resource(names.GROUP, names.VERSION, DecodePool.plural, "DecodePool")
SERVICES_PD = Resource(names.GROUP, names.VERSION, DisaggregatedService.plural, DisaggregatedService.kind)
OPERATIONS = Resource(names.GROUP, names.VERSION, PoolOperation.plural, PoolOperation.kind)
POOL_RESOURCES = {PrefillPool: PREFILL_POOLS, DecodePool: DECODE_POOLS}


def controller_of(obj: Mapping[str, Any]) -> Object:
    """Return the reference to the object's controlling owner. Empty if it has none."""
    owners = obj["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), {})

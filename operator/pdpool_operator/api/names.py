"""Names, labels, annotations and ports of everything that the operator creates.

Builders, observers and tests take each name from one function or constant here. Derived names cannot collide. Each one
ends in a role, or in a role and an instance number, so it can be parsed in only one way.
"""

import itertools
import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, Final

GROUP: Final = "pdpool.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

FIELD_MANAGER: Final = "pdpool"
STATUS_FIELD_MANAGER: Final = "pdpool-status"

# DNS labels have at most 63 characters. The longest suffix is "-prefill-255" plus "-0" for the pod, plus a controller
# revision hash of 11 characters in a pod label. So 40 + 12 + 11 = 63.
MAX_NAME_LENGTH: Final = 40
NAME_PATTERN: Final = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Pattern of the names of pools and services. Kubernetes Services are named after them."""

INSTANCE_PATTERN: Final = (
    "^(?P<pool>[a-z]([-a-z0-9]*[a-z0-9])?)-(?P<role>prefill|decode)-(?P<index>0|[1-9][0-9]{0,2})(-0)?$"
)
"""Pattern of the names of instances, `chat-prefill-0`, and of their pods, `chat-prefill-0-0`."""

LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_PART_OF: Final = "app.kubernetes.io/part-of"
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_POOL: Final = f"{GROUP}/pool"
LABEL_SERVICE: Final = f"{GROUP}/service"
LABEL_INSTANCE: Final = f"{GROUP}/instance"
LABEL_REACHABLE: Final = f"{GROUP}/reachable"
"""Of a router's pod: "true" or "false". Its Service lists only reachable ones."""
MANAGED_BY: Final = "pdpool"
SELECT_MADE: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
"""Selector of everything that the operator creates, including the pods of its workloads."""

ANNOTATION_SPEC_HASH: Final = f"{GROUP}/spec-hash"
"""On workloads and pods: hash of the user's spec from which they were built, without the number of replicas."""
ANNOTATION_BUILD_HASH: Final = f"{GROUP}/build-hash"
"""On every created object: hash of what the builder rendered. For a workload it covers the pod template."""
ANNOTATION_DRAIN_STARTED: Final = f"{GROUP}/drain-started"
"""On an instance's StatefulSet: RFC 3339 time at which its drain began."""
ANNOTATION_DRAIN_REASON: Final = f"{GROUP}/drain-reason"
"""On an instance's StatefulSet: reason of the drain, a `DrainReason`."""

ANNOTATION_AVOID_NODE: Final = f"{GROUP}/avoid-node"
"""On an instance's StatefulSet: name of the node that its next pod avoids if it can."""

ANNOTATION_KEY_EPOCH: Final = f"{GROUP}/key-epoch"
"""On engine and router pods: epochs of their keys, `KeyEpochs`."""

ANNOTATION_KEYS_HASH: Final = f"{GROUP}/keys-hash"
"""On the Service of a pool or router: hash of the Secret with the keys. The Secret is applied before the Service, and
the operator does not read it.
"""

ANNOTATION_HISTORY_FROM: Final = f"{GROUP}/history-from"
"""On the operator's Lease: resourceVersion from which the next leader reads the history of pods."""

ANNOTATION_RESTARTED_AT: Final = f"{GROUP}/restarted-at"
"""Set by users on a pool or service, to any new value. The operator then replaces its pods one by one, and adopts what
a newer operator builds.
"""

ENGINE_CONTAINER: Final = "engine"
ROUTER_CONTAINER: Final = "router"

ENGINE_HTTP_PORT: Final = 30000
BOOTSTRAP_PORT: Final = 8998
CONTROL_PORT: Final = 8999
ADMIN_PORT: Final = 9400
ROUTER_HTTP_PORT: Final = 8000
ROUTER_METRICS_PORT: Final = 29000

RUN_DIRECTORY: Final = "/run/pdpool"
ADMIN_SOCKET: Final = f"{RUN_DIRECTORY}/admin.sock"
FLIGHT_DIRECTORY: Final = f"{RUN_DIRECTORY}/flights"
ROUTER_CONFIG_DIRECTORY: Final = "/etc/pdpool"
WORKERS_KEY: Final = "workers.json"
KEYS_SECRET: Final = "pdpool-keys"  # noqa: S105 - a name
"""The one Secret of each namespace with pools. Its name is fixed, so that the operator's rights can name it."""
KEYS_DIRECTORY: Final = "/etc/pdpool/keys"
ROUTER_KEYS_DIRECTORY: Final = "/etc/pdpool-keys"


class Role(StrEnum):
    """Role of a pod. Value of the label `pdpool.dev/role`."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


ENGINE_ROLES: Final = (Role.PREFILL, Role.DECODE)


def pool_workload(pool: str, role: Role) -> str:
    """Name of the pool's headless Service and PodDisruptionBudget: `chat-prefill`."""
    return f"{pool}-{role}"


def instance(pool: str, role: Role, index: int) -> str:
    """Name of an instance's StatefulSet: `chat-prefill-0`."""
    return f"{pool}-{role}-{index}"


def free_indexes(taken: Collection[int], count: int) -> tuple[int, ...]:
    """Indexes of new instances: the lowest that are not taken."""
    return tuple(itertools.islice((index for index in itertools.count() if index not in taken), max(0, count)))


def parse_instance(name: str) -> tuple[str, Role, int] | None:
    """Return pool, role and index of an instance, from its name or that of its pod. None if it is neither."""
    found = re.fullmatch(INSTANCE_PATTERN, name)
    return (found["pool"], Role(found["role"]), int(found["index"])) if found else None


def instance_selector(pool: str, role: Role, index: int) -> dict[str, str]:
    """Labels by which an instance's StatefulSet selects its pods."""
    return {**pool_selector(pool, role), LABEL_INSTANCE: str(index)}


def router(service: str) -> str:
    """Name of the router's Deployment, Service, PodDisruptionBudget, NetworkPolicy and ConfigMap: `chat-router`."""
    return f"{service}-router"


def curve_file(epochs: object) -> str:
    """Name of the file with the CURVE keys of these epochs: `curve-2-1.json`."""
    return f"curve-{epochs}.json"


def operator_file(epoch: int) -> str:
    """Name of the file with the operator's public key of one epoch: `operator-2.pem`."""
    return f"operator-{epoch}.pem"


def router_file(epoch: int) -> str:
    """Name of the file with the key of the routers' control endpoints of one epoch: `router-2.key`."""
    return f"router-{epoch}.key"


def pool_selector(pool: str, role: Role) -> dict[str, str]:
    """Labels that select exactly the pods of one pool."""
    return {LABEL_POOL: pool, LABEL_ROLE: str(role)}


def engine_selector(role: Role) -> dict[str, str]:
    """Labels that select the engine pods of one role in a namespace."""
    return {LABEL_MANAGED_BY: MANAGED_BY, LABEL_ROLE: str(role)}


def pool_labels(pool: str, role: Role) -> dict[str, str]:
    """Labels of every object of a pool."""
    return {LABEL_MANAGED_BY: MANAGED_BY, LABEL_PART_OF: pool, **pool_selector(pool, role)}


def instance_labels(pool: str, role: Role, index: int) -> dict[str, str]:
    """Labels of an instance's StatefulSet and of its pods."""
    return {**pool_labels(pool, role), LABEL_INSTANCE: str(index)}


def router_selector(service: str) -> dict[str, str]:
    """Labels that select exactly the router pods of one service."""
    return {LABEL_SERVICE: service, LABEL_ROLE: str(Role.ROUTER)}


def router_endpoints(service: str) -> dict[str, str]:
    """Labels by which the Service of a router selects the pods that clients are sent to. New pods have them."""
    return {**router_selector(service), LABEL_REACHABLE: "true"}


def router_labels(service: str) -> dict[str, str]:
    """Labels of every object of a service's router."""
    return {LABEL_MANAGED_BY: MANAGED_BY, LABEL_PART_OF: service, **router_selector(service)}


def selector_string(labels: dict[str, str]) -> str:
    """Labels as a selector, in the form of query parameters and of `status.selector`."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def has_labels(obj: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether an object of the API has all of these labels."""
    present = obj["metadata"].get("labels") or {}
    return all(present.get(key) == value for key, value in labels.items())


def engine_url(pod_ip: str, port: int = ENGINE_HTTP_PORT) -> str:
    """URL under which routers and the operator reach an engine. IPv6 addresses are put in brackets."""
    return f"http://{_bracketed(pod_ip)}:{port}"


def admin_url(pod_ip: str, rank: int = 0) -> str:
    """URL of the admin endpoint of one rank's connector."""
    return f"http://{_bracketed(pod_ip)}:{ADMIN_PORT + rank}"


def router_url(pod_ip: str) -> str:
    """URL of one router replica's control endpoints."""
    return f"http://{_bracketed(pod_ip)}:{ROUTER_HTTP_PORT}"


def router_metrics_url(pod_ip: str) -> str:
    """URL of a router pod's metrics."""
    return f"http://{_bracketed(pod_ip)}:{ROUTER_METRICS_PORT}/metrics"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address

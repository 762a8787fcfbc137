"""RDMA in a pod: device, networks, placement, locked memory, and the environment of each fabric."""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from ..api.names import ENGINE_CONTAINER
from ..api.rdma import Memlock, RdmaMode, RdmaSpec
from .template import ENGINE_PATH, ROOT, TemplateInvalid, object_at

NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"


class Fabric(StrEnum):
    """Kind of network behind a device resource, as far as its name shows."""

    INFINIBAND = "InfiniBand"
    ROCE = "RoCE"
    EFA = "EFA"
    SHARED = "shared"
    """A device plugin that shares host devices, or an unknown one. InfiniBand and RoCE are both possible."""


FABRICS: tuple[tuple[str, Fabric], ...] = (
    ("vpc.amazonaws.com/efa", Fabric.EFA),
    ("rdma/ib", Fabric.INFINIBAND),
    ("networking.gke.io.networks/rdma-", Fabric.ROCE),
    ("vke.volcengine.com/rdma", Fabric.ROCE),
)
"""Beginnings of resource names. Every other resource is `SHARED`."""

_UCX = {
    # UCX's cache of memory types does not see the memory of torch's allocator, and then takes device for host memory.
    "UCX_MEMTYPE_CACHE": "n",
}
_ROCE = {
    # Pods of one fabric may have addresses of different subnets.
    "UCX_IB_ROCE_REACHABILITY_MODE": "all",
    # RoCE v2 over IPv4. The first entries of the table are link-local and RoCE v1.
    "UCX_IB_GID_INDEX": "3",
    "MC_GID_INDEX": "3",
}
_EFA = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    # libfabric's shared memory needs a PID namespace in common, which pods do not have.
    "FI_EFA_ENABLE_SHM_TRANSFER": "0",
    # For transfer.connector Native: NIXL's own backend for EFA.
    "SGLANG_DISAGGREGATION_NIXL_BACKEND": "LIBFABRIC",
}
ENVIRONMENT: Mapping[Fabric, Mapping[str, str]] = {
    Fabric.INFINIBAND: _UCX,
    Fabric.ROCE: _UCX | _ROCE,
    Fabric.EFA: _EFA,
    Fabric.SHARED: _UCX,
}
"""Variables of UCX (NIXL), Mooncake (`MC_`) and libfabric (`FI_`). None forbids TCP: without it, NIXL cannot start."""

OFF = {"UCX_TLS": "^ib", "MC_FORCE_TCP": "1"}

ROOT_WITH_IPC_LOCK = {
    "runAsUser": 0,
    "runAsNonRoot": False,
    "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
}


def fabric_of(resource: str) -> Fabric:
    """Return the fabric behind a device resource."""
    return next((fabric for beginning, fabric in FABRICS if resource.startswith(beginning)), Fabric.SHARED)


def rdma_environment(rdma: RdmaSpec | None) -> list[dict[str, Any]]:
    """Return the variables of the engine's container. A template may set others."""
    if rdma is None:
        return []
    values = OFF if rdma.mode is RdmaMode.OFF or rdma.resource is None else ENVIRONMENT[fabric_of(rdma.resource)]
    return [{"name": name, "value": value} for name, value in values.items()]


def with_rdma(template: dict[str, Any], user: Mapping[str, Any], rdma: RdmaSpec | None) -> dict[str, Any]:
    """Return a merged pod template with device, networks, placement and locked memory.

    Args:
        template: our template with the user's merged in.
        user: `spec.template`, which was merged without an error.
        rdma: `spec.rdma`.

    Raises:
        TemplateInvalid: the user's template contradicts `spec.rdma`.
    """
    if rdma is None or rdma.resource is None:
        return template
    spec = template["spec"]
    engine, *others = spec["containers"]
    engine = _with_device(engine, rdma.resource, rdma.count)
    if rdma.memlock is Memlock.CAPABILITY:
        engine = _as_root_with_ipc_lock(engine, _user_engine(user))
    spec = {**spec, "containers": [engine, *others]}
    if rdma.node_selector:
        given = object_at(spec.get("nodeSelector"), f"{ROOT}.spec.nodeSelector")
        spec["nodeSelector"] = _node_selector(given, rdma.node_selector)
    return {"metadata": _with_networks(template["metadata"], rdma.networks), "spec": spec}


def _with_device(engine: dict[str, Any], resource: str, count: int) -> dict[str, Any]:
    path = f"{ENGINE_PATH}.resources"
    resources = object_at(engine.get("resources"), path)
    for kind in ("limits", "requests"):
        amounts = object_at(resources.get(kind), f"{path}.{kind}")
        if resource in amounts and str(amounts[resource]) != str(count):
            raise TemplateInvalid(
                f"{path}.{kind}[{resource}]", amounts[resource], f"spec.rdma.count is {count}; remove it here"
            )
    # Kubernetes copies the limit of an extended resource into the request.
    return {**engine, "resources": {**resources, "limits": {**(resources.get("limits") or {}), resource: count}}}


def _as_root_with_ipc_lock(engine: dict[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    given = user.get("securityContext") or {}
    for key, value in ROOT_WITH_IPC_LOCK.items():
        if key in given and given[key] != value:
            raise TemplateInvalid(
                f"{ENGINE_PATH}.securityContext.{key}", given[key], "spec.rdma.memlock Capability sets this; remove it"
            )
    return {**engine, "securityContext": {**engine["securityContext"], **ROOT_WITH_IPC_LOCK}}


def _node_selector(given: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    for label, value in ours.items():
        if label in given and given[label] != value:
            raise TemplateInvalid(
                f"{ROOT}.spec.nodeSelector[{label}]",
                given[label],
                f"spec.rdma.nodeSelector says {value!r}; remove it here",
            )
    return {**given, **ours}


def _with_networks(metadata: dict[str, Any], networks: tuple[str, ...]) -> dict[str, Any]:
    if not networks:
        return metadata
    annotations = metadata.get("annotations") or {}
    if NETWORKS_ANNOTATION in annotations:
        raise TemplateInvalid(
            f"{ROOT}.metadata.annotations[{NETWORKS_ANNOTATION}]",
            annotations[NETWORKS_ANNOTATION],
            "spec.rdma.networks sets this; name all networks there",
        )
    listed = json.dumps([_reference(network) for network in networks])
    return {**metadata, "annotations": {**annotations, NETWORKS_ANNOTATION: listed}}


def _reference(network: str) -> dict[str, str]:
    namespace, _, name = network.rpartition("/")
    return {"name": name, "namespace": namespace} if namespace else {"name": name}


def _user_engine(user: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = (user.get("spec") or {}).get("containers") or ()
    return next((container for container in containers if container["name"] == ENGINE_CONTAINER), {})

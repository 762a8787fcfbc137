"""Shared parts of all builders: metadata with owner, the restricted security profile, and hashes."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..api import names
from ..api.base import Model, Resource

USER_ID = 65532
"""User and group of all containers: `nonroot`, as in distroless images."""

TERMINATION_MARGIN_S = 30
"""Added to the drain timeout. It leaves time for the process to exit after SIGTERM and for the kubelet's bookkeeping.
"""


def content_hash(content: object) -> str:
    """Return 16 hex digits: a hash of JSON-like content that does not depend on the order of keys."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def spec_hash(owner: Resource, spec: Model, *, without: frozenset[str]) -> str:
    """Return a hash of the part of the user's spec that shapes the pods.

    Values that equal their default are left out. So a field that a newer API version adds changes no hash and restarts
    no pod. The annotation `pdpool.dev/restarted-at` counts, so users can request new pods without another change.
    """
    wanted = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=set(without))
    restarted_at = owner.metadata.annotations.get(names.ANNOTATION_RESTARTED_AT)
    return content_hash([wanted, restarted_at] if restarted_at else [wanted])


def metadata(
    owner: Resource, kind: str, name: str, labels: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Metadata of an object that its owner controls. Kubernetes deletes the object with its owner."""
    result: dict[str, Any] = {
        "name": name,
        "namespace": owner.metadata.namespace,
        "labels": dict(labels),
        "ownerReferences": [owner_reference(owner, kind)],
    }
    if annotations:
        result["annotations"] = dict(annotations)
    return result


def owner_reference(owner: Resource, kind: str) -> dict[str, Any]:
    """Reference that makes the owner the controller of an object."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": kind,
        "name": owner.metadata.name,
        "uid": owner.metadata.uid,
        "controller": True,
    }


def with_build_hash(obj: dict[str, Any]) -> dict[str, Any]:
    """Return the object with the hash of its own content as an annotation."""
    annotations = {**obj["metadata"].get("annotations", {}), names.ANNOTATION_BUILD_HASH: content_hash(obj)}
    return {**obj, "metadata": {**obj["metadata"], "annotations": annotations}}


def pod_security_context() -> dict[str, Any]:
    """Pod-level part of the `restricted` profile."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context() -> dict[str, Any]:
    """Container-level part of the `restricted` profile, with a read-only root file system."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def http_probe(path: str, port: str, *, period_s: int, timeout_s: int, failures: int) -> dict[str, Any]:
    """An HTTP probe on a named port."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def disruption_budget(
    owner: Resource, kind: str, name: str, labels: Mapping[str, str], selector: Mapping[str, str]
) -> dict[str, Any]:
    """PodDisruptionBudget: one pod at a time. A pod that is not ready never blocks the drain of its node."""
    return with_build_hash(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(owner, kind, name, labels),
            "spec": {
                "maxUnavailable": 1,
                "selector": {"matchLabels": dict(selector)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
    )

"""Shared parts of all builders: metadata with owner, the restricted security profile, and hashes."""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..api import names
from ..api.base import Model, Resource
from ..api.key_epochs import FIRST_KEYS, KeyEpochs

USER_ID = 65532
"""User and group of all containers: `nonroot`, as in distroless images."""

KEYS_MODE = 0o440

TERMINATION_MARGIN_S = 30
"""Added to the drain timeout. It leaves time for the process to exit after SIGTERM and for the kubelet's bookkeeping.
"""


def content_hash(content: object) -> str:
    """Return 16 hex digits: a hash of JSON-like content that does not depend on the order of keys."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def spec_hash(owner: Resource, spec: Model, *, without: frozenset[str], keys: KeyEpochs = FIRST_KEYS) -> str:
    """Return a hash of what replaces the pods when it changes: the user's spec, a requested restart, the keys' epochs.

    Values that equal their default are left out. So a field that a newer API version adds changes no hash and restarts
    no pod. The annotation `pdpool.dev/restarted-at` counts, so users can request new pods without another change.
    """
    wanted = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=set(without))
    restarted_at = owner.metadata.annotations.get(names.ANNOTATION_RESTARTED_AT)
    rotated = [{"keys": str(keys)}] if keys != FIRST_KEYS else []
    return content_hash([wanted, restarted_at, *rotated] if restarted_at else [wanted, *rotated])


def metadata(
    owner: Resource, name: str, labels: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Metadata of an object that its owner controls. Kubernetes deletes the object with its owner."""
    result: dict[str, Any] = {
        "name": name,
        "namespace": owner.metadata.namespace,
        "labels": dict(labels),
        "ownerReferences": [owner_reference(owner)],
    }
    if annotations:
        result["annotations"] = dict(annotations)
    return result


def owner_reference(owner: Resource) -> dict[str, Any]:
    """Reference that makes the owner the controller of an object."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": owner.kind,
        "name": owner.metadata.name,
        "uid": owner.metadata.uid,
        "controller": True,
    }


def with_build_hash(obj: dict[str, Any]) -> dict[str, Any]:
    """Return the object with the hash of its own content as an annotation."""
    annotations = {**obj["metadata"].get("annotations", {}), names.ANNOTATION_BUILD_HASH: content_hash(obj)}
    return {**obj, "metadata": {**obj["metadata"], "annotations": annotations}}


def keys_secret(namespace: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """The namespace's Secret with the keys of its engines and routers.

    It has no owner, since all pools and services of the namespace share it.
    """
    return with_build_hash(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": names.KEYS_SECRET,
                "namespace": namespace,
                "labels": {names.LABEL_MANAGED_BY: names.MANAGED_BY},
            },
            "type": "Opaque",
            "data": {file: base64.b64encode(text.encode()).decode() for file, text in sorted(keys.items())},
        }
    )


def keys_hash(secret: Mapping[str, Any]) -> dict[str, str]:
    """Annotation that records the Secret as it was applied."""
    return {names.ANNOTATION_KEYS_HASH: secret["metadata"]["annotations"][names.ANNOTATION_BUILD_HASH]}


def keys_volume(files: Mapping[str, str]) -> dict[str, Any]:
    """Volume with some files of the Secret. `files` maps each file of the Secret to its path in the volume."""
    items = [{"key": file, "path": path} for file, path in sorted(files.items())]
    return {
        "name": "pdpool-keys",
        "secret": {"secretName": names.KEYS_SECRET, "defaultMode": KEYS_MODE, "items": items},
    }


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


def spread_over_nodes(selector: dict[str, str]) -> list[dict[str, Any]]:
    """Constraints by which pods of one selector prefer different nodes, so that a lost node leaves some of them.

    A preference: where nodes are few, pods share one.
    """
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector},
        }
    ]


def http_probe(path: str, port: str, *, period_s: int, timeout_s: int, failures: int) -> dict[str, Any]:
    """An HTTP probe on a named port."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def disruption_budget(
    owner: Resource, name: str, labels: Mapping[str, str], selector: Mapping[str, str]
) -> dict[str, Any]:
    """PodDisruptionBudget: one pod at a time. A pod that is not ready never blocks the drain of its node."""
    return with_build_hash(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(owner, name, labels),
            "spec": {
                "maxUnavailable": 1,
                "selector": {"matchLabels": dict(selector)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
    )

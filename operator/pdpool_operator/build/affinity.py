"""Lets the next pod of an instance prefer other nodes than one.

It is a preference, not a requirement: where no other node has room, the pod starts on that node again. A requirement
would leave it without a node. The scheduler adds preferences up. So a pod that avoids a node does not also prefer one
without siblings: that may be the node to avoid.
"""

from collections.abc import Mapping
from typing import Any

from .template import ROOT, list_at, object_at

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
HIGHEST_WEIGHT = 100


def avoiding(pod_spec: Mapping[str, Any], node: str) -> dict[str, Any]:
    """Return the spec of a pod that prefers every other node to this one. Other affinity of the user still counts.

    Raises:
        TemplateInvalid: the affinity of the user's template is malformed.
    """
    path = f"{ROOT}.spec.affinity"
    affinity = object_at(pod_spec.get("affinity"), path)
    for_nodes = object_at(affinity.get("nodeAffinity"), f"{path}.nodeAffinity")
    preferred = list_at(for_nodes.get(PREFERRED), f"{path}.nodeAffinity.{PREFERRED}")
    # The node's name, because the label kubernetes.io/hostname may differ from it.
    other = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [node]}]}
    preferred = [*preferred, {"weight": HIGHEST_WEIGHT, "preference": other}]
    spec = {**pod_spec, "affinity": {**affinity, "nodeAffinity": {**for_nodes, PREFERRED: preferred}}}
    spread = list_at(pod_spec.get("topologySpreadConstraints"), f"{ROOT}.spec.topologySpreadConstraints")
    if spread:
        spec["topologySpreadConstraints"] = [one for one in spread if not _is_preference(one)]
    return spec


def _is_preference(constraint: object) -> bool:
    return isinstance(constraint, dict) and constraint.get("whenUnsatisfiable") == "ScheduleAnyway"

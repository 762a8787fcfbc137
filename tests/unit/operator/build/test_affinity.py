"""A pod that avoids a node: what the user prefers still counts, and no hash covers it."""

from typing import Any

import pytest
from pdpool_operator.api import names
from pdpool_operator.build.affinity import PREFERRED
from pdpool_operator.build.pool import instance_stateful_set
from pdpool_operator.build.template import TemplateInvalid

from tests.unit.operator.plan.makers import SETTINGS, make_pool

SOFT = {"whenUnsatisfiable": "ScheduleAnyway"}
OTHER_NODES = {
    "weight": 100,
    "preference": {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-b"]}]},
}


def built(affinity: object, avoid_node: str = "node-b") -> dict[str, Any]:
    pool = make_pool(template={"spec": {} if affinity is None else {"affinity": affinity}})
    return instance_stateful_set(pool, 0, SETTINGS, avoid_node=avoid_node)


def affinity_of(stateful_set: dict[str, Any]) -> Any:
    return stateful_set["spec"]["template"]["spec"].get("affinity")


def test_pod_prefers_other_nodes() -> None:
    assert affinity_of(built(None)) == {"nodeAffinity": {PREFERRED: [OTHER_NODES]}}
    assert affinity_of(built(None, avoid_node="")) is None


def test_affinity_of_the_user_still_counts() -> None:
    theirs = {
        "podAntiAffinity": {"x": 1},
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"y": 2}, PREFERRED: [{"weight": 3}]},
    }
    assert affinity_of(built(theirs)) == {
        "podAntiAffinity": {"x": 1},
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"y": 2},
            PREFERRED: [{"weight": 3}, OTHER_NODES],
        },
    }
    assert affinity_of(built(theirs, avoid_node="")) == theirs


def test_no_hash_covers_the_avoided_node() -> None:
    with_node, without = built(None)["metadata"]["annotations"], built(None, avoid_node="")["metadata"]["annotations"]
    assert with_node == {**without, names.ANNOTATION_AVOID_NODE: "node-b"}


@pytest.mark.parametrize(
    ("affinity", "path"),
    [
        ("none", "spec.template.spec.affinity"),
        ({"nodeAffinity": []}, "spec.template.spec.affinity.nodeAffinity"),
        ({"nodeAffinity": {PREFERRED: {}}}, f"spec.template.spec.affinity.nodeAffinity.{PREFERRED}"),
    ],
)
def test_malformed_affinity_is_refused(affinity: object, path: str) -> None:
    with pytest.raises(TemplateInvalid) as refused:
        built(affinity)
    assert refused.value.field == path


def test_no_wish_for_a_node_without_siblings_outweighs_the_node_to_avoid() -> None:
    """Both are preferences. With the same weight, every other pod came back to the node that it was to avoid."""
    required = {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    mine = make_pool(template={"spec": {"topologySpreadConstraints": [required, required | SOFT]}})
    for pool, left in ((make_pool(), []), (mine, [required])):
        pod = instance_stateful_set(pool, 0, SETTINGS, avoid_node="node-b")["spec"]["template"]["spec"]
        assert pod["topologySpreadConstraints"] == left
        pod = instance_stateful_set(pool, 0, SETTINGS)["spec"]["template"]["spec"]
        assert len(pod["topologySpreadConstraints"]) == len(left) + 1

"""Edits of our objects show in the owners of their fields, as the API server keeps them."""

from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.observe.model import FieldOwners
from pdpool_operator.observe.parse import field_owners
from pdpool_operator.plan.objects import edited
from pdpool_operator.plan.pool import plan_pool

from tests.unit.operator.plan.makers import SETTINGS, T0, hashes, make_instance, make_observed, make_pod, make_pool

SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "chat-router", "labels": {"app": "x"}},
    "spec": {"selector": {"a": "1", "b": "2"}, "ports": [{"name": "http", "port": 8000, "targetPort": "http"}]},
}
PORT = 'k:{"port":8000,"protocol":"TCP"}'
# The API server keeps one owner for the whole selector of a Service: it is an atomic map.
ALL: dict[str, Any] = {
    "f:metadata": {"f:labels": {"f:app": {}}},
    "f:spec": {
        "f:selector": {},
        "f:ports": {PORT: {".": {}, "f:name": {}, "f:port": {}, "f:targetPort": {}}},
    },
}


def less(fields: dict[str, Any], *path: str) -> dict[str, Any]:
    """Return `fields` without those at `path`."""
    first, *rest = path
    below = {first: less(fields[first], *rest)} if rest else {}
    return {name: value for name, value in fields.items() if name != first} | below


@pytest.mark.parametrize(
    ("path", "theirs"),
    [
        (("f:spec", "f:selector"), {"f:spec": {"f:selector": {}}}),
        (("f:spec", "f:ports", PORT, "f:targetPort"), {"f:spec": {"f:ports": {PORT: {"f:targetPort": {}}}}}),
        (("f:metadata", "f:labels", "f:app"), {"f:metadata": {"f:labels": {"f:app": {}}}}),
    ],
)
def test_a_field_of_ours_that_somebody_else_owns_now_was_edited(path: tuple[str, ...], theirs: dict[str, Any]) -> None:
    assert edited(SERVICE, FieldOwners(less(ALL, *path), ({"f:metadata": {}}, theirs)))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ALL, {}),
        (ALL, {"f:metadata": {"f:annotations": {"f:somebody": {}}}}),
        (ALL, {"f:spec": {"f:sessionAffinity": {}}}),
        (ALL, {"f:spec": {"f:selector": {}}}),
        (less(ALL, "f:spec", "f:selector"), {}),
        ({}, {}),
    ],
    ids=[
        "nobody else",
        "an annotation of theirs",
        "a field that we do not set",
        "the same value, owned by both",
        "a field that the API server dropped",
        "nothing known",
    ],
)
def test_what_is_theirs_beside_ours_is_no_edit(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert not edited(SERVICE, FieldOwners(ours, (theirs,)))


ENGINE = 'k:{"name":"engine"}'


def template(engine: tuple[str, ...] = (), annotations: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return owned fields of a StatefulSet's template: of its container `engine`, and annotations."""
    containers = {ENGINE: {f"f:{name}": {} for name in engine}} if engine else {}
    fields = {
        "f:metadata": {"f:annotations": {f"f:{name}": {} for name in annotations}} if annotations else {},
        "f:spec": {"f:containers": containers} if containers else {},
    }
    return {"f:spec": {"f:template": {name: below for name, below in fields.items() if below}}}


OURS = ("pdpool.dev/spec-hash", "pdpool.dev/build-hash")
IMAGE_EDITED = FieldOwners(template(("name",), OURS), (template(("image",)),))
"""State after `kubectl set image`: we owned the image before."""
ROLLOUT_RESTART = FieldOwners(
    template(("name", "image"), OURS), (template(annotations=("kubectl.kubernetes.io/restartedAt",)),)
)


def test_an_edited_stateful_set_is_put_right_and_no_pod_is_touched() -> None:
    pool = make_pool(replicas=2)
    edited_one = make_instance(pool, 1, owners=IMAGE_EDITED)
    plan = plan_pool(make_observed(pool, make_instance(pool), edited_one), SETTINGS, T0)
    assert [obj["metadata"]["name"] for obj in plan.apply] == ["chat-prefill-1"]
    assert plan.apply[0]["spec"]["template"]["spec"]["containers"][0]["image"] == SETTINGS.engine_image
    assert (plan.patch, plan.delete, plan.progress) == ((), (), None)


def test_an_edit_is_put_right_also_while_the_pod_of_an_earlier_spec_is_still_there() -> None:
    pool = make_pool(rollout={"surge": "Never"})
    instance = make_instance(pool, owners=IMAGE_EDITED, pod=make_pod(spec_hash="earlier"))
    plan = plan_pool(make_observed(pool, instance), SETTINGS, T0)
    assert [obj["metadata"]["name"] for obj in plan.apply if obj["kind"] == "StatefulSet"] == ["chat-prefill-0"]


@pytest.mark.parametrize(
    "changes",
    [
        {"owners": ROLLOUT_RESTART},
        {"owners": IMAGE_EDITED, "build_hash": "of an earlier operator"},
    ],
    ids=["kubectl rollout restart", "built by an earlier operator"],
)
def test_what_is_no_edit_of_what_this_operator_made_is_left_alone(changes: dict[str, Any]) -> None:
    pool = make_pool()
    plan = plan_pool(make_observed(pool, replace(make_instance(pool), **changes)), SETTINGS, T0)
    assert not plan.acts


def managed(*entries: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """Return an object with these entries of `managedFields`: manager, operation, fields."""
    fields = [{"manager": who, "operation": how, "fieldsV1": what} for who, how, what in entries]
    return {"metadata": {"managedFields": fields}}


REPLICAS = {"f:spec": {"f:replicas": {}}}
TEMPLATE = {"f:spec": {"f:template": {}}}
DEPLOYMENT = {"spec": {"replicas": 2, "template": {"spec": {}}}}


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ((("pdpool", "Apply", TEMPLATE), ("pdpool", "Update", REPLICAS)), False),
        ((("pdpool", "Update", REPLICAS), ("pdpool", "Apply", TEMPLATE)), False),
        ((("pdpool", "Apply", TEMPLATE), ("kubectl", "Update", REPLICAS)), True),
        ((("pdpool", "Apply", TEMPLATE), ("pdpool", "Update", REPLICAS), ("hpa", "Apply", REPLICAS)), False),
        ((("pdpool", "Apply", REPLICAS), ("pdpool", "Update", {"f:metadata": {}}), ("x", "Update", TEMPLATE)), True),
    ],
    ids=["our patch", "our patch first", "another's patch", "the same value by another", "another's beside ours"],
)
def test_patch_of_the_operator_is_no_edit(entries: Any, found: bool) -> None:
    assert edited(DEPLOYMENT, field_owners(managed(*entries))) is found


@pytest.mark.parametrize(
    ("change", "applied"),
    [
        ({"build_hash": ""}, True),
        ({"spec_hash": ""}, True),
        ({"build_hash": "", "pod": make_pod(spec_hash=hashes(make_pool())[0], build_hash="earlier")}, False),
    ],
    ids=["build hash", "spec hash", "build hash, and another version built it"],
)
def test_removed_hash_is_applied_again_where_the_build_is_ours(change: dict[str, Any], applied: bool) -> None:
    pool = make_pool()
    plan = plan_pool(make_observed(pool, make_instance(pool, **change)), SETTINGS, T0)
    assert [obj["kind"] for obj in plan.apply] == ["StatefulSet"] * applied
    assert (plan.patch, plan.delete) == ((), ())

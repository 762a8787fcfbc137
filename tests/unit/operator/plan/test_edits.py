"""What others have changed of our objects is seen in who owns the fields, as the API server keeps it."""

from typing import Any

import pytest
from pdpool_operator.observe.model import FieldOwners
from pdpool_operator.plan.objects import edited

SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "chat-router", "labels": {"app": "x"}},
    "spec": {"selector": {"a": "1", "b": "2"}, "ports": [{"name": "http", "port": 8000, "targetPort": "http"}]},
}
PORT = 'k:{"port":8000,"protocol":"TCP"}'
ALL: dict[str, Any] = {
    "f:metadata": {"f:labels": {"f:app": {}}},
    "f:spec": {
        "f:selector": {"f:a": {}, "f:b": {}},
        "f:ports": {PORT: {".": {}, "f:name": {}, "f:port": {}, "f:targetPort": {}}},
    },
}


def less(fields: dict[str, Any], *path: str) -> dict[str, Any]:
    """`fields` without what is at `path`."""
    first, *rest = path
    below = {first: less(fields[first], *rest)} if rest else {}
    return {name: value for name, value in fields.items() if name != first} | below


@pytest.mark.parametrize(
    ("path", "theirs"),
    [
        (("f:spec", "f:selector", "f:a"), {"f:spec": {"f:selector": {"f:a": {}}}}),
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
        (ALL, {"f:spec": {"f:selector": {"f:zzz": {}}, "f:sessionAffinity": {}}}),
        (ALL, {"f:spec": {"f:selector": {"f:a": {}}}}),
        (less(ALL, "f:spec", "f:selector", "f:a"), {}),
        ({}, {}),
    ],
    ids=[
        "nobody else",
        "an annotation of theirs",
        "fields that we do not set",
        "the same value, owned by both",
        "a field that the API server dropped",
        "nothing known",
    ],
)
def test_what_is_theirs_beside_ours_is_no_edit(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert not edited(SERVICE, FieldOwners(ours, (theirs,)))

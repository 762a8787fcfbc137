import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pdpool_operator.api.crd import crds
from pdpool_operator.api.operations import PoolOperation
from pdpool_operator.api.pools import DecodePool, Pool, PrefillPool
from pdpool_operator.api.services import DisaggregatedService
from pdpool_operator.build.pool import instance_stateful_set
from pdpool_operator.build.router import router_deployment

from tests.unit.operator.plan.makers import SETTINGS

CHECKOUT = Path(__file__).parents[4]
EXAMPLES = sorted((CHECKOUT / "examples").glob("*.yaml"))
PAGES = sorted((CHECKOUT / "docs").rglob("*.md"))
YAML = re.compile(r"^ *```yaml\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
KINDS = {kind.kind: kind for kind in (PrefillPool, DecodePool, DisaggregatedService, PoolOperation)}
SCHEMAS = {
    definition["spec"]["names"]["kind"]: definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for definition in crds().values()
}


FREE = {"x-kubernetes-preserve-unknown-fields", "additionalProperties"}


def unknown_fields(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    if not isinstance(value, dict) or FREE & schema.keys():
        return []
    properties = schema.get("properties", {})
    found = [f"{path}.{key}" for key in value if key not in properties]
    return found + [
        f for key in value if key in properties for f in unknown_fields(value[key], properties[key], f"{path}.{key}")
    ]


def check(body: dict[str, Any]) -> None:
    assert unknown_fields(body["spec"], SCHEMAS[body["kind"]]["properties"]["spec"], "spec") == []
    made = {"uid": "u", "namespace": "llm", "creationTimestamp": "2026-01-01T00:00:00Z"}
    parsed = KINDS[body["kind"]].parse({**body, "metadata": {**body["metadata"], **made}})
    if isinstance(parsed, Pool):
        instance_stateful_set(parsed, 0, SETTINGS)
    if isinstance(parsed, DisaggregatedService):
        router_deployment(parsed, SETTINGS)


def objects(page: str) -> Iterator[dict[str, Any]]:
    """Yield the whole objects of pdpool in the YAML of a page. Values and parts of objects have no kind."""
    for block in YAML.findall(page):
        for body in yaml.safe_load_all(textwrap.dedent(block)):
            if isinstance(body, dict) and body.get("kind") in KINDS:
                yield body


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_and_have_no_field_that_would_be_dropped(file: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text("utf-8")))
    assert documents
    for body in documents:
        check(body)


def test_objects_of_the_documentation_are_valid() -> None:
    found = [(page.name, body) for page in PAGES for body in objects(page.read_text("utf-8"))]
    assert {body["kind"] for _, body in found} == set(KINDS)
    for _, body in found:
        check(body)

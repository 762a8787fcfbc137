from pathlib import Path
from typing import Any

import pytest
import yaml
from pdpool_operator.api.crd import crds
from pdpool_operator.api.pools import DecodePool, Pool, PrefillPool
from pdpool_operator.api.services import DisaggregatedService
from pdpool_operator.build.pool import instance_stateful_set
from pdpool_operator.build.router import router_deployment

from tests.unit.operator.plan.makers import SETTINGS

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*.yaml"))
KINDS = {kind.kind: kind for kind in (PrefillPool, DecodePool, DisaggregatedService)}
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


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_and_have_no_field_that_would_be_dropped(file: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text("utf-8")))
    assert documents
    for body in documents:
        assert unknown_fields(body["spec"], SCHEMAS[body["kind"]]["properties"]["spec"], "spec") == []
        body["metadata"] = {**body["metadata"], "uid": "u", "namespace": "llm"}
        parsed = KINDS[body["kind"]].parse(body)
        if isinstance(parsed, Pool):
            instance_stateful_set(parsed, 0, SETTINGS)
        if isinstance(parsed, DisaggregatedService):
            router_deployment(parsed, SETTINGS)

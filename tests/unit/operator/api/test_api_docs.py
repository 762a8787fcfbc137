"""The API reference has every field, and its examples are objects that the CRDs accept as they are."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pdpool_operator.api.api_docs import examples, fields, page
from pdpool_operator.api.crd import crds
from pdpool_operator.api.operations import PoolOperation
from pdpool_operator.api.pools import DecodePool, PrefillPool
from pdpool_operator.api.services import DisaggregatedService

KINDS = {kind.kind: kind for kind in (PrefillPool, DecodePool, DisaggregatedService, PoolOperation)}
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
}


def schema_of(kind: str) -> dict[str, Any]:
    (definition,) = (one for one in crds().values() if one["spec"]["names"]["kind"] == kind)
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def faults(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    """Return what the schema does not accept: types, unknown and missing fields, enums and bounds."""
    if not isinstance(value, TYPES[schema["type"]]):
        yield f"{path}: not of type {schema['type']}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{path}: {value} is not one of {schema['enum']}"
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{path}: {value} is out of bounds"
    if isinstance(value, dict) and "properties" in schema:
        yield from (f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            if name in schema["properties"]:
                yield from faults(schema["properties"][name], item, f"{path}.{name}")
            else:
                yield f"{path}.{name} is unknown"


@pytest.mark.parametrize("example", examples(), ids=lambda example: str(example["kind"]))
def test_example_fits_crd_and_model(example: dict[str, Any]) -> None:
    schema = schema_of(example["kind"])
    assert list(faults(schema["properties"]["spec"], example["spec"], "spec")) == []
    stamped = {**example["metadata"], "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    KINDS[example["kind"]].model_validate(example | {"metadata": stamped})


def test_unknown_and_wrong_fields_are_faults() -> None:
    spec = schema_of("PrefillPool")["properties"]["spec"]
    wrong = {"replicas": 999, "engine": {"type": "Other"}, "colour": "red"}
    assert len(list(faults(spec, wrong, "spec"))) == 4  # and the model is missing


def test_every_kind_has_an_example() -> None:
    assert {example["kind"] for example in examples()} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_line_and_description(kind: str) -> None:
    section = page().split(f"\n## {kind}\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `((?:spec|status)[^`]*)`", section, re.MULTILINE)
    schema = schema_of(kind)["properties"]
    wanted = [one for part in ("spec", "status") for one in fields(schema[part], part)]
    assert listed == [path for path, *_ in wanted]
    assert [path for path, field, _ in wanted if not field.get("description")] == []


def test_committed_page_is_generated() -> None:
    assert (Path(__file__).parents[4] / "docs/reference/api.md").read_text("utf-8") == page()

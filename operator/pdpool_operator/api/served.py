"""Compares the CRDs that the API server serves with those of this version, and fits a status to them.

A field is named by its path: `status.conditions[].observedGeneration`. Server-side apply refuses a whole status because
of one field that the served CRD does not have.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from .crd import crds
from .names import GROUP

Schema = Mapping[str, Any]


def wanted() -> dict[str, Schema]:
    """Return the schema of each kind, as this version defines it."""
    definitions = (definition["spec"] for definition in crds().values())
    return {spec["names"]["kind"]: spec["versions"][0]["schema"]["openAPIV3Schema"] for spec in definitions}


def served(openapi: Mapping[str, Any]) -> dict[str, Schema]:
    """Return the schema of each kind in an OpenAPI v3 document of the API server."""
    found: dict[str, Schema] = {}
    for schema in ((openapi.get("components") or {}).get("schemas") or {}).values():
        for kind in schema.get("x-kubernetes-group-version-kind") or ():
            if kind.get("group") == GROUP and "properties" in schema:
                found[kind["kind"]] = schema
    return found


def missing_fields(wants: Schema, serves: Schema) -> tuple[str, ...]:
    """Return the fields of spec and status that `serves` does not have. The fields inside of one are not listed."""
    return tuple(
        path
        for part in ("spec", "status")
        for path in _missing(wants["properties"][part], (serves.get("properties") or {}).get(part) or {}, part)
    )


def _missing(wants: Schema, serves: Schema, path: str) -> Iterator[str]:
    if serves.get("x-kubernetes-preserve-unknown-fields"):
        return
    for name, schema in (wants.get("properties") or {}).items():
        theirs = (serves.get("properties") or {}).get(name)
        if theirs is None:
            yield f"{path}.{name}"
        else:
            yield from _missing(schema, theirs, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(wants.get(key), Mapping):
            yield from _missing(wants[key], serves.get(key) or {}, path + mark)


def without(value: Any, missing: frozenset[str], path: str = "status") -> Any:  # noqa: ANN401 - any JSON
    """Return a copy of the status without the fields in `missing`."""
    if isinstance(value, Mapping):
        kept = {name: part for name, part in value.items() if f"{path}.{name}" not in missing}
        in_map = f"{path}{{}}"
        if any(one.startswith(in_map) for one in missing):
            return {name: without(part, missing, in_map) for name, part in kept.items()}
        return {name: without(part, missing, f"{path}.{name}") for name, part in kept.items()}
    if isinstance(value, list):
        return [without(part, missing, f"{path}[]") for part in value]
    return value

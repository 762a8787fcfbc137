"""Writes `docs/reference/api.md`: `python -m pdpool_operator.api.api_docs [--check] FILE`.

One table of fields for each kind, read from the CRDs, and one example, which a test validates.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from .crd import crds
from .generated import keep
from .names import GROUP, VERSION

Schema = Mapping[str, Any]

EXAMPLES: Mapping[str, str] = {
    "PrefillPool": f"""\
apiVersion: {GROUP}/{VERSION}
kind: PrefillPool
metadata: {{name: chat, namespace: llm}}
spec:
  replicas: 1
  engine: {{type: Reference}}
  model: {{path: /models/smollm2, servedName: smollm2}}
  transfer: {{connector: Pdpool, backend: NIXL}}
  template:
    spec:
      containers:
        - name: engine
          args: ["--kv-pages=512"]
          resources: {{requests: {{cpu: 200m, memory: 512Mi}}}}
""",
    "DecodePool": f"""\
apiVersion: {GROUP}/{VERSION}
kind: DecodePool
metadata: {{name: chat, namespace: llm}}
spec:
  replicas: 2
  model: {{path: /models/smollm2, servedName: smollm2}}
  drainTimeoutSeconds: 60
  rollout: {{surge: Auto}}
""",
    "DisaggregatedService": f"""\
apiVersion: {GROUP}/{VERSION}
kind: DisaggregatedService
metadata: {{name: chat, namespace: llm}}
spec:
  prefill: {{poolRef: {{name: chat}}}}
  decode: {{poolRef: {{name: chat}}}}
  router:
    replicas: 1
    port: 8000
    policy: {{prefill: CacheAware, decode: Random}}
  stuckAfterSeconds: 30
""",
    "PoolOperation": f"""\
apiVersion: {GROUP}/{VERSION}
kind: PoolOperation
metadata: {{name: restart-chat-decode-1, namespace: llm}}
spec:
  type: Restart
  instance: chat-decode-1
  deadlineSeconds: 600
""",
}

INTRODUCTION = f"""\
# API reference

Generated from `pdpool_operator.api` by `make generate`; do not edit.

All kinds are namespaced, of `{GROUP}/{VERSION}`. `kubectl explain ppool.spec.engine` prints the same
descriptions. [Conditions and reasons](conditions.md) have a page of their own.

*required*: must be set when the object around it is given. The API server refuses a value out of
bounds, and names the field.
"""
BOUNDS = {
    "minimum": "≥ {}",
    "maximum": "≤ {}",
    "minLength": "≥ {} characters",
    "maxLength": "≤ {} characters",
    "maxItems": "≤ {} items",
    "maxProperties": "≤ {} entries",
}


def fields(schema: Schema, path: str) -> Iterator[tuple[str, Schema, bool]]:
    """Return path, schema and whether it is required, of every field below `schema`."""
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        yield here, field, name in schema.get("required", ())
        yield from fields(field, here)
        items = field.get("items", {})
        if "properties" in items:
            yield from fields(items, f"{here}[]")


def _type(schema: Schema) -> str:
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    entries = schema.get("additionalProperties")
    return f"map of {_type(entries)}" if isinstance(entries, Mapping) else str(schema["type"])


def _bounds(schema: Schema) -> Iterator[str]:
    if "enum" in schema:
        yield ", ".join(f"`{value}`" for value in schema["enum"])
    yield from (text.format(schema[key]) for key, text in BOUNDS.items() if key in schema)
    yield from (f"each {text}" for text in (_bounds(schema["items"]) if "items" in schema else ()))


def _rules(schema: Schema) -> Iterator[str]:
    for part in (schema, schema.get("items", {})):
        yield from (rule["message"] for rule in part.get("x-kubernetes-validations", ()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _row(path: str, schema: Schema, required: bool) -> str:
    default = "*required*" if required else f"`{json.dumps(schema['default'])}`" if "default" in schema else ""
    words = " ".join([schema.get("description", ""), *(f"Rule: {rule}." for rule in _rules(schema))])
    cells = (f"`{path}`", _type(schema), default, "; ".join(_bounds(schema)), words)
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _kind(definition: Mapping[str, Any]) -> Iterator[str]:
    names = definition["spec"]["names"]
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    yield from ("", f"## {names['kind']}", "", schema["description"], "")
    yield from (f"Short name: `{names['shortNames'][0]}`.", "", "```yaml", EXAMPLES[names["kind"]].rstrip(), "```")
    for part in ("spec", "status"):
        own = schema["properties"][part]
        yield from ("", f"### {names['kind']}: {part}", "", own["description"], "")
        yield from (f"- {rule}" for rule in _rules(own))
        yield from ("", "| field | type | default | bounds | meaning |", "|---|---|---|---|---|")
        yield from (_row(*one) for one in fields(own, part))


def page() -> str:
    """Return the page as Markdown."""
    lines = [INTRODUCTION.rstrip()]
    for definition in crds().values():
        lines += _kind(definition)
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def examples() -> list[dict[str, Any]]:
    """Return the example of every kind."""
    return [yaml.safe_load(text) for text in EXAMPLES.values()]


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; fail if the file differs from what would be written.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def main(check: bool, file: Path) -> None:
    """Write or check the page."""
    keep(file, page(), module="pdpool_operator.api.api_docs", check=check)


if __name__ == "__main__":
    main()

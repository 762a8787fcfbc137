"""Generate the CustomResourceDefinitions from the models: `python -m pdpool_operator.api.crd [--check] DIRECTORY`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from .base import Resource
from .names import GROUP, MAX_NAME_LENGTH, NAME_PATTERN, VERSION
from .operations import PoolOperation
from .pools import DecodePool, Pool, PrefillPool
from .services import DisaggregatedService
from .structural import to_structural

CATEGORY = "pd"
HEADER = "# Generated from pdpool_operator.api by `python -m pdpool_operator.api.crd`; do not edit.\n"

NAME_RULES = [
    {
        "rule": f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
        "message": (
            f"metadata.name must be at most {MAX_NAME_LENGTH} characters, so that the names of its pods fit into 63"
        ),
    },
    {
        "rule": f"self.metadata.name.matches('{NAME_PATTERN}')",
        "message": (
            "metadata.name must begin with a lower-case letter, end with a letter or digit, and hold only lower-case "
            "letters, digits and '-' (no dots), because Services are named after it"
        ),
    },
]


def _column(
    name: str, json_path: str, kind: str = "string", description: str = "", priority: int = 0
) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": json_path}
    if description:
        column["description"] = description
    if priority:
        column["priority"] = priority
    return column


AVAILABLE_COLUMN = _column(
    "Available", '.status.conditions[?(@.type=="Available")].status', description="Requests can be served."
)
REASON_COLUMN = _column(
    "Reason", '.status.conditions[?(@.type=="Ready")].reason', description="Why it is not Ready, else Ready."
)
QUEUE_COLUMNS = [
    _column("Queues", ".status.queues", description="The most severe verdict on the hand-off queues."),
    _column("Waiting", ".status.oldestWaitingSince", "date", "How long the oldest request waits in a hand-off queue."),
]
AGE_COLUMN = _column("Age", ".metadata.creationTimestamp", "date")
POOL_COLUMNS = [
    _column("Ready", ".status.ready", description="Ready and wanted instances."),
    _column("Updated", ".status.updatedReplicas", "integer", "Instances made from the current spec."),
    AVAILABLE_COLUMN,
    REASON_COLUMN,
    *QUEUE_COLUMNS,
    _column("Model", ".spec.model.path", priority=1),
    _column("Engine", ".status.engine", description="Engine and version.", priority=1),
    _column("Transport", ".status.transport", description="Transfer backends and transports in use.", priority=1),
    AGE_COLUMN,
]
SERVICE_COLUMNS = [
    _column("Ready", '.status.conditions[?(@.type=="Ready")].status', description="All is as the spec says."),
    AVAILABLE_COLUMN,
    REASON_COLUMN,
    _column("Pools", ".status.ready", description="Ready and wanted instances of both sides."),
    _column("Routers", ".status.routerReplicas", "integer", "Ready router pods."),
    *QUEUE_COLUMNS,
    _column("URL", ".status.url", priority=1),
    AGE_COLUMN,
]
OPERATION_COLUMNS = [
    _column("Type", ".spec.type"),
    _column("Instance", ".spec.instance"),
    _column("Node", ".spec.node"),
    _column("Phase", ".status.phase", description="How far the operation is."),
    _column("Message", ".status.message", description="What it waits for, or how it ended."),
    AGE_COLUMN,
]


def crd(
    kind: type[Resource], *, short: str, columns: list[dict[str, Any]], rules: Sequence[dict[str, str]] = NAME_RULES
) -> dict[str, Any]:
    """Return the CustomResourceDefinition of one kind. `rules` are those on its metadata."""
    subresources: dict[str, Any] = {"status": {}}
    if issubclass(kind, Pool):
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": [short],
                "categories": [CATEGORY],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": _schema(kind, rules)},
                }
            ],
        },
    }


def _schema(kind: type[Resource], rules: Sequence[dict[str, str]]) -> dict[str, Any]:
    spec_model = kind.model_fields["spec"].annotation
    status_model = kind.model_fields["status"].annotation
    assert spec_model is not None
    assert status_model is not None
    spec = to_structural(spec_model.model_json_schema())
    status = to_structural(status_model.model_json_schema(), written_by_users=False)
    schema: dict[str, Any] = {
        "type": "object",
        "description": (kind.__doc__ or "").strip(),
        **({"x-kubernetes-validations": list(rules)} if rules else {}),
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {**spec, "description": "The desired state."},
            "status": {**status, "description": "The last observed state. The operator writes it."},
        },
    }
    if "required" in spec:
        schema["required"] = ["spec"]
    else:
        schema["properties"]["spec"]["default"] = {}
    return schema


def crds() -> dict[str, dict[str, Any]]:
    """Return all CustomResourceDefinitions, by file name."""
    definitions = (
        crd(PrefillPool, short="ppool", columns=POOL_COLUMNS),
        crd(DecodePool, short="dpool", columns=POOL_COLUMNS),
        crd(DisaggregatedService, short="pdsvc", columns=SERVICE_COLUMNS),
        crd(PoolOperation, short="poolop", columns=OPERATION_COLUMNS, rules=()),
    )
    return {f"{GROUP}_{definition['spec']['names']['plural']}.yaml": definition for definition in definitions}


class _Dumper(yaml.SafeDumper):
    """Writes each value in full. The API server accepts YAML anchors, but people misread them."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 -- the signature is the base class's
        return True


def render(definition: dict[str, Any]) -> str:
    """Return a CustomResourceDefinition as YAML text, as it is committed."""
    return HEADER + yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True)


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; fail if the files differ from what would be written.")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def main(check: bool, directory: Path) -> None:
    """Write or check the CRD files."""
    wanted = {directory / name: render(definition) for name, definition in crds().items()}
    different = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    extra = sorted(set(directory.glob("*.yaml")) - wanted.keys()) if directory.exists() else []
    if check:
        for path in [*different, *extra]:
            click.echo(f"{path}: differs from the models; run python -m pdpool_operator.api.crd {directory}", err=True)
        sys.exit(1 if different or extra else 0)
    directory.mkdir(parents=True, exist_ok=True)
    for path in different:
        path.write_text(wanted[path], "utf-8")
        click.echo(f"wrote {path}")


if __name__ == "__main__":
    main()

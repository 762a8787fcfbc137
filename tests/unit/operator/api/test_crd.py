import re
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from click.testing import CliRunner
from pdpool_operator.api.base import Model, SpecInvalid, format_time
from pdpool_operator.api.crd import crds, main, render
from pdpool_operator.api.pools import PrefillPool
from pdpool_operator.api.services import DisaggregatedService
from pdpool_operator.api.structural import NotStructuralError, to_structural
from pydantic import Field

from tests.unit.operator.plan.makers import T0

COMMITTED = Path(__file__).parents[4] / "crds"
REFUSED = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "const", "prefixItems", "examples", "title", "uniqueItems"}


def nodes(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        found += nodes(child, f"{path}.{name}")
    if "items" in schema:
        found += nodes(schema["items"], f"{path}[]")
    return found


def schema_of(definition: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def test_the_committed_files_are_what_the_models_give() -> None:
    result = CliRunner().invoke(main, ["--check", str(COMMITTED)])
    assert result.exit_code == 0, result.output


def test_a_changed_missing_or_extra_file_fails_the_check(tmp_path: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(main, [str(tmp_path)]).exit_code == 0
    assert runner.invoke(main, ["--check", str(tmp_path)]).exit_code == 0
    extra, changed = tmp_path / "left-over.yaml", next(iter(sorted(tmp_path.iterdir())))
    extra.write_text("{}")
    assert "left-over.yaml" in runner.invoke(main, ["--check", str(tmp_path)]).output
    extra.unlink()
    changed.write_text("{}")
    assert changed.name in runner.invoke(main, ["--check", str(tmp_path)]).output
    changed.unlink()
    assert runner.invoke(main, ["--check", str(tmp_path)]).exit_code == 1


@pytest.mark.parametrize("file", sorted(crds()))
def test_schemas_are_structural_and_bounded(file: str) -> None:
    schema = schema_of(crds()[file])
    for path, node in nodes(schema):
        assert not REFUSED & node.keys(), path
        assert node["type"], path
        if path in {"", ".apiVersion", ".kind", ".metadata"}:
            continue
        if node["type"] == "string" and "enum" not in node and node.get("format") != "date-time":
            assert "maxLength" in node, path
        if node["type"] == "array":
            assert "maxItems" in node, path
        if node["type"] == "integer" and path.startswith(".spec"):
            assert {"minimum", "maximum"} <= node.keys(), path
        if path.startswith(".status"):
            assert "default" not in node, path
        else:
            assert node["description"], path


@pytest.mark.parametrize("file", sorted(crds()))
def test_every_rule_says_which_field_is_wrong(file: str) -> None:
    for path, node in nodes(schema_of(crds()[file])):
        for rule in node.get("x-kubernetes-validations", []):
            fields = {"": ["metadata.name"], ".spec": list(node.get("properties", {}))}
            assert any(field in rule["message"] for field in fields.get(path, [path.removeprefix(".spec.")])), rule


def pattern_of(file: str, field: str) -> str:
    """Return the regular expression of the rule on a field below spec."""
    node = dict(nodes(schema_of(crds()[file])))[f".spec.{field}"]
    (rule,) = node["x-kubernetes-validations"]
    found = re.search(r"self\.matches\('([^']*)'\)", rule["rule"])
    assert found, rule
    return found[1]


POOLS, SERVICES = "pdpool.dev_prefillpools.yaml", "pdpool.dev_disaggregatedservices.yaml"
OPERATIONS = "pdpool.dev_pooloperations.yaml"


@pytest.mark.parametrize(
    ("file", "field", "taken", "refused"),
    [
        (
            POOLS,
            "model.path",
            (
                "/m",
                "/models/smollm2",
                "/models/smollm2/",
                "/srv/.cache/hub/3a9f",
                "/models/Qwen-2.5_x",
                "Qwen/Qwen3-32B",
                "meta-llama/Llama-3.1-8B",
            ),
            (
                "/",
                "//",
                "///",
                "/models//",
                "/models//x",
                "/models/.",
                "/models/..",
                "/../models/x",
                "/models/-x",
                "m",
                "/a b",
                "",
                "Qwen/",
                "a/b/c",
                "../x",
                "./x",
                "a/-b",
                "https://hub/a",
            ),
        ),
        (
            POOLS,
            "model.servedName",
            ("smollm2", "org/model:tag", "Qwen2.5"),
            ("-x", "/x", " ", "a b", "a\nb", "org/", "org//model", "a:", ""),
        ),
        (
            POOLS,
            "rdma.resource",
            ("rdma/ib", "vpc.amazonaws.com/efa", "rdma/hca_shared_devices_a", "networking.gke.io.networks/rdma-0"),
            ("rdma", "rdma/", "/ib", "RDMA/ib", "rdma/ib/x", "rdma/-ib", ""),
        ),
        (
            POOLS,
            "rdma.networks[]",
            ("rdma-0", "kube-system/rdma-0"),
            ("", "/a", "a/", "a/b/c", "A", "a b"),
        ),
        (
            SERVICES,
            "prefill.poolRef.name",
            ("chat", "a", "a-1"),
            ("A B", "A", "-a", "a-", "1a", "a.b", "a/b", "../a", ""),
        ),
        (
            SERVICES,
            "decode.poolRef.name",
            ("chat", "a", "a-1"),
            ("A B", "A", "-a", "a-", "1a", "a.b", "a/b", "../a", ""),
        ),
        (
            OPERATIONS,
            "instance",
            ("chat-decode-0", "chat-prefill-12", "a-decode-0-0", "chat-decode-1-prefill-255-0"),
            (
                "chat",
                "chat-decode",
                "chat-router-0",
                "chat-decode-01",
                "chat-decode-0-1",
                "-decode-0",
                "C-decode-0",
                "",
            ),
        ),
    ],
)
def test_strings_are_refused_that_could_name_nothing(
    file: str, field: str, taken: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    pattern = re.compile(pattern_of(file, field))
    assert [text for text in taken if not pattern.fullmatch(text)] == []
    assert [text for text in refused if pattern.fullmatch(text)] == []


def test_every_text_that_users_write_has_a_rule_or_a_list_of_values() -> None:
    for definition in crds().values():
        for path, node in nodes(schema_of(definition)):
            if path.startswith(".spec") and node["type"] == "string":
                assert "enum" in node or "x-kubernetes-validations" in node, path


def test_a_crd_survives_yaml_and_fits_into_client_side_apply() -> None:
    for definition in crds().values():
        text = render(definition)
        assert yaml.safe_load(text) == definition
        assert len(text) < 256 * 1024


def test_defaults_are_visible_also_when_their_parent_is_absent() -> None:
    spec = schema_of(crds()["pdpool.dev_prefillpools.yaml"])["properties"]["spec"]
    assert spec["properties"]["engine"]["default"] == {}
    assert spec["properties"]["engine"]["properties"]["type"]["default"] == "Reference"


@pytest.mark.parametrize("file", [POOLS, "pdpool.dev_decodepools.yaml"])
def test_a_pool_must_name_its_model(file: str) -> None:
    schema = schema_of(crds()[file])
    assert schema["required"] == ["spec"]
    assert "model" in schema["properties"]["spec"]["required"]
    model = schema["properties"]["spec"]["properties"]["model"]
    assert model["required"] == ["path"]
    assert "default" not in model["properties"]["path"]


def test_pools_can_be_scaled_and_services_not() -> None:
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    found = {file: d["spec"]["versions"][0]["subresources"].get("scale") for file, d in crds().items()}
    assert found == {
        "pdpool.dev_prefillpools.yaml": scale,
        "pdpool.dev_decodepools.yaml": scale,
        "pdpool.dev_disaggregatedservices.yaml": None,
        OPERATIONS: None,
    }


class Union(Model):
    either: int | str = Field(default=1, description="x")


class Unbounded(Model):
    name: str = Field(default="", description="x")


class UnboundedInteger(Model):
    count: int = Field(default=0, ge=0, description="x")


class Undescribed(Model):
    count: int = Field(default=0, ge=0, le=1)


class Pair(Model):
    pair: tuple[int, str] = Field(default=(1, "a"), description="x")


class UnboundedMap(Model):
    labels: dict[str, Annotated[str, Field(max_length=5)]] = Field(default_factory=dict, description="x")


class MapOfUnbounded(Model):
    labels: dict[str, str] = Field(default_factory=dict, max_length=4, description="x")


class Exclusive(Model):
    share: float = Field(default=1, gt=0, description="x")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Union, ".either: a union"),
        (Unbounded, ".name: lacks maxLength"),
        (UnboundedInteger, ".count: lacks maximum"),
        (Undescribed, ".count: lacks description"),
        (Pair, "prefixItems"),
        (UnboundedMap, ".labels: lacks maxProperties"),
        (MapOfUnbounded, r".labels\[\]: lacks maxLength"),
        (Exclusive, "exclusiveMinimum"),
    ],
)
def test_what_the_api_server_would_refuse_or_drop_is_refused_here(model: type[Model], message: str) -> None:
    with pytest.raises(NotStructuralError, match=message):
        to_structural(model.model_json_schema())


def test_an_object_that_does_not_fit_is_refused_by_field_and_value() -> None:
    body = {"metadata": {"name": "x", "namespace": "n", "uid": "u"}, "spec": {"replicas": 300, "engine": {"type": "X"}}}
    with pytest.raises(SpecInvalid) as refused:
        PrefillPool.parse(body)
    assert "spec.replicas" in str(refused.value)
    assert "300" in str(refused.value)
    assert "spec.engine.type" in str(refused.value)


def test_a_status_of_another_version_does_not_make_an_object_unreadable() -> None:
    body = {"metadata": {"name": "x", "namespace": "n", "uid": "u"}, "status": {"conditions": [{"type": "New"}]}}
    body["spec"] = {"model": {"path": "/m"}}
    assert PrefillPool.parse(body).status.conditions == ()


def test_a_service_must_name_both_pools() -> None:
    body = {"metadata": {"name": "x", "namespace": "n", "uid": "u"}, "spec": {"prefill": {"poolRef": {"name": "a"}}}}
    with pytest.raises(SpecInvalid, match=r"spec\.decode"):
        DisaggregatedService.parse(body)


def test_times_are_written_as_kubernetes_writes_them() -> None:
    assert format_time(T0.replace(microsecond=999999)) == "2026-11-21T12:00:00Z"


@pytest.mark.parametrize(
    ("path", "served", "name"),
    [("/models/smollm2/", None, "smollm2"), ("tiny", None, "tiny"), ("/models/smollm2", "chat", "chat")],
)
def test_the_served_name_follows_from_the_path_unless_given(path: str, served: str | None, name: str) -> None:
    body = {
        "metadata": {"name": "x", "namespace": "n", "uid": "u"},
        "spec": {"model": {"path": path, "servedName": served}},
    }
    assert PrefillPool.parse(body).spec.model.effective_name == name

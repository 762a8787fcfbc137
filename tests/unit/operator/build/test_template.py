from typing import Any

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.build.engine import engine_template
from pdpool_operator.build.settings import BuildSettings
from pdpool_operator.build.template import TemplateInvalid

from tests.unit.operator.plan.makers import SETTINGS, make_pool


def engine(**container: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **container}]}}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (engine(args=["--port=1"]), "spec.template.spec.containers[engine].args: '--port=1': pdpool sets --port"),
        (engine(args=["--mode", "unified"]), "pdpool sets --mode from the pool's own fields; remove it"),
        (engine(args=[1]), "spec.template.spec.containers[engine].args[0]: 1: must be a string"),
        (engine(args="--x"), "spec.template.spec.containers[engine].args: '--x': must be a list"),
        (engine(env=[{"name": "PDPOOL_ROLE", "value": "decode"}]), "'PDPOOL_ROLE': names that begin with PDPOOL_"),
        (engine(env=[{"value": "x"}]), "containers[engine].env[0].name: None: must be a non-empty string"),
        (engine(ports=[{"name": "http", "containerPort": 80}]), "ports[http]: 80: this port is 30000"),
        (
            engine(lifecycle={"preStop": {"exec": {}}}),
            "lifecycle.preStop: <object of 1>: pdpool drains the engine there",
        ),
        ({"spec": {"terminationGracePeriodSeconds": 5}}, "5: it is derived from spec.drainTimeoutSeconds"),
        ({"spec": {"containers": "engine"}}, "spec.template.spec.containers: 'engine': must be a list"),
        ({"spec": {"containers": ["engine"]}}, "spec.template.spec.containers[0]: 'engine': must be an object"),
        ({"spec": {"containers": [{"name": "a"}, {"name": "a"}]}}, "containers[1].name: 'a': occurs twice"),
        ({"spec": {"volumes": {"name": "x"}}}, "spec.template.spec.volumes: <object of 1>: must be a list"),
        ({"spec": []}, "spec.template.spec: <list of 0>: must be an object"),
        (
            {"metadata": {"labels": {"pdpool.dev/role": "decode"}}},
            "labels[pdpool.dev/role]: 'decode': pdpool sets this",
        ),
        ({"metadata": {"annotations": {"pdpool.dev/spec-hash": "x"}}}, "annotations[pdpool.dev/spec-hash]"),
        ({"metadata": {"labels": {"app.kubernetes.io/part-of": "mine"}}}, "labels[app.kubernetes.io/part-of]"),
        ({"metadata": {"labels": {"tier": 1}}}, "labels[tier]: 1: must be a string; put it in quotes"),
        ({"metadata": {"name": "x"}}, "spec.template.metadata.name: 'x': unknown here"),
        (
            {"containers": []},
            "spec.template.containers: <list of 0>: unknown here; spec.template has metadata and spec",
        ),
    ],
)
def test_a_template_that_cannot_be_merged_is_refused_by_field_value_and_remedy(
    template: dict[str, Any], message: str
) -> None:
    with pytest.raises(TemplateInvalid) as refused:
        engine_template(make_pool(template=template), 0, SETTINGS)
    assert message in str(refused.value)


def test_an_empty_or_null_template_is_fine() -> None:
    plain = engine_template(make_pool(), 0, SETTINGS)
    null = {"metadata": {"creationTimestamp": None, "labels": None}, "spec": {"containers": None, "volumes": None}}
    assert engine_template(make_pool(template=null), 0, SETTINGS) == plain


def test_the_engine_stays_first_and_other_containers_follow() -> None:
    template = {"spec": {"containers": [{"name": "sidecar", "image": "x"}, {"name": "engine"}]}}
    containers = engine_template(make_pool(template=template), 0, SETTINGS)["spec"]["containers"]
    assert [container["name"] for container in containers] == ["engine", "sidecar"]


def test_without_any_image_the_template_must_name_one() -> None:
    with pytest.raises(
        TemplateInvalid, match=r"containers\[engine\]\.image: None: name the image here, in the container named engine"
    ):
        engine_template(make_pool(), 0, BuildSettings(engine_image="", router_image=""))


def test_only_prefill_engines_have_a_bootstrap_port() -> None:
    def ports(role: Role) -> list[str]:
        return [
            port["name"] for port in engine_template(make_pool(role), 0, SETTINGS)["spec"]["containers"][0]["ports"]
        ]

    assert ports(Role.PREFILL) == ["http", "bootstrap", "control", "admin"]
    assert ports(Role.DECODE) == ["http", "control", "admin"]


def test_a_port_of_the_users_needs_no_name() -> None:
    more = [{"containerPort": 9999}, {"containerPort": 9998, "name": "debug"}]
    template = engine_template(make_pool(template=engine(ports=more)), 0, SETTINGS)
    ports = template["spec"]["containers"][0]["ports"]
    assert [(port.get("name"), port["containerPort"]) for port in ports[-2:]] == [("debug", 9998), (None, 9999)]
    with pytest.raises(TemplateInvalid, match=r"ports\[0\]: 9999: must be an object"):
        engine_template(make_pool(template=engine(ports=[9999])), 0, SETTINGS)


def test_merging_changes_neither_input() -> None:
    template = engine(env=[{"name": "A", "value": "1"}], securityContext={"runAsUser": 1})
    pool = make_pool(template=template)
    first = engine_template(pool, 0, SETTINGS)
    assert engine_template(pool, 0, SETTINGS) == first
    assert pool.spec.template == engine(env=[{"name": "A", "value": "1"}], securityContext={"runAsUser": 1})

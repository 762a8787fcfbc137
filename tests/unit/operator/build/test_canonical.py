"""Templates that mean the same have one spec hash. Templates that mean different things do not."""

from typing import Any

import pytest
from pdpool_operator.build.canonical import CONTAINER_DEFAULTS, POD_DEFAULTS, canonical_template, quantity
from pdpool_operator.build.pool import instance_stateful_set, pool_spec_hash

from tests.unit.operator.plan.makers import SETTINGS, make_pool


def engine(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


def sidecar(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "proxy", "image": "proxy:1", **fields}]}}


def spec(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}


def limits(**amounts: Any) -> dict[str, Any]:
    return engine(resources={"limits": amounts})


A, B = {"name": "A", "value": "1"}, {"name": "B", "value": "2"}
USES_A = {"name": "B", "value": "$(A)"}
X, Y = {"name": "x", "emptyDir": {}}, {"name": "y", "configMap": {"name": "y"}}
ON_X, ON_Y = {"name": "x", "mountPath": "/x"}, {"name": "y", "mountPath": "/y"}
GPU, SPOT = {"key": "gpu", "operator": "Exists"}, {"key": "spot", "operator": "Exists"}
PROBE: dict[str, Any] = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5}

SAME = {
    "cpu as a fraction": (limits(cpu="20m"), limits(cpu="0.02")),
    "cpu as a number": (limits(cpu="2"), limits(cpu=2)),
    "memory in another unit": (limits(memory="1Gi"), limits(memory="1024Mi")),
    "memory with an exponent": (limits(memory="2e9"), limits(memory="2G")),
    "a size limit": (
        spec(volumes=[{"name": "x", "emptyDir": {"sizeLimit": "1Gi"}}]),
        spec(volumes=[{"name": "x", "emptyDir": {"sizeLimit": "1024Mi"}}]),
    ),
    "env swapped": (engine(env=[A, B]), engine(env=[B, A])),
    "env of a sidecar swapped": (sidecar(env=[A, B]), sidecar(env=[B, A])),
    "an empty value": (engine(env=[{"name": "A"}]), engine(env=[{"name": "A", "value": ""}])),
    "no env": (engine(), engine(env=[])),
    "nothing at all": ({}, {"metadata": None, "spec": {"containers": []}}),
    "no labels": ({"metadata": {"labels": {}}}, {}),
    "volumes swapped": (spec(volumes=[X, Y]), spec(volumes=[Y, X])),
    "the default mode": (
        spec(volumes=[Y]),
        spec(volumes=[{"name": "y", "configMap": {"name": "y", "defaultMode": 420}}]),
    ),
    "mounts swapped": (engine(volumeMounts=[ON_X, ON_Y]), engine(volumeMounts=[ON_Y, ON_X])),
    "a mount that is not read-only": (
        engine(volumeMounts=[ON_X]),
        engine(volumeMounts=[{**ON_X, "readOnly": False}]),
    ),
    "tolerations swapped": (spec(tolerations=[GPU, SPOT]), spec(tolerations=[SPOT, GPU])),
    "the scheduler written out": (spec(), spec(schedulerName="default-scheduler", restartPolicy="Always")),
    "the host's network written out": (spec(), spec(hostNetwork=False)),
    "a port's protocol": (
        engine(ports=[{"name": "m", "containerPort": 1}]),
        engine(ports=[{"name": "m", "containerPort": 1, "protocol": "TCP"}]),
    ),
    "a probe's defaults": (
        engine(readinessProbe=PROBE),
        engine(readinessProbe={**PROBE, "timeoutSeconds": 1, "failureThreshold": 3}),
    ),
    "the pull policy of a tag": (engine(image="e:1"), engine(image="e:1", imagePullPolicy="IfNotPresent")),
    "the pull policy of latest": (engine(image="r:5000/e"), engine(image="r:5000/e", imagePullPolicy="Always")),
    "the pull policy of a digest": (
        engine(image="e@sha256:0"),
        engine(image="e@sha256:0", imagePullPolicy="IfNotPresent"),
    ),
    "a sidecar's termination message": (sidecar(), sidecar(terminationMessagePolicy="File", stdin=False)),
    "capabilities swapped": (
        engine(securityContext={"capabilities": {"add": ["A", "B"]}}),
        engine(securityContext={"capabilities": {"add": ["B", "A"]}}),
    ),
    "the engine last": (
        spec(containers=[{"name": "engine", "image": "e:1"}, {"name": "p", "image": "p:1"}]),
        spec(containers=[{"name": "p", "image": "p:1"}, {"name": "engine", "image": "e:1"}]),
    ),
}

DIFFERENT = {
    "more cpu": (limits(cpu="20m"), limits(cpu="0.2")),
    "binary and decimal": (limits(memory="1Gi"), limits(memory="1G")),
    "env swapped under a reference": (engine(env=[A, USES_A]), engine(env=[USES_A, A])),
    "another value": (engine(env=[A]), engine(env=[{"name": "A", "value": "2"}])),
    "args swapped": (engine(args=["--a", "--b"]), engine(args=["--b", "--a"])),
    "init containers swapped": (
        spec(initContainers=[{"name": "a"}, {"name": "b"}]),
        spec(initContainers=[{"name": "b"}, {"name": "a"}]),
    ),
    "envFrom swapped": (
        engine(envFrom=[{"secretRef": {"name": "a"}}, {"secretRef": {"name": "b"}}]),
        engine(envFrom=[{"secretRef": {"name": "b"}}, {"secretRef": {"name": "a"}}]),
    ),
    "the engine's termination message": (engine(), engine(terminationMessagePolicy="File")),
    "service links, which pdpool turns off": (spec(), spec(enableServiceLinks=True)),
    "a probe removed": (engine(), engine(livenessProbe=None)),
    "always pulled": (engine(image="e:1"), engine(image="e:1", imagePullPolicy="Always")),
    "a pull policy beside the operator's image": (engine(), engine(imagePullPolicy="IfNotPresent")),
    "a label that reads like a quantity": (
        {"metadata": {"labels": {"a": "1000m"}}},
        {"metadata": {"labels": {"a": "1"}}},
    ),
    "a priority of zero and none": (spec(priority=0), spec()),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME.keys())
def test_same_meaning_has_the_same_hash(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert pool_spec_hash(make_pool(template=one)) == pool_spec_hash(make_pool(template=other))


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_other_meaning_has_another_hash(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert pool_spec_hash(make_pool(template=one)) != pool_spec_hash(make_pool(template=other))


def test_default_served_name_written_out_changes_nothing() -> None:
    plain, written = {"path": "/models/a"}, {"path": "/models/a", "servedName": "a"}
    assert pool_spec_hash(make_pool(model=plain)) == pool_spec_hash(make_pool(model=written))
    assert pool_spec_hash(make_pool(model={**plain, "servedName": "b"})) != pool_spec_hash(make_pool(model=plain))


@pytest.mark.parametrize("junk", ["x", [1], {"containers": "x"}, {"containers": [5]}, {"volumes": [{"name": 1}]}])
def test_malformed_template_has_a_hash(junk: Any) -> None:
    assert canonical_template({"spec": junk})["spec"] is not None


@pytest.mark.parametrize("text", ["", "x", "1.5.2", "1Zi", "--1", True, None, {"a": 1}, "1" * 200])
def test_what_is_no_quantity_stays(text: object) -> None:
    assert quantity(text) == text


def test_pdpool_sets_no_field_that_counts_as_absent() -> None:
    template = instance_stateful_set(make_pool(), 0, SETTINGS)["spec"]["template"]["spec"]
    assert not POD_DEFAULTS.keys() & template.keys()
    assert not CONTAINER_DEFAULTS.keys() & template["containers"][0].keys()

"""What holds for every engine type."""

import pytest
from pdpool_operator.api.engine import EngineType
from pdpool_operator.api.names import Role
from pdpool_operator.build.engine import engine_template
from pdpool_operator.engines import ENGINES, engine_of

from tests.unit.operator.plan.makers import SETTINGS, make_pool

IMAGE = {"spec": {"containers": [{"name": "engine", "image": "registry.example/engine:1"}]}}


def engine(kind, role=Role.PREFILL, **spec):
    spec = {
        "model": {"path": "/models/m"},
        "template": IMAGE,
        **spec,
        "engine": {"type": kind, **spec.get("engine", {})},
    }
    return engine_template(make_pool(role, **spec), 0, SETTINGS)["spec"]["containers"][0]


def test_every_engine_type_is_registered():
    assert set(ENGINES) == set(EngineType)
    assert all(engine_of(kind).type is kind for kind in EngineType)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("kind", EngineType)
def test_no_engine_has_infiniband_switched_off(kind, role):
    assert "UCX_MODULES" not in {variable["name"] for variable in engine(kind, role)["env"]}


@pytest.mark.parametrize(("seconds", "failures"), [(10, 5), (601, 301), (3600, 1800)])
@pytest.mark.parametrize("kind", EngineType)
def test_startup_timeout_sets_startup_probe(kind, seconds, failures):
    probe = engine(kind, engine={"startupTimeoutSeconds": seconds})["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (2, failures)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("kind", EngineType)
def test_every_owned_flag_is_refused_in_a_template(kind, role):
    for flag in engine_of(kind).owned_flags:
        with pytest.raises(ValueError, match=rf"pdpool sets {flag} from the pool's own fields"):
            engine(kind, role, template={"spec": {"containers": [{"name": "engine", "image": "i", "args": [flag]}]}})


@pytest.mark.parametrize("kind", EngineType)
def test_ports_have_names_that_kubernetes_takes(kind):
    ports = engine(kind)["ports"]
    assert len({port["name"] for port in ports}) == len(ports) == len({port["containerPort"] for port in ports})
    assert all(len(port["name"]) <= 15 for port in ports)

"""Values that a pod's template and the engine in it must agree on."""

from pathlib import PurePosixPath

import pytest
from pdpool_connector.flight.files import MAX_BYTES
from pdpool_operator.api.names import Role
from pdpool_operator.build.pool import instance_stateful_set
from pdpool_reference.http_edge import CLOSE_S
from pdpool_reference.server_engine import STOP_S

from tests.unit.operator.plan.makers import SETTINGS, make_pool


def test_an_engine_that_did_not_drain_may_still_end_in_order_before_it_is_killed() -> None:
    pod = instance_stateful_set(make_pool(drainTimeoutSeconds=60), 0, SETTINGS)["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    hook = engine["lifecycle"]["preStop"]["exec"]["command"]
    (waits_on,) = (float(arg.split("=")[1]) for arg in engine["args"] if arg.startswith("--shutdown-grace="))
    assert hook[-2] == "--deadline"
    after_hook = pod["terminationGracePeriodSeconds"] - float(hook[-1])
    scheduler_connector_and_clients = STOP_S + STOP_S + CLOSE_S
    assert waits_on + scheduler_connector_and_clients < after_hook


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_failed_hand_offs_are_recorded_where_the_engine_may_write_and_the_records_have_room(role) -> None:
    pod = instance_stateful_set(make_pool(role), 0, SETTINGS)["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    (directory,) = (PurePosixPath(arg.split("=")[1]) for arg in engine["args"] if arg.startswith("--flight-dir="))
    (mount,) = (mount for mount in engine["volumeMounts"] if directory.is_relative_to(mount["mountPath"]))
    assert not mount.get("readOnly")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    assert volume["emptyDir"].get("sizeLimit") is None, (
        f"then it must be more than {MAX_BYTES}, with what else is there"
    )


def test_a_template_may_have_the_records_elsewhere() -> None:
    other = {"spec": {"containers": [{"name": "engine", "args": ["--flight-dir=/records"]}]}}
    pod = instance_stateful_set(make_pool(template=other), 0, SETTINGS)["spec"]["template"]["spec"]
    flags = [arg for arg in pod["containers"][0]["args"] if arg.startswith("--flight-dir=")]
    assert flags[-1] == "--flight-dir=/records", "the last one holds"


def test_pods_of_a_pool_prefer_different_nodes_unless_the_template_says_otherwise() -> None:
    pod = instance_stateful_set(make_pool(), 1, SETTINGS)["spec"]["template"]
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    packed = {"spec": {"topologySpreadConstraints": []}}
    pod = instance_stateful_set(make_pool(template=packed), 1, SETTINGS)["spec"]["template"]
    assert pod["spec"]["topologySpreadConstraints"] == []

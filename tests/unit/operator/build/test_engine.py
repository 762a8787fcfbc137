"""What a pod's template and the engine in it say of the same thing."""

from pdpool_connector.reference.http_edge import CLOSE_S
from pdpool_connector.reference.server_engine import STOP_S
from pdpool_operator.build.pool import instance_stateful_set

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

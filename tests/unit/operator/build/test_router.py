"""Values that the router's Deployment and its image's entrypoint must agree on."""

import runpy
from pathlib import Path

from pdpool_operator.build.router import GRACE_PERIOD_S, PRE_STOP_SLEEP_S, STREAMS_MAY_FINISH_S

SCRIPT = Path(__file__).parents[4] / "images" / "router" / "start_router.py"


def test_a_router_lets_streams_finish_for_as_long_as_its_pod_may_take_to_end() -> None:
    flags = list(runpy.run_path(str(SCRIPT))["FLAGS"])
    assert flags[flags.index("--shutdown-grace-period-secs") + 1] == str(STREAMS_MAY_FINISH_S)
    assert PRE_STOP_SLEEP_S + STREAMS_MAY_FINISH_S < GRACE_PERIOD_S

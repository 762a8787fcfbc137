"""Deeds that change the specs of pools: roll-outs, broken roll-outs, and scale-in."""

import secrets
from typing import Final

from proof.cluster.stage import FIRST, SIDES, Stage
from tests.cluster.stack import POOLS

UPDATED_S: Final = 240.0
"""Longest time for one roll-out of both pools, in seconds."""
NOTICED_S: Final = 120.0
"""Longest time until a broken roll-out is named, in seconds. A container must fail several times."""
NOWHERE: Final = {"resources": {"requests": {"cpu": "1000"}, "limits": {"cpu": "1000"}}}
MISSING_IMAGE: Final = {"image": "localhost/pdpool-engine:no-such-tag", "imagePullPolicy": "Never"}
CRASHING: Final = {"command": ["python3", "-c", "raise SystemExit(3)"]}
BROKEN: Final = (
    (MISSING_IMAGE, "dpool Ready=False ImagePullFailed"),
    (CRASHING, "dpool Ready=False CrashLoop"),
    (NOWHERE, "dpool Ready=False Unschedulable"),
)
"""Templates that cannot run, and the word that must name each."""


def _mark() -> str:
    return secrets.token_hex(4)


def one_pool(stage: Stage) -> None:
    """Roll out a new template of the decode pool."""
    mark = _mark()
    stage.update("decode", mark)
    stage.until_updated("decode", mark, 2, UPDATED_S)


def both_pools(stage: Stage) -> None:
    """Roll out new templates of both pools at the same time."""
    mark = _mark()
    for side in SIDES:
        stage.update(side, mark)
    for side in SIDES:
        stage.until_updated(side, mark, 2, UPDATED_S)


def reverted_half_way(stage: Stage) -> None:
    """Roll out a new template, and go back to the former one as soon as one engine has the new one."""
    former, new = _mark(), _mark()
    stage.update("decode", former)
    stage.until_updated("decode", former, 2, UPDATED_S)
    stage.update("decode", new)
    stage.until_updated("decode", new, 1, UPDATED_S)
    stage.update("decode", former)
    stage.until_updated("decode", former, 2, UPDATED_S)


def three_broken(stage: Stage) -> None:
    """Roll out three templates in a row that cannot run, then a good one."""
    for container, word in BROKEN:
        stage.update("decode", _mark(), **container)
        stage.until_given(word, NOTICED_S)
    mark = _mark()
    stage.update("decode", mark)
    stage.until_updated("decode", mark, 2, UPDATED_S)


def no_decode_left(stage: Stage) -> None:
    """Cordon all nodes and delete all decode engines, so that none can run."""
    stage.cordon()
    stage.stack.kubectl("delete", "pod", "-n", POOLS, "-l", "pdpool.dev/role=decode", "--wait=false")
    stage.until_given("dpool Available=False Unschedulable", NOTICED_S)
    stage.until_given("alert PdpoolServiceCannotServe", NOTICED_S)


def scale_in_unfit(stage: Stage) -> None:
    """Scale decode from 4 to 2 while one instance is Pending and one Stuck. The healthy ones must stay."""
    stack = stage.stack
    stage.scale("decode", 4)
    stage.until_updated("decode", FIRST, 4, UPDATED_S)
    stage.settle(UPDATED_S)
    pending, stuck, *rest = stack.pods("decode")
    healthy = {pod["metadata"]["uid"] for pod in rest}
    stage.cordon()
    stack.kubectl("delete", "pod", pending["metadata"]["name"], "-n", POOLS, "--wait=false")
    stage.until_given("dpool Ready=False Unschedulable", NOTICED_S)
    stage.break_engine(stuck, "freeze_scheduler")
    stage.until_given("dpool QueuesHealthy=False QueuesStuck", NOTICED_S)
    stage.scale("decode", 2)

    def gone() -> bool:
        return {pod["metadata"]["uid"] for pod in stack.pods("decode")} == healthy

    stage.until_gone("the Pending and the Stuck instance, and no other,", gone, UPDATED_S)


def drain_frozen(stage: Stage) -> None:
    """Scale decode from 2 to 1 while the scheduler of the instance that leaves is frozen, then back to 2."""
    stack = stage.stack
    last = stack.pods("decode")[-1]
    leaving = last["metadata"]["uid"]
    stage.break_engine(last, "freeze_scheduler")
    stage.scale("decode", 1)
    stage.until_given("event dpool DrainTimedOut", NOTICED_S)

    def gone() -> bool:
        pods = stack.look("pod", labels="pdpool.dev/role=decode")["items"]
        return leaving not in {pod["metadata"]["uid"] for pod in pods}

    stage.until_gone("the frozen decode engine", gone, UPDATED_S)
    stage.scale("decode", 2)

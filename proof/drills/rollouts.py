"""Deeds that change the specs of pools: roll-outs, broken roll-outs, and scale-in."""

import secrets
from typing import Final

from proof.drills.stage import FIRST, SIDES, Stage
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
        stage.until_said(word, NOTICED_S)
    mark = _mark()
    stage.update("decode", mark)
    stage.until_updated("decode", mark, 2, UPDATED_S)


def no_decode_left(stage: Stage) -> None:
    """Roll out a decode template that cannot run, and delete the engines that still have the good one."""
    stage.update("decode", _mark(), **MISSING_IMAGE)
    stage.stack.kubectl("delete", "pod", "-n", POOLS, "-l", "pdpool.dev/role=decode", "--wait=false")
    stage.until_said("dpool Available=False ImagePullFailed", NOTICED_S)
    stage.until_said("alert PdpoolServiceCannotServe", NOTICED_S)
    mark = _mark()
    stage.update("decode", mark)
    stage.until_updated("decode", mark, 2, UPDATED_S)


def scale_in_unfit(stage: Stage) -> None:
    """Scale decode from 4 to 2 while instance 0 is Pending and instance 1 is Stuck. The healthy ones must stay."""
    stack = stage.stack
    stage.scale("decode", 4)
    stage.until_updated("decode", FIRST, 4, UPDATED_S)
    stage.settle(UPDATED_S)
    healthy = {stack.look("pod", f"chat-decode-{n}-0")["metadata"]["uid"] for n in (2, 3)}
    for node in stack.nodes:
        stage.undo.callback(stack.kubectl, "uncordon", node)
        stack.kubectl("cordon", node)
    stack.kubectl("delete", "pod", "chat-decode-0-0", "-n", POOLS, "--wait=false")
    stage.until_said("dpool Ready=False Unschedulable", NOTICED_S)
    stage.freeze("chat-decode-1-0")
    stage.until_said("dpool QueuesHealthy=False QueuesStuck", NOTICED_S)
    stage.scale("decode", 2)

    def gone() -> bool:
        return {pod["metadata"]["uid"] for pod in stack.pods("decode")} == healthy

    stage.until_gone("decode instances 0 and 1, and no other", gone, UPDATED_S)


def drain_frozen(stage: Stage) -> None:
    """Scale decode from 2 to 1 while the instance that leaves is frozen, then back to 2."""
    stack = stage.stack
    leaving = stack.look("pod", "chat-decode-1-0")["metadata"]["uid"]
    stage.freeze("chat-decode-1-0")
    stage.scale("decode", 1)
    stage.until_said("event dpool DrainTimedOut", NOTICED_S)

    def gone() -> bool:
        pods = stack.look("pod", labels="pdpool.dev/role=decode")["items"]
        return leaving not in {pod["metadata"]["uid"] for pod in pods}

    stage.until_gone("the frozen decode engine", gone, UPDATED_S)
    stage.scale("decode", 2)

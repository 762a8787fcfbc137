"""Deeds that take something away: engines that fail, kubelets, nodes, the API server, the operator, a router."""

import contextlib
import os
import signal
from typing import Final

from pdpool_operator.api.names import API_VERSION

from dev.cluster.processes import pod_processes
from dev.shell import wait_for
from proof.cluster.stage import FIRST, Stage, is_ready, url_of
from proof.cluster.watch import UNREACHABLE
from tests.cluster.stack import POOLS, listed

KUBELET_SILENT_S: Final = 120.0
API_FROZEN_S: Final = 75.0
OPERATOR_AWAY_S: Final = 300.0
NOTICED_S: Final = 150.0
"""Longest time until a failing engine leaves rotation and the alert fires, in seconds."""
FENCED_S: Final = 60.0
REPLACED_S: Final = 240.0
"""Longest time until the pods of a lost node run elsewhere, in seconds."""


def failing_decode(stage: Stage) -> None:
    """Let one decode engine of two fail everything until it is out of rotation and the alert fires."""
    _failing(stage, "decode", "dpool")


def failing_prefill(stage: Stage) -> None:
    """Let one prefill engine of two fail everything until it is out of rotation and the alert fires."""
    _failing(stage, "prefill", "ppool")


def _failing(stage: Stage, side: str, kind: str) -> None:
    stack = stage.stack
    chosen = stack.pods(side)[-1]
    pod, url, key = chosen["metadata"]["name"], url_of(chosen), stack.router_key()
    stage.undo.callback(stage.fail_posts, pod, failing=False)
    stage.fail_posts(pod, failing=True)

    def still_listed() -> str | None:
        return f"{url} is listed" if any(url in urls for urls in stack.lists(key).values()) else None

    wait_for(f"{pod} to leave the rotation", still_listed, deadline_s=NOTICED_S, interval_s=0.5)
    stage.until_given(f"{kind} QueuesHealthy=False RequestsFailing", NOTICED_S)
    stage.until_given("alert PdpoolInstanceFailing", NOTICED_S)
    stage.fail_posts(pod, failing=False)


def kubelet_silent(stage: Stage) -> None:
    """Freeze the kubelet of a decode engine's node for two minutes. The engines go on."""
    node = stage.stack.pods("decode")[0]["spec"]["nodeName"]
    thaw = stage.freeze_program(f"kubelet-{node.removeprefix('node-')}")
    stage.hold(KUBELET_SILENT_S)
    thaw()


def node_lost(stage: Stage) -> None:
    """Lose a node: its kubelet stops, its containers are killed, its Node object is deleted. A person fences it."""
    node = stage.other_node()
    start = stage.stop_kubelet(node)
    for pid in set(pod_processes(node)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    stage.stack.kubectl("delete", "node", node, "--wait=false")

    def unmet() -> str | None:
        elsewhere = [p for p in stage.stack.pods("prefill", "decode", "router") if is_ready(p)]
        away = [p["metadata"]["name"] for p in elsewhere if p["spec"]["nodeName"] != node]
        return None if len(away) >= stage.pods else f"Ready on other nodes are {', '.join(away)}"

    wait_for(f"everything that ran on {node} to be Ready elsewhere", unmet, deadline_s=REPLACED_S)
    _fence(stage, node)
    start()

    def node_ready() -> str | None:
        conditions = '{.status.conditions[?(@.type=="Ready")].status}'
        try:
            found = stage.stack.kubectl("get", "node", node, "-o", f"jsonpath={conditions}")
        except UNREACHABLE as error:
            return str(error)
        return None if found == "True" else f"Ready is {found!r}"

    wait_for(f"{node} to be back", node_ready, deadline_s=REPLACED_S)


def _fence(stage: Stage, node: str) -> None:
    """Declare a node off, so that engines release what they hold for its processes."""
    name, kubectl = f"fence-{node}", stage.stack.kubectl
    stage.undo.callback(kubectl, "delete", "pooloperation", name, "-n", POOLS, "--ignore-not-found")
    stage.stack.apply(
        {
            "apiVersion": API_VERSION,
            "kind": "PoolOperation",
            "metadata": {"name": name},
            "spec": {"type": "Fence", "node": node},
        }
    )
    done = "--for=jsonpath={.status.phase}=Succeeded"
    kubectl("wait", "pooloperation", name, "-n", POOLS, done, f"--timeout={FENCED_S:.0f}s", timeout_s=FENCED_S + 10.0)


def api_server_frozen(stage: Stage) -> None:
    """Freeze the API server for 75 s."""
    thaw = stage.freeze_program("kube-apiserver")
    stage.hold(API_FROZEN_S)
    thaw()


def operator_away(stage: Stage) -> None:
    """Scale the operator to 0 for five minutes. Scale decode to 3 meanwhile, which it must do when it is back."""
    stack = stage.stack
    stage.undo.callback(stack.scale_operator, 1)
    stack.scale_operator(0)
    stage.scale("decode", 3)
    stage.hold(OPERATOR_AWAY_S)
    stage.until_given("alert PdpoolOperatorDown", NOTICED_S)
    stack.scale_operator(1)
    stage.until_updated("decode", FIRST, 3, REPLACED_S)


def router_lost(stage: Stage) -> None:
    """Kill the process of one router of two, and delete its pod at once."""
    stack = stage.stack
    lost = stack.pods("router")[0]
    name, uid = lost["metadata"]["name"], lost["metadata"]["uid"]
    os.kill(stage.process_of(name), signal.SIGKILL)
    stack.kubectl("delete", "pod", name, "-n", POOLS, "--grace-period=0", "--force", "--wait=false")

    def unmet() -> str | None:
        ready = [pod for pod in stack.pods("router") if is_ready(pod) and pod["metadata"]["uid"] != uid]
        engines, key = stack.engine_urls(), stack.router_key()
        full = [pod for pod in ready if listed(pod["status"]["podIP"], key) == engines]
        return None if len(full) >= 2 else f"{len(full)} of {len(ready)} new and old routers list all engines"

    wait_for("another router with a full list", unmet, deadline_s=REPLACED_S)

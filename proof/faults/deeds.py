"""How each fault begins. What must be undone goes to `stage.undo`."""

import contextlib
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pdpool_operator.api.names import CONTROL_PORT

from dev.packages import ensure_command
from dev.shell import Clock, run
from proof.cluster.stage import FIRST, SIDES
from proof.drills.failures import node_lost
from proof.faults.engine_deeds import fails, frozen, gauge_frozen, leaks, loads_hang
from proof.faults.scene import CHOSEN, Deed, Scene
from tests.cluster.stack import POOLS, SYSTEM
from tests.cluster.stack_traffic import WORKERS, Traffic

UPDATED_S: Final = 240.0
STOPPED_S, RUNS_S = 0.8, 0.2
KILLED_WITHIN_S: Final = 30.0
TRIED_S: Final = 110.0
"""Time until an engine that fails its requests has failed its trial too, in seconds. Only then is repair proposed."""


def stopped(side: str) -> Deed:
    """Return the deed that stops all threads of an engine. Nothing of it answers, so its kubelet restarts it."""

    def deed(scene: Scene) -> str:
        scene.stage.freeze(scene.pod(side)["metadata"]["name"])
        scene.watch.fault_now()
        return ""

    return deed


def burst(scene: Scene) -> str:
    """Add nine times as many clients."""
    url = scene.stage.stack.router_url()
    traffic = Traffic(url, scene.answers, patience_s=scene.patience_s, workers=9 * WORKERS)
    scene.watch.fault_now()
    scene.more.append(scene.stage.undo.enter_context(traffic))
    return ""


def slow_decode(scene: Scene) -> str:
    """Let a decode engine run only for a fifth of the time."""
    handle = os.pidfd_open(scene.stage.process_of(scene.pod("decode")["metadata"]["name"]))
    scene.stage.undo.callback(os.close, handle)
    ended = threading.Event()

    def throttle() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not ended.wait(RUNS_S):
                signal.pidfd_send_signal(handle, signal.SIGSTOP)
                ended.wait(STOPPED_S)
                signal.pidfd_send_signal(handle, signal.SIGCONT)

    thread = threading.Thread(target=throttle, name="throttle")
    scene.stage.undo.callback(thread.join, 10.0)
    scene.stage.undo.callback(ended.set)
    thread.start()
    scene.watch.fault_now()
    return ""


def engine_killed(scene: Scene) -> str:
    """Kill the process of a decode engine. Its kubelet starts the container again."""
    pid = scene.stage.process_of(scene.pod("decode")["metadata"]["name"])
    scene.watch.fault_now()
    os.kill(pid, signal.SIGKILL)
    return ""


def no_decode_left(scene: Scene) -> str:
    """Cordon all nodes and delete all decode engines, so that none can run."""
    scene.stage.cordon()
    scene.watch.fault_now()
    scene.stage.stack.kubectl("delete", "pod", "-n", POOLS, "-l", "pdpool.dev/role=decode", "--wait=false")
    return ""


def roll_out(scene: Scene) -> str:
    """Roll out new templates of both pools, to their end."""
    mark = secrets.token_hex(4)
    scene.watch.fault_now()
    for side in SIDES:
        scene.stage.update(side, mark)
    for side in SIDES:
        scene.stage.until_updated(side, mark, 2, UPDATED_S)
    return ""


def scale_down(scene: Scene) -> str:
    """Scale decode from 2 to 1. Back to 2 at the end."""
    stage = scene.stage
    stage.undo.callback(stage.until_updated, "decode", FIRST, 2, UPDATED_S)
    stage.undo.callback(stage.scale, "decode", 2)
    scene.watch.fault_now()
    stage.scale("decode", 1)
    stage.until_gone("one decode engine", lambda: len(stage.stack.pods("decode")) == 1, UPDATED_S)
    return ""


def operator_killed(scene: Scene) -> str:
    """Hang a decode engine, and kill the operator at a random moment. The moment follows from the run's number."""
    stage, guilty = scene.stage, frozen("decode")(scene)
    time.sleep(random.Random(scene.number).uniform(0, KILLED_WITHIN_S))
    os.kill(stage.process_of(stage.operator_pod()["metadata"]["name"], SYSTEM), signal.SIGKILL)
    return guilty


def one_peer_fails(scene: Scene) -> str:
    """Drop all packets from one prefill engine to one decode engine."""
    route = ("blackhole", f"{scene.pod('decode')['status']['podIP']}/32")
    inside = (*_in_network_of(scene, "prefill"), "ip", "route")
    scene.stage.undo.callback(run, *inside, "del", *route)
    run(*inside, "add", *route)
    scene.watch.fault_now()
    return ""


def _in_network_of(scene: Scene, side: str) -> tuple[str, ...]:
    """Return the words before a command that runs in the network of an engine. It works after the engine's end too."""
    pid = scene.stage.process_of(scene.pod(side)["metadata"]["name"])
    handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    scene.stage.undo.callback(os.close, handle)
    return "nsenter", f"--net=/proc/{os.getpid()}/fd/{handle}"


def rank_frozen(scene: Scene) -> str:
    """Freeze rank 1 of a decode engine of two ranks. Rank 0 waits for it."""
    first = scene.stage.process_of(scene.pod("decode")["metadata"]["name"])
    (rank,) = (pid for pid in _children(first) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
    scene.stage.freeze_process(rank)
    scene.watch.fault_now()
    return f"decode/{CHOSEN}"


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def control_lost(scene: Scene) -> str:
    """Drop what one prefill engine sends on its control connection to one decode engine. The other way is open."""
    ensure_command("iptables", Clock("faults"))
    decode = scene.pod("decode")["status"]["podIP"]
    packets = ("--protocol", "tcp", "--source-port", f"{CONTROL_PORT}", "--destination", decode)
    inside = (*_in_network_of(scene, "prefill"), "iptables", "--wait", "10")
    scene.stage.undo.callback(run, *inside, "--delete", "OUTPUT", *packets, "--jump", "DROP")
    run(*inside, "--append", "OUTPUT", *packets, "--jump", "DROP")
    scene.watch.fault_now()
    return ""


def kubelet_frozen(scene: Scene) -> str:
    """Freeze the kubelet of a decode engine's node. The engines go on."""
    node = scene.pod("decode")["spec"]["nodeName"]
    scene.stage.freeze_program(f"kubelet-{node.removeprefix('node-')}")
    scene.watch.fault_now()
    return ""


def node_dead(scene: Scene) -> str:
    """Lose a node with all that runs on it, until that runs elsewhere."""
    scene.watch.fault_now()
    node_lost(scene.stage)
    return ""


@dataclass(frozen=True)
class Play:
    """How a scenario is played.

    Attributes:
        deed: Begins the fault.
        lasts_s: Duration of a fault that is not repaired, in seconds.
        pools: Fields of the spec of both pools.
    """

    deed: Deed
    lasts_s: float = 60.0
    pools: Mapping[str, object] = field(default_factory=dict)


PLAYS: Final[Mapping[str, Play]] = {
    "decode-frozen": Play(frozen("decode")),
    "prefill-frozen": Play(frozen("prefill")),
    "decode-stopped": Play(stopped("decode"), lasts_s=150),
    "decode-fails": Play(fails("decode"), lasts_s=TRIED_S),
    "prefill-fails": Play(fails("prefill"), lasts_s=TRIED_S),
    "burst": Play(burst),
    "slow-decode": Play(slow_decode, lasts_s=75),
    "engine-killed": Play(engine_killed),
    "no-decode-left": Play(no_decode_left),
    "roll-out": Play(roll_out),
    "scale-down": Play(scale_down),
    "operator-killed": Play(operator_killed, lasts_s=90),
    "prefill-leaks": Play(leaks("prefill"), lasts_s=75),
    "decode-leaks": Play(leaks("decode"), lasts_s=75),
    "one-peer-fails": Play(one_peer_fails, lasts_s=75),
    "control-lost": Play(control_lost, lasts_s=75),
    "kubelet-frozen": Play(kubelet_frozen, lasts_s=120),
    "node-dead": Play(node_dead),
    "rank-frozen": Play(rank_frozen, lasts_s=TRIED_S, pools={"parallelism": {"tensor": 2}}),
    "loads-hang": Play(loads_hang, lasts_s=75),
    "gauge-frozen": Play(gauge_frozen, lasts_s=75),
}
"""By the names of tests/cluster/faults.yaml, in the order of a session."""

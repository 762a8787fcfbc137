"""The stage of a drill or a fault: the whole stack with traffic, and what deeds do to it. All is undone at the end."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from dev.cluster import supervise
from dev.cluster.layout import State
from dev.processes import send
from dev.shell import wait_for
from proof.cluster.watch import ANSWER_S, UNREACHABLE
from proof.cluster.witness import Witness
from tests.cluster.stack import (
    DRAIN_S,
    HTTP_PORT,
    POOL_KINDS,
    POOLS,
    SYSTEM,
    Object,
    Stack,
    ask,
    condition,
    pool,
    service,
)
from tests.cluster.stack_fault import CONFIG, FLAG, HANGS, TEMPLATE
from tests.cluster.stack_processes import process_of

SIDES = {"prefill": "ppool", "decode": "dpool"}
ENGINES = 2
"""Of each side."""
ROUTERS = 2
ENGINE: Object = {"args": ["--enable-faults"]}
"""Fields of the engines' containers, beside those of `stack_fault`."""
MARK = "example.com/mark"
FIRST = "first"
"""Mark of the templates at the beginning of a drill."""
CLEAR_S = 120
"""Longest wait until all objects of a run are deleted, in seconds."""
QUIET_S = 60.0
"""Longest wait for empty queues after the traffic has ended, in seconds."""


class Stage:
    """Two prefill engines, two decode engines and routers, and everything that a deed needs.

    Args:
        stack: The installed chart.
        state: Files of the local cluster.
        routers: Number of routers.
    """

    def __init__(self, stack: Stack, state: State, *, routers: int = ROUTERS) -> None:
        self.stack = stack
        self.undo = contextlib.ExitStack()
        """Undone at the end of a deed, also after an error."""
        self.witness: Witness | None = None
        self._state = state
        self._routers = routers

    # ------------------------------------------------------------------ set the scene

    def begin(self, pools: Mapping[str, Any] | None = None, **spec: Any) -> None:  # noqa: ANN401 - any field
        """Bring the stack to its first state: all Ready, all listed, all idle.

        Args:
            pools: Fields of the spec of both pools.
            spec: Fields of the service's spec.
        """
        for node in self.stack.nodes:
            self.stack.kubectl("uncordon", node)
        self.stack.apply(CONFIG)
        objects = [self._pool(kind, ENGINES, **pools or {}) for kind in POOL_KINDS]
        self.stack.apply(*objects, service(router={"replicas": self._routers}, **spec))
        self.settle(240.0)

    @property
    def pods(self) -> int:
        """Number of its engines and routers."""
        return len(SIDES) * ENGINES + self._routers

    def clear(self) -> None:
        """Delete the pools and the service, and all that the operator remembers of them."""
        kinds = ",".join((*SIDES.values(), "pdsvc"))
        self.stack.kubectl(
            "delete", kinds, "chat", "-n", POOLS, "--ignore-not-found", f"--timeout={CLEAR_S}s", timeout_s=CLEAR_S + 10
        )

        def left() -> str | None:
            return ", ".join(self.stack.uids()) or None

        wait_for("the pods of the former run to be gone", left, deadline_s=CLEAR_S)

    def _pool(self, kind: str, replicas: int, **spec: Any) -> Object:  # noqa: ANN401 - any field
        return pool(kind, replicas, drainTimeoutSeconds=DRAIN_S, template=template(FIRST, **ENGINE), **spec)

    def settle(self, deadline_s: float) -> None:
        """Wait until all objects are Ready and the routers list exactly the engines that are Ready.

        Raises:
            TimeoutError: not in time.
        """
        end = time.monotonic() + deadline_s
        for kind in (*SIDES.values(), "pdsvc"):
            self.stack.until(kind, "Ready", deadline_s=max(1.0, end - time.monotonic()), status="True")
        self.stack.until_listed(self._routers, deadline_s=max(1.0, end - time.monotonic()))

    def stuck_after(self) -> int:
        """Return how many engines still hold requests or memory, after a wait for those under way."""
        with contextlib.suppress(TimeoutError):
            wait_for("all queues to be empty and nothing held", self.stack.work_left, deadline_s=QUIET_S)
        left = self.stack.work_left()
        return len(left.split("; ")) if left else 0

    # ------------------------------------------------------------------ tools of the deeds

    def until_given(self, word: str, deadline_s: float) -> None:
        """Wait until a word is given, or was given earlier in this drill.

        Raises:
            TimeoutError: it was not given.
        """
        witness = self.witness
        assert witness is not None, "words are recorded only while a drill runs"
        wait_for(
            f"the word {word!r}",
            lambda: None if word in witness.first else f"given were {', '.join(witness.words)}",
            deadline_s=deadline_s,
        )

    def hold(self, seconds: float) -> None:
        """Let a fault last. The duration is what the drill is about."""
        time.sleep(seconds)

    def update(self, side: str, mark: str, **container: object) -> None:
        """Give a pool a new template: a mark, and other fields of the engine's container."""
        self.stack.patch(SIDES[side], {"template": template(mark, **ENGINE | container)})

    def scale(self, side: str, replicas: int) -> None:
        """Set the replicas of a pool."""
        self.stack.kubectl("scale", f"{SIDES[side]}/chat", "-n", POOLS, f"--replicas={replicas}")

    def until_updated(self, side: str, mark: str, number: int, deadline_s: float) -> None:
        """Wait until this number of engines of a side carries a mark and is Ready."""

        def unmet() -> str | None:
            pods = [p for p in self.stack.pods(side) if marked(p) == mark and is_ready(p)]
            return None if len(pods) >= number else f"{len(pods)} carry {mark}"

        wait_for(f"{number} {side} engines with the template {mark}", unmet, deadline_s=deadline_s)

    def fail_posts(self, pod: str, *, failing: bool) -> None:
        """Make an engine fail every POST, or end that."""
        self._flag(pod, FLAG, exists=failing)

    def hang_reports(self, pod: str, *, hanging: bool) -> None:
        """Make `/v1/loads` and `/metrics` of an engine accept requests and never answer, or end that."""
        self._flag(pod, HANGS, exists=hanging)

    def _flag(self, pod: str, flag: str, *, exists: bool) -> None:
        change = ("touch", flag) if exists else ("rm", "-f", flag)
        self.stack.kubectl("exec", pod, "-n", POOLS, "-c", "engine", "--", *change)

    def break_engine(self, pod: Object, fault: str) -> None:
        """Set a fault of the reference engine, such as `freeze_scheduler`, until the end of the deed."""

        def mend() -> None:
            with contextlib.suppress(OSError):  # its pod may be gone
                self.set_fault(pod, fault, on=False)

        self.undo.callback(mend)
        self.set_fault(pod, fault, on=True)

    def set_fault(self, pod: Object, fault: str, *, on: bool) -> None:
        """Set a fault of the reference engine, or end it."""
        ask(f"http://{pod['status']['podIP']}:{HTTP_PORT}/faults", {fault: on}, timeout_s=ANSWER_S)

    def process_of(self, name: str, within: str = POOLS) -> int:
        """Return the PID on this machine of the first process of a pod's container."""
        pid: int = process_of(self.stack, self.stack.look("pod", name, within=within))
        return pid

    def freeze(self, name: str) -> Callable[[], None]:
        """Freeze the engine of a pod. Return what thaws it; that also happens at the end of the drill."""
        return self.freeze_process(self.process_of(name))

    def freeze_program(self, name: str) -> Callable[[], None]:
        """Freeze a program of the cluster, such as `kube-apiserver` or `kubelet-1`. Return what thaws it."""
        return self.freeze_process(supervise.process_ids(self._state)[name])

    def freeze_process(self, pid: int) -> Callable[[], None]:
        """Freeze a process. Return what thaws it; that also happens at the end of the drill."""
        handle = os.pidfd_open(pid)  # the process number may belong to another process at the end
        send(pid, signal.SIGSTOP)

        def thaw() -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGCONT)

        self.undo.callback(os.close, handle)
        self.undo.callback(thaw)
        return thaw

    def stop_kubelet(self, node: str) -> Callable[[], None]:
        """Stop a node's kubelet. Return what starts it."""
        name = f"kubelet-{node.removeprefix('node-')}"

        def start() -> None:
            supervise.start_program(self._state, name)

        self.undo.callback(start)
        supervise.stop_program(self._state, name)
        return start

    def cordon(self) -> None:
        """Let no node take new pods until the end of the deed."""
        for node in self.stack.nodes:
            self.undo.callback(self.stack.kubectl, "uncordon", node)
            self.stack.kubectl("cordon", node)

    def operator_pod(self) -> Object:
        """Return the pod of the operator."""
        pod: Object
        (pod,) = self.stack.look("pod", labels="app.kubernetes.io/component=operator", within=SYSTEM)["items"]
        return pod

    def other_node(self) -> str:
        """Return a node without the operator."""
        name: str
        busy = self.operator_pod()["spec"]["nodeName"]
        name = next(node for node in self.stack.nodes if node != busy)
        return name

    def until_gone(self, what: str, gone: Callable[[], bool], deadline_s: float) -> None:
        """Wait until something is no longer there. An API server that does not answer counts as not yet."""

        def unmet() -> str | None:
            try:
                return None if gone() else "it is still there"
            except UNREACHABLE as error:
                return str(error)

        wait_for(what, unmet, deadline_s=deadline_s)


def thaw(state: State) -> None:
    """Continue and start every program of the cluster that a killed session left frozen or stopped."""
    for name, pid in supervise.process_ids(state).items():
        if pid:
            os.kill(pid, signal.SIGCONT)
        else:
            supervise.start_program(state, name)


def template(mark: str, **container: object) -> Object:
    """Return a pod template whose engine can fail on demand, with a mark and other fields of the engine's container."""
    spec = TEMPLATE["spec"]
    engine = spec["containers"][0] | container
    return {"metadata": {"annotations": {MARK: mark}}, "spec": spec | {"containers": [engine]}}


def is_ready(pod: Object) -> bool:
    """Return whether Kubernetes counts a pod as Ready."""
    return bool(condition(pod, "Ready").get("status") == "True")


def marked(pod: Object) -> str:
    """Return the mark of the template that a pod has, empty without one."""
    mark: str = pod["metadata"].get("annotations", {}).get(MARK, "")
    return mark


def url_of(pod: Object) -> str:
    """Return the URL under which routers list an engine."""
    return f"http://{pod['status'].get('podIP')}:{HTTP_PORT}"

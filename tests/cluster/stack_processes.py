"""Processes of pods, as seen from this machine, which is the cluster's node."""

import contextlib
import os
import signal
from collections.abc import Iterator

from dev.processes import send
from tests.cluster.stack import Object, Stack


def process_of(stack: Stack, pod: Object) -> int:
    """Return the PID on this machine of the first process of a pod's container."""
    (status,) = pod["status"]["containerStatuses"]
    container = status["containerID"].removeprefix("containerd://")
    tasks = [line.split() for line in stack.ctr(pod["spec"]["nodeName"], "tasks", "ls").splitlines()]
    return next(int(pid) for task, pid, _ in tasks[1:] if task == container)


@contextlib.contextmanager
def frozen(stack: Stack, pod: Object) -> Iterator[None]:
    """Freeze the engine of a pod while the block runs. It may be killed meanwhile."""
    pid = process_of(stack, pod)
    handle = os.pidfd_open(pid)  # the process number may belong to another process at the end
    try:
        send(pid, signal.SIGSTOP)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGCONT)
        os.close(handle)

"""Processes of tests that start in milliseconds: one that has imported what they share forks itself for each.

Loading numpy, aiohttp and the connector takes most of a second of CPU, and the tests start hundreds of processes. No
data plane's library is loaded before the fork: each process loads it for itself. It ends by the interpreter's own
shutdown, so that a crash at exit is seen.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN_CODE = {"PYTHONPATH": str(ROOT / "connector")}
"""The connector beside these tests, which may be a copy with a fault in it, before the one that is installed."""
STARTED_BY = ("tests.integration.backend_peer", "tests.integration.connector_peer")
"""The modules whose processes come from here; each is imported before the first fork."""
REQUEST_BYTES = 1 << 16
FORK_S = 180.0
"""How long a fork may take; the first one waits for the imports."""


class Forked:
    """A process that runs `main` of a module, with pipes at its stdin and stdout: what the tests use of a Popen."""

    def __init__(self, module: str, env: dict[str, str]) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self._status, theirs_status = os.pipe()
        passed = [theirs_in, theirs_out, 2, theirs_status]
        try:
            self.pid = _fork(json.dumps({"module": module, "env": env}).encode(), passed)
        except BaseException:
            for descriptor in (ours_in, ours_out, self._status):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (theirs_in, theirs_out, theirs_status):
                os.close(descriptor)
        self.stdin = os.fdopen(ours_in, "wb")
        self.stdout = os.fdopen(ours_out, "rb")
        self.returncode: int | None = None
        assert self.pid, "the process that forks has ended"

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        return self._wait(0)

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> None:
        """Wait for its end after a kill, and close the pipes."""
        self.wait(10)
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()

    def _wait(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode


_asking = threading.Lock()


def _fork(request: bytes, passed: list[int]) -> int:
    """Have a process forked; its id, 0 where the process that forks has ended."""
    with _asking:
        parent = _parent(os.getpid())
        try:
            socket.send_fds(parent, [request], passed)
            return int(parent.recv(REQUEST_BYTES) or b"0")
        except BaseException:
            # An answer that comes after all would be taken for that to the next request.
            parent.close()
            _parent.cache_clear()
            raise


@functools.cache
def _parent(_pid: int) -> socket.socket:
    """The connection to the process that forks: one for each process of the tests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.integration.forked", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env={**os.environ, **OWN_CODE, "OPENBLAS_NUM_THREADS": "1"},
        )
    ours.settimeout(FORK_S)

    def end() -> None:
        ours.close()
        process.wait(10)

    atexit.register(end)
    return ours


def _serve(connection: socket.socket) -> Callable[[], None]:
    """Fork for each request and report how each child ended, until the tests end. In a child: return its work."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    children: dict[int, tuple[int, int]] = {}
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != connection.fileno():
                pid, status = children.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(status)
                continue
            request, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 4)
            if not request:
                sys.exit(0)
            assert _threads() == 1, "only a process of one thread may fork"
            pid = os.fork()
            if pid == 0:
                connection.detach()
                return _become(descriptors, **json.loads(request))
            status = descriptors.pop()
            for theirs in descriptors:
                os.close(theirs)
            watch = os.pidfd_open(pid)
            children[watch] = (pid, status)
            poll.register(watch, select.POLLIN)
            connection.send(str(pid).encode())


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _become(descriptors: list[int], module: str, env: dict[str, str]) -> Callable[[], None]:
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(env)
    main: Callable[[], None] = importlib.import_module(module).main
    return main


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in STARTED_BY:
        importlib.import_module(name)
    run = _serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()

"""Starts engines and router as child processes on loopback, knows their addresses, and ends them all."""

import contextlib
import ctypes
import importlib.util
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdpool_connector.flight.record import SUFFIX

from pdpool_reference.request_body import MAX_BODY_BYTES

HOST = "127.0.0.1"
START_S = 60.0
STOP_S = 10.0
PROBE_S = 0.1
REPORT_S = 2.0
"""A wait reports this often that it goes on."""
LOG_END_LINES = 20
TRACEBACK = "Traceback (most recent call last):"
LOGS_PREFIX = "pdpool-logs-"
PORTS = range(12_000, 30_000)
"""Below the ports that Linux (ip_local_port_range) and Kubernetes (NodePorts) hand out."""
TRIED_PORTS = 100
LOOK_S = 10.0
SILENT_S = 120.0
"""A process that has answered nothing for so long hangs as a whole. The router waits much longer: its only limit is
that of the longest stream. On a cluster the liveness probe ends such an engine."""
SNAPSHOT_S = 3.0
"""A connector's state shows an event after this time at the latest."""

ROUTER_FLAGS = (
    *("--policy", "round_robin", "--worker-startup-timeout-secs", "30", "--log-level", "warn"),
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "2", "--health-check-timeout-secs", "3"),
    *("--disable-circuit-breaker", "--max-payload-size", str(MAX_BODY_BYTES)),
)
"""The router image's entrypoint gives the reasons; its flags fit a cluster."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class LaunchError(Exception):
    """A process did not start, or ended. The message has the end of its log, and the path of the whole log."""


@dataclass
class Child:
    """One child process. `addresses` is the line that an engine printed; a router prints none."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    addresses: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Base URL of its HTTP interface."""
        url: str = self.addresses["http"]
        return url

    def end_of_log(self) -> str:
        """Return why it ended, from its log: the message of an exception without traceback, else the last lines."""
        lines = self.log.read_text(errors="replace").rstrip().splitlines()
        if any(line.startswith(TRACEBACK) for line in lines):
            lines = lines[-1:]
        end = "\n".join(lines[-LOG_END_LINES:]) or "it wrote nothing"
        return f"{end}\nits whole log: {self.log}"

    def stop(self, timeout_s: float = STOP_S) -> int:
        """End it by SIGTERM, and by SIGKILL when that takes too long. Returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait(STOP_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


class Children:
    """The processes of one deployment. Leaving the `with` block ends them all, the last started first.

    They also end when this process is killed: the kernel sends them SIGKILL. Linux only, and the thread that starts
    them must live on: use the main thread.

    Args:
        say: called with a line for each step.
    """

    def __init__(self, say: Callable[[str], None] = lambda _: None) -> None:
        self._say = say
        self._children: list[Child] = []
        remove_abandoned_logs()
        self.logs = Path(tempfile.mkdtemp(prefix=f"{LOGS_PREFIX}{os.getpid()}-"))
        self.flights = self.logs / "flights"
        """Folder for the engines' records of failed hand-offs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(keep_logs=isinstance(error, LaunchError))
        if isinstance(error, LaunchError) and any(self.flights.glob(f"*{SUFFIX}")):
            error.add_note(f"records of failed hand-offs, for `pdpool connector replay FILE`: {self.flights}")

    def stop(self, *, keep_logs: bool = False) -> None:
        """End all: signal all at once, then wait for each.

        Removes logs and records. `keep_logs` leaves them until the next process starts children.
        """
        for child in reversed(self._children):
            if child.process.poll() is None:
                child.process.terminate()
        for child in reversed(self._children):
            child.stop()
        self._children.clear()
        if not keep_logs and self.logs.exists():
            shutil.rmtree(self.logs)

    def wait_for_end_of_any(self) -> None:
        """Wait until one of them ends, or hangs and is killed. Raises LaunchError then."""
        answered = dict.fromkeys((child.process.pid for child in self._children), time.monotonic())
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for child in self._children:
                pidfd = os.pidfd_open(child.process.pid)
                stack.callback(os.close, pidfd)
                selector.register(pidfd, selectors.EVENT_READ, child)
            while not (events := selector.select(LOOK_S)):
                for child in self._children:
                    _end_if_silent(child, answered)
            ended: Child = events[0][0].data
        raise LaunchError(f"{ended.name} ended with code {ended.process.wait(STOP_S)}:\n{ended.end_of_log()}")

    def engine(
        self, mode: str, *, model_path: str, backend: str = "local", name: str | None = None, extra: Sequence[str] = ()
    ) -> Child:
        """Start an engine on free ports and wait until it listens. Raises LaunchError."""
        return self.listening(self.begin_engine(mode, model_path=model_path, backend=backend, name=name, extra=extra))

    def begin_engine(
        self, mode: str, *, model_path: str, backend: str = "local", name: str | None = None, extra: Sequence[str] = ()
    ) -> Child:
        """Start an engine on free ports; use it when `listening` has returned."""
        command = [sys.executable, "-m", "pdpool_reference", "--mode", mode, "--model-path", model_path]
        command += ["--host", HOST, "--advertise-host", HOST, "--transfer-backend", backend]
        command += ["--flight-dir", str(self.flights)]
        for port in ("--port", "--bootstrap-port", "--control-port", "--admin-port"):
            command += [port, "0"]
        return self._spawn(name or mode, [*command, *extra], {"UCX_NET_DEVICES": "lo"})

    def listening(self, child: Child) -> Child:
        """Wait until an engine listens. Returns it. Raises LaunchError."""
        child.addresses = self._ready_line(child)
        self._say(f"{child.name} engine listens on {child.url}")
        return child

    def router(
        self, prefill: Sequence[Child], decode: Sequence[Child], *, port: int = 0, extra: Sequence[str] = ()
    ) -> Child:
        """Start sglang-router over these engines and wait until it serves. Raises LaunchError."""
        port = port or free_port()
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", HOST]
        command += ["--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(free_port())]
        for child in prefill:
            command += ["--prefill", child.url, str(child.addresses["bootstrap_port"])]
        for child in decode:
            command += ["--decode", child.url]
        command += ROUTER_FLAGS
        child = self._spawn("router", [*command, *extra], {})
        child.addresses = {"http": f"http://{HOST}:{port}"}
        self._await_status(child, "/readiness")
        self._say(f"router serves on {child.url}")
        return child

    def _spawn(self, name: str, command: list[str], env: dict[str, str]) -> Child:
        log = self.logs / f"{len(self._children)}-{name}.log"
        parent = os.getpid()
        with log.open("wb") as errors:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if name != "router" else errors,
                stderr=errors,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
                start_new_session=True,  # Ctrl-C at the terminal reaches this process only, which ends them in order
                preexec_fn=lambda: _die_with(parent),
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def _ready_line(self, child: Child) -> dict[str, Any]:
        """Return the first line that an engine prints."""
        assert child.process.stdout is not None
        deadline = time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            selector.register(child.process.stdout, selectors.EVENT_READ)
            while not selector.select(REPORT_S) and time.monotonic() < deadline:
                self._say(f"waiting for the {child.name} engine to load and to listen")
            if not selector.select(0):
                raise LaunchError(f"{child.name} did not listen within {START_S:.0f} s:\n{child.end_of_log()}")
        line = child.process.stdout.readline()
        if not line:
            code = child.process.wait(STOP_S)
            raise LaunchError(f"{child.name} ended with code {code} before it listened:\n{child.end_of_log()}")
        addresses: dict[str, Any] = json.loads(line)
        return addresses

    def _await_status(self, child: Child, path: str) -> None:
        """Poll until 200: the router has no other sign that it serves."""
        reported = time.monotonic()
        deadline = reported + START_S
        while get_status(child.url + path) != 200:
            if (code := child.process.poll()) is not None:
                raise LaunchError(f"{child.name} ended with code {code}:\n{child.end_of_log()}")
            if time.monotonic() > deadline:
                raise LaunchError(f"{child.name} did not serve within {START_S:.0f} s:\n{child.end_of_log()}")
            if time.monotonic() > reported + REPORT_S:
                reported = time.monotonic()
                self._say(f"waiting for the {child.name} to find its engines healthy and to serve")
            time.sleep(PROBE_S)


def _end_if_silent(child: Child, answered: dict[int, float]) -> None:
    """Check a process, and note when it answered. Raises LaunchError when it has not answered for too long."""
    if get_status(child.url + "/health") is not None:
        answered[child.process.pid] = time.monotonic()
    elif time.monotonic() - answered[child.process.pid] > SILENT_S:
        child.process.kill()
        raise LaunchError(f"{child.name} answered nothing for {SILENT_S:.0f} s, and was ended:\n{child.end_of_log()}")


def remove_abandoned_logs() -> None:
    """Remove the logs of this user's processes that have ended without removing them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{LOGS_PREFIX}*-*"):
        owner = folder.name.removeprefix(LOGS_PREFIX).split("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            if owner.isdigit() and folder.stat().st_uid == os.getuid() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(folder)


def get_status(url: str) -> int | None:
    """Return the status of a GET, None without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - loopback URLs made here
            status: int = response.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def get_json(url: str) -> dict[str, Any]:
    """Return the body of a GET, a JSON object."""
    with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - a loopback URL made here
        body: dict[str, Any] = json.load(response)
        return body


def bytes_moved(decode: Child) -> int:
    """Return the bytes of KV cache that a decode engine has received; waits shortly for the first."""
    deadline = time.monotonic() + SNAPSHOT_S
    while True:
        moved: int = get_json(f"http://{decode.addresses['admin']}/v1/state")["bytes_moved_total"]
        if moved or time.monotonic() > deadline:
            return moved
        time.sleep(PROBE_S)


def check_free(port: int) -> None:
    """Raise LaunchError when nothing can listen on this port; 0 is always free."""
    with contextlib.closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise LaunchError(f"port {port} cannot be used: {error.strerror}; choose another one") from error


def free_port() -> int:
    """Return a free TCP port outside the kernel's own range for any port. Raises LaunchError."""
    for port in secrets.SystemRandom().sample(PORTS, TRIED_PORTS):
        with contextlib.suppress(LaunchError):
            check_free(port)
            return port
    raise LaunchError(f"none of {TRIED_PORTS} ports from {PORTS.start} to {PORTS.stop - 1} is free")


def pick_backend(wanted: str) -> str:
    """Return the transfer backend: for `auto`, NIXL where it is installed, otherwise `local`."""
    if wanted != "auto":
        return wanted
    return "nixl" if importlib.util.find_spec("nixl_cu12") or importlib.util.find_spec("nixl") else "local"


def _die_with(parent: int) -> None:
    """In the child, before exec: die with the parent, also if it has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

"""Starts SGLang servers, watches them, sends them signals, and ends them. Touches only its own processes."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from dev.processes import end_group, kill_group, members, send
from dev.progress import Progress, ticking
from proof.engines.environment import HERE, EnginesError, Environment, install_pdpool
from proof.engines.launch import PORTS, Backend, Launch, Ports, command, variables

START_S: Final = 400.0
"""A pair takes 60 to 110 s on two idle cores."""
END_S: Final = 30.0
GET_S: Final = 10.0
TAIL_LINES: Final = 15
TAIL_ERRORS: Final = 5
SCHEDULER: Final = "sglang::scheduler"
"""Beginning of the title of the processes that run the model."""


class Server:
    """One running server. It is the leader of a process group of its own."""

    def __init__(self, launch: Launch, ports: Ports, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.launch = launch
        self.ports = ports
        self.log = log
        self._process = process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    def alive(self) -> bool:
        return self._process.poll() is None

    def tail(self) -> str:
        """Return the first errors in the log, and its last lines. Other errors follow from the first."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line[:500] for line in lines[:-TAIL_LINES] if "Error: " in line]
        return "\n".join(errors[:TAIL_ERRORS] + lines[-TAIL_LINES:])

    def check(self) -> None:
        """Raise EnginesError with the end of the log if the server has died."""
        if not self.alive():
            code = self._process.returncode
            raise EnginesError(f"{self.launch.name} ended with {code}; the end of {self.log}:\n{self.tail()}")

    def ready(self) -> bool:
        """Whether it serves; raises EnginesError if it has died."""
        self.check()
        with contextlib.suppress(OSError):
            get(f"{self.url}/model_info")
            return True
        return False

    def loads(self) -> list[dict[str, Any]]:
        """Return SGLang's own counters, one entry for each DP rank."""
        found: list[dict[str, Any]] = get(f"{self.url}/v1/loads?include=all")["loads"]
        return found

    def connectors(self) -> list[dict[str, Any]]:
        """Return the state of each rank's connector; none where the backend is not pdpool."""
        if self.launch.backend != "pdpool":
            return []
        return [get(f"http://127.0.0.1:{self.ports.admin + rank}/v1/state") for rank in range(self.launch.ranks)]

    def schedulers(self) -> list[int]:
        """Return the ids of the processes that run the model, by rank."""
        found = []
        for pid in members(self._process.pid):
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if title.startswith(SCHEDULER):
                    found.append((title, pid))
        return [pid for _, pid in sorted(found)]

    def cpu_s(self) -> float:
        """Return the CPU seconds that the schedulers have used."""
        return sum(_cpu_s(pid) for pid in self.schedulers())

    def pin(self) -> None:
        """Give all its threads the one core of its launch. Its start may use all of them."""
        if self.launch.core is None:
            return
        cores = sorted(os.sched_getaffinity(0))
        chosen = {cores[self.launch.core % len(cores)]}
        for pid in members(self._process.pid):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), chosen)

    def signal_schedulers(self, number: signal.Signals) -> None:
        """Send a signal to the processes that run the model. A stop has taken effect when this returns."""
        for pid in self.schedulers():
            send(pid, number)

    def kill(self) -> None:
        """Kill all its processes at once, as the loss of a pod does."""
        kill_group(self._process, END_S)

    def stop(self) -> float:
        """End it by SIGTERM, and what is left after `END_S` by SIGKILL. Returns the seconds that took."""
        begun = time.monotonic()
        end_group(self._process, END_S)
        return time.monotonic() - begun


@dataclass
class Pair:
    """A prefill and a decode server. Each request gets a room of its own."""

    prefill: Server
    decode: Server
    room: int = 0

    @property
    def backend(self) -> Backend:
        return self.decode.launch.backend

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    def rooms(self, count: int) -> int:
        """Take successive rooms; returns the first."""
        first = self.room + 1
        self.room += count
        return first


class Stage:
    """The servers of a run, and the folder with their logs. Ends them all at its end."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.environment = environment
        self.folder = folder
        self._running: list[Server] = []
        self._started = 0
        self._plugins: dict[str, Path] = {}

    def __enter__(self) -> Self:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(*self._running)

    def start(self, *launches: Launch) -> list[Server]:
        """Start servers beside each other and wait until all serve.

        Raises:
            EnginesError: one died, or did not serve within `START_S`; the end of its log is in the message.
        """
        return self._wait([self._begin(launch, Ports(self._free_ports())) for launch in launches])

    def restart(self, server: Server) -> Server:
        """Start a dead server again at its addresses, and wait until it serves."""
        self._running.remove(server)
        return self._wait([self._begin(server.launch, server.ports)])[0]

    def pair(self, prefill: Launch, decode: Launch) -> Pair:
        """Start both sides."""
        first, second = self.start(prefill, decode)
        return Pair(first, second, room=random.randrange(1 << 40))

    def trio(self, prefill: Launch, decode: Launch, unified: Launch) -> tuple[Pair, Server]:
        """Start both sides and the unified server beside each other."""
        first, second, third = self.start(prefill, decode, unified)
        return Pair(first, second, room=random.randrange(1 << 40)), third

    def end(self, *servers: Server) -> None:
        """End servers, all at the same time."""
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                server._process.terminate()
        for server in servers:
            server.stop()
            self._running = [other for other in self._running if other is not server]

    def _free_ports(self) -> int:
        """Return the first of free ports. A server that still starts has not bound its own yet."""
        return free_ports([server.ports.first for server in self._running])

    def _begin(self, launch: Launch, ports: Ports) -> Server:
        self._started += 1
        log = self.folder / "logs" / f"{self._started:02}-{launch.name}.log"
        added = variables(launch, ports, self._plugin(launch.backend))
        inherited = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(launch, ports, self.environment),
                cwd=self.folder,
                env=inherited | dict(added),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(launch, ports, process, log)
        self._running.append(server)
        return server

    def _wait(self, servers: list[Server]) -> list[Server]:
        names = ", ".join(server.launch.name for server in servers)
        deadline = time.monotonic() + START_S
        waiting = list(servers)
        with ticking(Progress(), lambda: f"  starting {names}: {len(servers) - len(waiting)} of {len(servers)} serve"):
            while waiting := [server for server in waiting if not server.ready()]:
                if time.monotonic() > deadline:
                    late = waiting[0]
                    raise EnginesError(f"{late.launch.name} does not serve after {START_S:.0f} s; log:\n{late.tail()}")
                time.sleep(0.5)
        for server in servers:
            server.pin()
        return servers

    def _plugin(self, backend: Backend) -> Path | None:
        if backend == "none":
            return None
        kind = backend.partition("-")[0]
        if kind not in self._plugins:
            target = self.folder / f"plugin-{kind}"
            (install_pdpool if kind == "pdpool" else install_stock_plugin)(target)
            self._plugins[kind] = target
        return self._plugins[kind]


def install_stock_plugin(target: Path) -> None:
    """Write `stock_nixl` as an installed package into a folder for `PYTHONPATH`."""
    shutil.rmtree(target, ignore_errors=True)
    about = target / "pdpool_stock_nixl-0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(HERE / "stock_nixl.py", target / "pdpool_stock_nixl.py")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pdpool-stock-nixl\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\nstock-nixl = pdpool_stock_nixl:register\n")


def get(url: str) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON at a URL.

    Raises:
        OSError: no answer within `GET_S`, or another status than 200.
    """
    with urllib.request.urlopen(url, timeout=GET_S) as answer:
        return json.load(answer)


def free_ports(taken: Sequence[int], tries: int = 200) -> int:
    """Return the first of `PORTS` successive free TCP ports, below those that the kernel gives to clients.

    `taken` are first ports of other servers.
    """
    for _ in range(tries):
        first = random.randrange(20_000, 32_000 - PORTS)
        if any(abs(first - other) < PORTS for other in taken):
            continue
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + PORTS):
                    stack.enter_context(socket.socket()).bind(("0.0.0.0", port))
            except OSError:
                continue
            return first
    raise EnginesError(f"no {PORTS} successive TCP ports are free between 20000 and 32000")


def restarted(stage: Stage, pair: Pair, side: str) -> None:
    """Start one side of a pair again at its addresses."""
    setattr(pair, side, stage.restart(getattr(pair, side)))


def all_idle(servers: Sequence[Server]) -> dict[str, float]:
    """Return what is not zero in servers without work: queues, KV tokens, the connectors' attempts and holds."""
    found: dict[str, float] = {}
    for server in servers:
        for load in server.loads():
            counters = {name: load[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")}
            counters |= {n: v for n, v in load["disaggregation"].items() if n.endswith("_reqs")} | load["queues"]
            where = f"{server.launch.name}/{load['dp_rank']}"
            found |= {f"{where} {name}": value for name, value in counters.items() if value}
        for rank, state in enumerate(server.connectors()):
            where = f"{server.launch.name} connector {rank}"
            attempts = sum(queue["reqs"] for queue in state["attempts"].values())
            counted = {"attempts": attempts, "holds": state["holds"], "faults": state["faults"]}
            found |= {f"{where} {name}": value for name, value in counted.items() if value}
    return found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

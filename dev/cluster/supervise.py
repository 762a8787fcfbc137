"""Runs the cluster's programs under supervisord, independent of the shell that started it."""

import hashlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, ServerProxy

from supervisor.xmlrpc import SupervisorTransport

from dev.cluster.components import Program, environment
from dev.cluster.layout import MARKER, State
from dev.cluster.processes import marked
from dev.shell import run, wait_for, write_text


def _socket(state: State) -> Path:
    return state.root / "supervisor.sock"


def _configuration_file(state: State) -> Path:
    return state.config / "supervisord.conf"


def process_id(state: State) -> int | None:
    """Return the process id of the running supervisord, None if there is none."""
    for process in marked(state):
        if "supervisord" in process.command and str(_configuration_file(state)) in process.command:
            return process.pid
    return None


def converge(state: State, programs: list[Program]) -> list[str]:
    """Make supervisord run exactly these programs. Return the names of those it had to start.

    Programs with the same command and configuration files keep running.

    Raises:
        CommandError: supervisord cannot start.
        TimeoutError: supervisord started but does not answer.
    """
    before = _configuration_file(state).read_text() if _configuration_file(state).exists() else ""
    wanted = _configuration(state, programs)
    write_text(_configuration_file(state), wanted)
    state.logs.mkdir(parents=True, exist_ok=True)
    if process_id(state) is None:
        _socket(state).unlink(missing_ok=True)
        variables = environment() | {MARKER: str(state.root)}
        # The cluster must not inherit the environment of the shell that starts it.
        clean = ("env", "--ignore-environment", *(f"{name}={value}" for name, value in variables.items()))
        run(*clean, sys.executable, "-m", "supervisor.supervisord", "-c", _configuration_file(state))
        wait_for("supervisord answers", lambda: _silent(state), deadline_s=15)
        return [program.name for program in programs]
    replaced = _apply(state) if wanted != before else []
    return replaced + _start_stopped(state)


def states(state: State) -> dict[str, str]:
    """Return the state of each program in supervisor's words, for example RUNNING. Empty without supervisord."""
    return {str(info["name"]): str(info["statename"]) for info in _programs(state)}


def process_ids(state: State) -> dict[str, int]:
    """Return the process id of each program, 0 if it does not run. Empty without supervisord."""
    return {str(info["name"]): int(info["pid"]) for info in _programs(state)}


def stop(state: State) -> None:
    """Stop supervisord and its programs. Does nothing if it does not run.

    Raises:
        TimeoutError: it did not end.
    """
    pid = process_id(state)
    if pid is None:
        return
    try:
        with _server(state) as server:
            server.supervisor.shutdown()
    except (OSError, Fault):
        # It does not answer. It is killed, and its children die with it.
        os.kill(pid, 9)
    wait_for("supervisord ends", lambda: None if process_id(state) is None else f"pid {pid} is there", deadline_s=60)


def stop_program(state: State, name: str) -> None:
    """Stop one program until `start_program`, or until the cluster is started again. Supervisord does not restart it.

    Raises:
        Fault: there is no such program, or it does not run.
    """
    with _server(state) as server:
        server.supervisor.stopProcess(name)


def start_program(state: State, name: str) -> None:
    """Start one program, unless it runs.

    Raises:
        Fault: there is no such program, or it does not start.
    """
    if states(state).get(name) not in {"RUNNING", "STARTING"}:
        with _server(state) as server:
            server.supervisor.startProcess(name)


def _server(state: State) -> ServerProxy:
    # The address is not used: the transport uses the unix socket.
    return ServerProxy("http://127.0.0.1", transport=SupervisorTransport(None, None, f"unix://{_socket(state)}"))


def _programs(state: State) -> list[dict[str, Any]]:
    if process_id(state) is None:
        return []
    try:
        with _server(state) as server:
            answer = server.supervisor.getAllProcessInfo()
    except (OSError, Fault):
        return []
    assert isinstance(answer, list)
    return answer


def _silent(state: State) -> str | None:
    try:
        with _server(state) as server:
            server.supervisor.getState()
    except (OSError, Fault) as error:
        return str(error)
    return None


def _apply(state: State) -> list[str]:
    with _server(state) as server:
        answer = server.supervisor.reloadConfig()
        assert isinstance(answer, list)
        added, changed, removed = answer[0]
        for name in [*changed, *removed]:
            server.supervisor.stopProcessGroup(name)
            server.supervisor.removeProcessGroup(name)
        for name in [*added, *changed]:
            server.supervisor.addProcessGroup(name)
    return [*added, *changed]


def _start_stopped(state: State) -> list[str]:
    stopped = [name for name, current in states(state).items() if current in {"FATAL", "STOPPED", "EXITED"}]
    with _server(state) as server:
        for name in stopped:
            server.supervisor.startProcess(name, False)
    return stopped


def _configuration(state: State, programs: list[Program]) -> str:
    log = state.logs / "supervisord.log"
    head = f"""\
[unix_http_server]
file={_socket(state)}
chmod=0700
[supervisord]
logfile={log}
pidfile={state.root}/supervisord.pid
childlogdir={state.logs}
directory={state.root}
umask=022
minfds=16384
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
"""
    return head + "".join(_section(state, program, number) for number, program in enumerate(programs))


def _section(state: State, program: Program, number: int) -> str:
    # Children of a killed supervisord die too, so their ports are free for a new one.
    command = shlex.join(["setpriv", "--pdeathsig", "KILL", *program.command]).replace("%", "%%")
    # Supervisor compares only its own configuration. With this hash, a changed file also restarts its program.
    content = hashlib.sha256(b"".join(path.read_bytes() for path in program.reads)).hexdigest()[:16]
    return f"""\
[program:{program.name}]
command={command}
environment=PDPOOL_CONFIGURATION="{content}"
priority={number}
autorestart=true
startsecs=1
startretries=1000
stopwaitsecs={program.stop_s}
redirect_stderr=true
stdout_logfile={state.logs}/{program.name}.log
stdout_logfile_maxbytes=20MB
stdout_logfile_backups=1
"""

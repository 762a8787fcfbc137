"""The trials: which pairs of memory over which transport, and what is tried with each."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from pdpool_connector.backends.memlock import memlock_problem
from pdpool_connector.hwcheck.machine import Machine
from pdpool_connector.hwcheck.peer import PAGE_BYTES, REGIONS

PAGES: Final = 64
"""Pages of each side: 4 MiB in two regions."""
ANSWER_S: Final = 90.0
KILLED_S: Final = 15.0
"""How long decode may take to release the pages of a hand-off whose prefill was killed on this machine."""


@dataclass(frozen=True)
class Trial:
    """Pages move from one memory to another over one transport.

    `source`, `target`: device number, or None for host memory. `environment`: what makes the backend use the transport.
    `skip`: why it cannot be tried here; "" if it can.
    """

    name: str
    backend: str
    source: int | None = None
    target: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    skip: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a trial. `checks`: what was tried, and why it failed ("" where it was proved)."""

    trial: Trial
    checks: Mapping[str, str] = field(default_factory=dict)
    transport: str = ""

    @property
    def word(self) -> str:
        """ "skipped", "proved" or "failed"."""
        if self.trial.skip:
            return "skipped"
        return "failed" if any(self.checks.values()) else "proved"


def plan(machine: Machine, backends: Mapping[str, str], devices: int, no_devices: str) -> list[Trial]:
    """All trials, those that cannot be made here with the reason.

    Args:
        backends: By name of the backend, why it cannot be loaded; "" where it can.
        devices: How many CUDA devices this process sees.
        no_devices: Why it sees none.
    """
    rdma = _no_rdma(machine)
    gpu = no_devices or ("" if devices else "no CUDA device is visible")
    other = 1 if devices > 1 else 0
    nixl, mooncake = backends["nixl"], backends["mooncake"]
    # NIXL does not start beside a GPU if UCX may not look at its memory.
    cuda = ",cuda_copy" if devices else ""
    tcp, cma = {"UCX_TLS": f"tcp,self{cuda}"}, {"UCX_TLS": f"cma,sm,self,tcp{cuda}"}
    ib = {"UCX_TLS": f"rc,ud,self,sm{cuda},gdr_copy" if devices else "rc,ud,self,sm"}
    ipc = {"UCX_TLS": "cuda_ipc,cuda_copy,sm,self,tcp"}
    return [
        Trial("host to host, shared memory of the local backend", "local"),
        Trial("host to host, NIXL, CMA", "nixl", environment=cma, skip=nixl),
        Trial("host to host, NIXL, TCP", "nixl", environment=tcp, skip=nixl),
        Trial("host to host, NIXL, RDMA", "nixl", environment=ib, skip=nixl or rdma),
        Trial("host to host, Mooncake, TCP", "mooncake", environment={"MC_FORCE_TCP": "1"}, skip=mooncake),
        Trial("device to device, NIXL, CUDA IPC", "nixl", 0, other, ipc, nixl or gpu),
        Trial("device to device, NIXL, TCP", "nixl", 0, other, tcp, nixl or gpu),
        Trial("device to device, NIXL, RDMA", "nixl", 0, other, ib, nixl or gpu or rdma),
        Trial("device to host, NIXL, RDMA", "nixl", 0, None, ib, nixl or gpu or rdma),
    ]


def _no_rdma(machine: Machine) -> str:
    if not machine.rdma:
        return "no RDMA device in /sys/class/infiniband"
    if not machine.verbs_devices:
        return "no /dev/infiniband/uverbs* in this container: request the RDMA resource, or mount the device"
    if not machine.rdma_ready:
        return "no port of an RDMA device is active"
    return memlock_problem(machine.memlock_bytes, REGIONS * PAGES * PAGE_BYTES)


class TrialError(Exception):
    """A side ended, did not answer in time, or refused a command; the message is the side's own."""


class Child:
    """One side in a process of its own. `call` has a deadline; leaving `with` ends the process."""

    def __init__(self, role: str, trial: Trial, device: int | None) -> None:
        ours, theirs = os.pipe()
        command = [sys.executable, "-m", "pdpool_connector.hwcheck.peer", str(theirs)]
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(theirs,),
            env={**os.environ, **trial.environment},
        )
        os.close(theirs)
        self._role, self._answers = role, os.fdopen(ours)
        self._post({"role": role, "backend": trial.backend, "device": device, "pages": PAGES})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._answers.close()

    def ready(self) -> None:
        """Wait until the connector has started."""
        self._answer()

    def call(self, do: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Send a command and return its result. Raises TrialError."""
        self._post({"do": do, **arguments})
        return self._answer().get("result")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the process and wait for it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _post(self, command: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _answer(self) -> dict[str, Any]:
        readable, _, _ = select.select([self._answers], [], [], ANSWER_S)
        if not readable:
            raise TrialError(f"{self._role} did not answer within {ANSWER_S:g} s")
        line = self._answers.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TrialError(f"{self._role}: {answer['error']}")
        return answer

    def _ended(self) -> TrialError:
        self._process.wait(ANSWER_S)
        assert self._process.stderr is not None
        last = self._process.stderr.read().strip().splitlines()[-1:] or ["no message"]
        return TrialError(f"{self._role} ended with {self._process.returncode}: {last[0]}")


def run(trial: Trial, say: Callable[[str], None]) -> Outcome:
    """Try the pair: bytes, abort, kill. A check that fails does not keep the next one from being tried."""
    if trial.skip:
        return Outcome(trial)
    checks: dict[str, str] = {}
    transport = ""
    with _pair(trial, checks) as pair:
        if pair is not None:
            say("bytes")
            transport = _check_bytes(*pair, checks)
            say("abort")
            _check_abort(*pair, checks)
            say("kill")
            _check_kill(*pair, checks)
    return Outcome(trial, checks, transport)


Pair = tuple[Child, Child, str]
"""Prefill, decode, and prefill's bootstrap address."""


@contextlib.contextmanager
def _pair(trial: Trial, checks: dict[str, str]) -> Iterator[Pair | None]:
    with contextlib.ExitStack() as stack:
        try:
            prefill = stack.enter_context(Child("prefill", trial, trial.source))
            decode = stack.enter_context(Child("decode", trial, trial.target))
            prefill.ready()
            decode.ready()
            found: Pair | None = (prefill, decode, prefill.call("address"))
        except TrialError as error:
            checks["start"], found = str(error), None
        yield found


def _check_bytes(prefill: Child, decode: Child, address: str, checks: dict[str, str]) -> str:
    """Scattered pages land where they belong, byte for byte. Returns the transport in use."""
    source, target = list(range(PAGES)), [(7 * page + 3) % PAGES for page in range(PAGES)]
    check = "bytes are equal"
    try:
        _hand_off(prefill, decode, address, 1, source, target)
        checks[check] = _difference(decode, 1, target)
        return str(prefill.call("transport"))
    except TrialError as error:
        checks[check] = str(error)
        return ""


def _check_abort(prefill: Child, decode: Child, address: str, checks: dict[str, str]) -> None:
    """A hand-off aborted in mid-send leaves no byte in its pages once they are given to another one."""
    pages = list(range(PAGES))
    try:
        prefill.call("request", room=2)
        decode.call("offer", prefill=address, room=2, pages=pages)
        prefill.call("send", room=2, pages=pages[: PAGES // 2], start=0, last=False)
        decode.call("abort", room=2)
        decode.call("ended", room=2)
        prefill.call("ended", room=2)
        _hand_off(prefill, decode, address, 3, pages, pages)
        checks["abort leaves no stale byte"] = _difference(decode, 3, pages)
    except TrialError as error:
        checks["abort leaves no stale byte"] = str(error)


def _check_kill(prefill: Child, decode: Child, address: str, checks: dict[str, str]) -> None:
    """When prefill is killed, decode's pages are released with proof, and not before."""
    pages = list(range(PAGES))
    try:
        prefill.call("request", room=4)
        decode.call("offer", prefill=address, room=4, pages=pages)
        prefill.call("send", room=4, pages=pages[: PAGES // 2], start=0, last=False)
        prefill.kill()
        began = time.monotonic()
        decode.call("ended", room=4)
        took = time.monotonic() - began
        checks["kill releases the pages"] = "" if took <= KILLED_S else f"took {took:.1f} s, at most {KILLED_S:g} s"
    except TrialError as error:
        checks["kill releases the pages"] = str(error)


def _hand_off(
    prefill: Child, decode: Child, address: str, room: int, source: Sequence[int], target: Sequence[int]
) -> None:
    prefill.call("request", room=room)
    decode.call("offer", prefill=address, room=room, pages=list(target))
    prefill.call("send", room=room, pages=list(source), start=0, last=True)


def _difference(decode: Child, room: int, pages: Sequence[int]) -> str:
    """Why the pages do not hold what the room's hand-off should have brought; "" if they do."""
    status = decode.call("ended", room=room)
    if status["phase"] != "done":
        return f"the hand-off ended as {status['phase']}: {status['message']}"
    differing = decode.call("differing", room=room, pages=list(pages))
    return f"pages {differing} differ from what was sent" if differing else ""

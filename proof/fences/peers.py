"""The parent's end of the processes of one experiment."""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from pdpool_connector.layout.arena import ArenaLocation, MappedArena

from dev.paths import CHECKOUT
from dev.processes import send
from proof.fences.plan import CANARY, MARK, Plane

ANSWER_S = 60.0


class ExperimentError(Exception):
    """A process did not do its part, so nothing was shown."""


class Peer:
    """One process."""

    def __init__(self, plane: Plane, name: str, log: int) -> None:
        self.name, self._plane = name, plane
        self.process = subprocess.Popen(
            [sys.executable, "-m", "proof.fences.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=CHECKOUT,
            env={**os.environ, **plane.environment, "PYTHONPATH": os.pathsep.join(("connector", "."))},
        )
        self.pid = self.process.pid

    def send(self, command: str, **arguments: object) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode({"command": command, **arguments}) + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, str]:
        """Wait for one answer. Raises ExperimentError when it does not come, or is an error."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_S):
                raise ExperimentError(f"{self.name} did not answer within {ANSWER_S} s")
        line = self.process.stdout.readline()
        if not line:
            raise ExperimentError(f"{self.name} ended with {self.process.wait(5)}")
        found = msgspec.json.decode(line, type=dict[str, str])
        if "error" in found:
            raise ExperimentError(f"{self.name}: {found['error']}")
        return found

    def call(self, command: str, **arguments: object) -> dict[str, str]:
        """Order and answer."""
        self.send(command, **arguments)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a stop has taken effect in every thread when this returns."""
        send(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait until a pidfd says that every thread is gone."""
        descriptor = os.pidfd_open(self.pid)
        try:
            os.kill(self.pid, signal.SIGKILL)
            with selectors.DefaultSelector() as selector:
                selector.register(descriptor, selectors.EVENT_READ)
                if not selector.select(ANSWER_S):
                    raise ExperimentError("a killed process does not end")
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """Kill and reap."""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait(ANSWER_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


class Pair:
    """A writer that writes, and the target, into whose memory the parent looks."""

    def __init__(self, writer: Peer, target: Peer, memory: NDArray[np.uint8]) -> None:
        self.writer, self.target, self.memory = writer, target, memory

    def blank(self) -> None:
        """Fill the target's memory with canaries, as of the moment of the claim."""
        self.memory[:] = CANARY

    def late(self) -> int:
        """Bytes that came since."""
        return int(np.count_nonzero(self.memory == MARK))


@contextmanager
def writing(plane: Plane, size: str, log: int) -> Iterator[Pair]:
    """A pair in which bytes are landing."""
    token = f"{time.monotonic_ns():x}"
    writer, target = (Peer(plane, f"{role}-{token}", log) for role in ("writer", "target"))
    arena: MappedArena | None = None
    try:
        for peer, is_target in ((writer, False), (target, True)):
            peer.send("open", backend=plane.backend, name=peer.name, size=size, target=is_target)
        writer.answer()
        opened: dict[str, Any] = target.answer()
        arena = MappedArena(msgspec.json.decode(opened["location"], type=ArenaLocation))
        writer.call("connect", peer=target.name, remote=opened["remote"])
        pair = Pair(writer, target, arena.view)
        pair.blank()
        writer.call("write_on", peer=target.name)
        until(lambda: pair.late() > 0, "the first byte")
        yield pair
    finally:
        for peer in (writer, target):
            peer.end()
        if arena is not None:
            arena.close()


def until(check: Any, what: str) -> None:  # noqa: ANN401 - any call without arguments
    """Wait until a check holds. Raises ExperimentError when it does not in time."""
    deadline = time.monotonic() + ANSWER_S
    while not check():
        if time.monotonic() > deadline:
            raise ExperimentError(f"waited {ANSWER_S} s in vain for {what}")
        time.sleep(0.0005)

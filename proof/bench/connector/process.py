"""A connector in a process of its own, which gets calls over a pipe; its main thread is the scheduler."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from dev.processes import send

from .memory import Shape

ANSWER_S = 180.0


@dataclass(frozen=True)
class Plane:
    """A data plane: the engine, and the environment that its processes start with."""

    name: str
    backend: str
    env: dict[str, str] = field(default_factory=dict)


NIXL = Plane("nixl", "nixl", {"UCX_NET_DEVICES": "lo"})
NIXL_TCP = Plane("nixl tcp", "nixl", {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"})
MOONCAKE = Plane("mooncake", "mooncake", {"MC_LOG_LEVEL": "ERROR"})


@dataclass(frozen=True)
class Setup:
    """How a process is started."""

    role: str
    plane: Plane
    shape: Shape
    max_attempts: int = 16_384
    options: dict[str, Any] = field(default_factory=dict)
    """More of the connector's configuration."""
    counts_frames: bool = False
    """Whether frames are counted, which costs time."""


def serve(pipe: Connection, setup: Setup) -> None:
    """Life of the process: make a `Side`, and call its methods as ordered until the order is None."""
    os.environ.update(setup.plane.env)
    logging.getLogger("pdpool_connector").setLevel(logging.ERROR)
    from .side import Side

    side = Side(setup)
    while (order := pipe.recv()) is not None:
        method, arguments = order
        try:
            answer = getattr(side, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - raised again where it was asked for
            answer = error
        pipe.send(answer)
    side.close()
    pipe.send(None)
    # NIXL's libraries may crash an interpreter that exits normally where InfiniBand is present.
    os._exit(0)


class Process:
    """A `side.Side` in a process of its own. Any call raises what it raised there, and TimeoutError without answer."""

    def __init__(self, stack: ExitStack, setup: Setup) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(theirs, setup), daemon=True)
        self.process.start()
        theirs.close()
        stack.callback(self._end)
        self.facts = self.call("facts")

    def begin(self, method: str, *arguments: object) -> None:
        """Ask, and do not wait."""
        self._pipe.send((method, arguments))

    def finish(self) -> Any:  # noqa: ANN401 - as many types as methods
        """Wait for the answer to `begin`."""
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"process {self.process.pid} gave no answer within {ANSWER_S} s")
        if isinstance(answer := self._pipe.recv(), Exception):
            raise answer
        return answer

    @property
    def answered(self) -> bool:
        """Whether `finish` would return at once."""
        return self._pipe.poll()

    def call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401
        """Ask and wait."""
        self.begin(method, *arguments)
        return self.finish()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; a stop has taken effect when this returns."""
        assert self.process.pid is not None
        send(self.process.pid, number)

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # it may have died, and its end of the pipe with it
            self._pipe.send(None)
            self._pipe.poll(15)
        self.process.join(2)
        self.process.kill()
        self.process.join(5)

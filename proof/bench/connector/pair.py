"""One prefill process and the decode processes that are paired with it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

from .memory import Shape
from .process import Plane, Process, Setup
from .scheduler import Job, Times

Both = tuple[Times, Times]


class Pair:
    """Processes live as long as `stack`. Rooms are numbered through, so that no two jobs share one."""

    def __init__(
        self,
        stack: ExitStack,
        plane: Plane,
        shape: Shape,
        *,
        decodes: int = 1,
        max_attempts: int = 16_384,
        warm_up: bool = True,
        options: dict[str, Any] | None = None,
        counts_frames: bool = False,
    ) -> None:
        self.plane, self.shape = plane, shape
        self.warm = False
        """Whether what is measured now counts."""
        setup = Setup("prefill", plane, shape, max_attempts, options or {}, counts_frames)
        self.prefill = Process(stack, setup)
        self.decodes = [Process(stack, replace(setup, role="decode")) for _ in range(decodes)]
        self._rooms = count(1)
        for decode in range(decodes if warm_up else 0):
            self.run(Job(0, 2, 1, 1), decode)

    @property
    def address(self) -> str:
        """Where decode asks for prefill."""
        return str(self.prefill.facts["bootstrap"])

    def rooms(self, number: int) -> int:
        """First of `number` unused rooms."""
        first = next(self._rooms)
        self._rooms = count(first + number)
        return first

    def begin(self, job: Job, decode: int = 0) -> Job:
        """Start both sides of a job (its rooms are numbered here); `finish` waits."""
        job = replace(job, first=self.rooms(job.count))
        self.prefill.begin("run", job)
        self.decodes[decode].begin("run", job, self.address)
        return job

    def finish(self, decode: int = 0) -> Both:
        """Prefill's and decode's times."""
        return self.prefill.finish(), self.decodes[decode].finish()

    def run(self, job: Job, decode: int = 0) -> Both:
        """Do a job."""
        self.begin(job, decode)
        return self.finish(decode)

    def raw(self, job: Job, only: str = "") -> dict[str, float]:
        """Seconds of the bare engine for the first window of `job`, by pattern (or by `only` that one)."""
        times: dict[str, float] = self.prefill.call("raw", self.decodes[0].facts["incarnation"], job, only)
        return times

    def check_raw(self, job: Job) -> None:
        """Raise AssertionError unless each pattern of the bare engine moves the pages of `job`, changed before it."""
        for seed, pattern in enumerate(self.raw(job), start=2):
            self.prefill.call("fill", seed)
            self.raw(job, pattern)
            self.check(job)

    def check(self, job: Job) -> None:
        """Raise AssertionError unless decode's pages of the job hold what prefill's hold."""
        from .memory import places

        for slot in range(job.window):
            ours, theirs = (
                process.call(
                    "digest", places(self.shape, job.pages, job.window, scattered=job.scattered, seed=seed)[slot]
                )
                for seed, process in ((1, self.prefill), (2, self.decodes[0]))
            )
            assert ours == theirs, f"{self.plane.name}: the pages of request {slot} did not arrive as they were sent"

"""Where the time of a hand-off goes: when each stage between the last send and decode's scheduler is reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from .figures import CHUNK_MIB, LARGE, TINY
from .pair import Pair
from .process import MOONCAKE, NIXL
from .results import Results, Row, spread
from .scheduler import Job

Marks = list[tuple[float, str]]
"""When a stage was reached, on the clock that both processes share, and its name."""
STAGES = (
    "prefill: machine has decided",
    "prefill: worker or owner takes it",
    "prefill: pages have landed",
    "prefill: Ended handed to zmq",
    "decode: Ended read",
    "decode: machine has decided",
    "decode: scheduler woken",
    "decode: scheduler has seen it",
)
SIZES = (("one page", TINY, 1, 300), ("16 MiB", LARGE, CHUNK_MIB, 60))
"""What is handed over: its name, shape of the memory, pages, how often."""


def mark(role: str, connector: Any, marks: Marks) -> Callable[[], None]:  # noqa: ANN401 - reaches into both kinds
    """Note from now on when stages are reached; returns what ends that. The notes themselves cost some microseconds."""
    undo: list[Callable[[], None]] = []

    def around(owner: Any, name: str, before: str = "", after: str = "") -> None:  # noqa: ANN401
        inner = getattr(owner, name)

        def noted(*arguments: object) -> object:
            if before:
                marks.append((time.monotonic(), before))
            result = inner(*arguments)
            if after:
                marks.append((time.monotonic(), after))
            return result

        setattr(owner, name, noted)
        undo.append(lambda: setattr(owner, name, inner))

    if role == "prefill":
        worker = next(iter(connector._peers)).worker
        around(connector, "_write", before=STAGES[0])
        around(worker, "_launch", before=STAGES[1])
        around(connector, "_on_write_ended", before=STAGES[2])
        around(connector._ports.control, "_send", before=STAGES[3])
    else:
        around(connector, "on_frame", before=STAGES[4], after=STAGES[5])
        around(connector._transfers, "_on_change", before=STAGES[6])

    def end() -> None:
        for restore in undo:
            restore()

    return end


def stages(results: Results, stack: ExitStack) -> None:
    """When a hand-off of one page, and one of 16 MiB, reaches each of its stages, microseconds after the last send."""
    for plane in (NIXL, MOONCAKE):
        for what, shape, pages, handoffs in SIZES:
            reached = _reached(Pair(stack, plane, shape), pages, handoffs)
            before = 0.0
            for stage, times in reached.items():
                if times:
                    median = float(np.median(times))
                    note = f"+{median - before:.0f} us"
                    results.add(Row("stages", plane.name, f"{what}, {stage}", median, "us", spread(times), note=note))
                    results.series.setdefault("stages", {}).setdefault((what, plane.name), []).append((stage, median))
                    before = median


def _reached(pair: Pair, pages: int, handoffs: int) -> dict[str, list[float]]:
    """Microseconds from the last send to each stage, one entry for each hand-off that was seen to reach it."""
    pair.run(Job(0, handoffs, 1, pages))
    sides = (pair.prefill, pair.decodes[0])
    for side in sides:
        side.call("mark")
    prefill, decode = pair.run(Job(0, handoffs, 1, pages))
    marks = sorted(entry for side in sides for entry in side.call("marks"))
    reached: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for room, sent in prefill.sent.items():
        for stage, when in _first(marks, sent, decode.done[room]).items():
            reached[stage].append((when - sent) * 1e6)
    return reached


def _first(marks: Marks, sent: float, done: float) -> dict[str, float]:
    """When each stage was reached first; at decode after Ended was sent, for the frames before it are others."""
    found: dict[str, float] = {}
    for when, stage in marks:
        later = STAGES.index(stage)
        if sent <= when <= done and stage not in found and (later == 0 or STAGES[min(later - 1, 3)] in found):
            found[stage] = when
    return found | {STAGES[-1]: done}

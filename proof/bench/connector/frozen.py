"""What a frozen decode with writes in flight does to the seven other decodes of a prefill."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from .figures import TINY, latencies
from .pair import Pair
from .process import MOONCAKE, NIXL_TCP
from .results import Results, Row, spread
from .scheduler import Job
from .turns import Turn, longest, parts

JOB = Job(0, 300, 4, 1)
MOST = 1.2
"""Latency and lag beside a frozen peer, of those without."""
STRETCHES = 7
"""Of some two seconds each. More while a decode is frozen, and Mooncake gives up on what is under way to it."""


@dataclass
class Seen:
    """What stretches of time had: latencies of hand-offs, and the longest turn of prefill's loop in each second."""

    spent: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    worker: list[float] = field(default_factory=list)
    """CPU of all workers, in percent of a core."""

    @property
    def lags(self) -> list[float]:
        """Seconds."""
        return [turn.wall / 1e3 for turn in self.turns]


def frozen(results: Results, stack: ExitStack) -> None:
    """Latency and loop lag at seven peers while an eighth is frozen with writes in flight, and before and after."""
    for plane in (NIXL_TCP, MOONCAKE):
        _frozen(results, Pair(stack, plane, TINY, decodes=8))


def _frozen(results: Results, pair: Pair) -> None:
    calm, stuck = Seen(), Seen()
    pair.run(JOB)
    _look(pair, calm)
    first = pair.rooms(8)
    pair.prefill.begin("open_idle", first, 8, 448)
    pair.decodes[7].call("open_idle", first, 8, 448, pair.address)
    pair.prefill.finish()
    pair.decodes[7].signal(signal.SIGSTOP)
    pair.prefill.call("send_idle")
    _look(pair, stuck)
    pair.decodes[7].signal(signal.SIGCONT)
    pair.prefill.call("end_idle", False)
    pair.decodes[7].call("end_idle", False)
    _look(pair, calm)
    for figure, what, before, during in (
        ("frozen", "latency beside a frozen peer", calm.spent, stuck.spent),
        ("frozen lag", "loop lag beside a frozen peer", calm.lags, stuck.lags),
    ):
        usual = float(np.median(before))
        ratios = [each / usual for each in during]
        ratio = float(np.median(ratios))
        results.series.setdefault("frozen", {}).setdefault(pair.plane.name, {})[what.partition(" beside")[0]] = (
            [each * 1e3 for each in before],
            [each * 1e3 for each in during],
            MOST,
        )
        note = f"{usual * 1e3:.2f} -> {float(np.median(during)) * 1e3:.2f} ms"
        results.add(Row(figure, pair.plane.name, what, ratio, "x", spread(ratios), f"<= {MOST}", ratio <= MOST, note))
    results.series.setdefault("turns", {})[pair.plane.name] = {
        when: f"{parts(seen.turns)}; workers {np.median(seen.worker):.0f} % of a core"
        for when, seen in (("without a frozen peer", calm), ("beside one", stuck))
    }


def _look(pair: Pair, seen: Seen) -> None:
    """Hand-offs with the first seven peers in turn, stretch by stretch."""
    for _ in range(STRETCHES):
        before = pair.prefill.call("threads")
        pair.prefill.call("watch_turns")
        wall = 0.0
        for peer in range(7):
            both = pair.run(JOB, peer)
            seen.spent += latencies(both)
            wall += both[0].wall_s
        seen.turns += longest(pair.prefill.call("turns"), 1.0)
        spent = pair.prefill.call("threads")["worker"] - before["worker"]
        seen.worker.append(spent / wall * 100)

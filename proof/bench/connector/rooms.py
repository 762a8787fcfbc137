"""What a hand-off costs while others are open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from .figures import PLANES, TINY
from .pair import Pair
from .results import Results, Row, spread
from .scheduler import Job

LIVE = (1, 100, 1000, 10_000)
ROUNDS = 4
MOST = 1.2
"""The cost with any number of open hand-offs, of that with the first."""
JOB = Job(0, 1000, 16, 1, scattered=False)
"""The first pages: the last ones are those of the others."""


def rooms(results: Results, stack: ExitStack) -> None:
    """CPU of a hand-off while 1, 100, 1 000, 10 000 others are open."""
    pairs = [Pair(stack, plane, replace(TINY, pages=LIVE[-1] + 64), max_attempts=65_536) for plane in PLANES]
    costs: dict[str, dict[int, list[float]]] = {pair.plane.name: {live: [] for live in LIVE} for pair in pairs}
    for pair in pairs:
        pair.run(JOB)
    for number in range(ROUNDS):
        for live in LIVE if number % 2 else LIVE[::-1]:  # what drifts meets all of them alike
            for pair in pairs:
                costs[pair.plane.name][live].append(_cost(pair, live))
    for name, found in costs.items():
        results.add(judged(name, found))
        results.series.setdefault("rooms", {})[name] = found


def judged(plane: str, costs: Mapping[int, Sequence[float]]) -> Row:
    """The worst point, of the first; ratios are taken within a round."""
    (_, first), *others = costs.items()
    ratios = {live: np.array(values) / np.array(first) for live, values in others}
    worst = max(ratios, key=lambda live: float(np.median(ratios[live])))
    ratio = float(np.median(ratios[worst]))
    points = ", ".join(f"{live}: {np.median(values):.0f} us {spread(values)}" for live, values in costs.items())
    what = f"CPU of a hand-off, worst of {len(costs)} numbers of live rooms ({worst}) / {next(iter(costs))} live"
    note = f"{points}, both sides together"
    return Row("rooms", plane, what, ratio, "x", spread(list(ratios[worst])), f"<= {MOST}", ratio <= MOST, note)


def _cost(pair: Pair, live: int) -> float:
    """Microseconds of CPU, both sides together."""
    first = pair.rooms(live)
    pair.prefill.begin("open_idle", first, live, 1)
    pair.decodes[0].call("open_idle", first, live, 1, pair.address)
    pair.prefill.finish()
    prefill, decode = pair.run(JOB)
    for side in (pair.decodes[0], pair.prefill):
        side.call("end_idle", True)
    return (prefill.cpu_s + decode.cpu_s) / JOB.count * 1e6

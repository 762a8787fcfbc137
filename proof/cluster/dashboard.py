"""Runs the queries of the chart's dashboard on the local cluster's Prometheus, and draws what they return.

The panels, their places and their queries are those of `dev.dashboard`. Grafana itself is not run.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from dev.dashboard import ROWS, WIDTH, Panel, Query, filled
from tests.cluster.stack import ask

mpl.rcParams["svg.fonttype"] = "none"  # text as text: a quarter of the size

STEP_S: Final = 5.0
ANSWER_S: Final = 20.0
COLUMNS: Final = 24 // WIDTH
SHOWN: Final = 6
"""Lines that a legend names."""


@dataclass(frozen=True)
class Line:
    """One series of a panel. `points`: seconds of the clock, and values."""

    name: str
    points: tuple[tuple[float, float], ...]


def read(prometheus: str, began: float, ended: float) -> dict[str, list[Line]]:
    """Return the series of each panel, by its title.

    Args:
        prometheus: Address, such as `http://10.0.0.1:9090`.
        began, ended: Seconds of the clock.

    Raises:
        urllib.error.HTTPError: Prometheus refuses a query.
        OSError: It does not answer.
    """
    span = {"start": began, "end": ended, "step": STEP_S}
    found: dict[str, list[Line]] = {}
    for panel in (panel for panels in ROWS.values() for panel in panels):
        found[panel.title] = [line for query in panel.queries for line in _lines(prometheus, query, span)]
    return found


def draw(found: Mapping[str, Sequence[Line]], began: float, path: Path) -> None:
    """Write an SVG file with the panels as Grafana places them. Times are minutes since `began`."""
    rows = [
        (title, panels[at : at + COLUMNS]) for title, panels in ROWS.items() for at in range(0, len(panels), COLUMNS)
    ]
    last = max((line.points[-1][0] - began for lines in found.values() for line in lines), default=60.0) / 60
    figure, axes = plt.subplots(len(rows), COLUMNS, figsize=(5 * COLUMNS, 2.4 * len(rows)), layout="constrained")
    for places, (title, panels) in zip(axes, rows, strict=True):
        places[0].set_ylabel(title, fontsize=10, fontweight="bold")
        for place in places[len(panels) :]:
            place.set_axis_off()
        for place, panel in zip(places, panels, strict=False):
            _draw_panel(place, panel, found[panel.title], began)
            place.set_xlim(0, last)
    for place in axes[-1]:
        place.set_xlabel("minutes", fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _draw_panel(place: Axes, panel: Panel, lines: Sequence[Line], began: float) -> None:
    unit = "" if panel.unit == "short" else f" ({panel.unit})"
    place.set_title(f"{panel.title}{unit}", fontsize=8)
    place.tick_params(labelsize=6)
    for number, line in enumerate(lines):
        label = (line.name.strip() or "value") if number < SHOWN else None
        points = list(_with_gaps(line.points))
        place.plot([(at - began) / 60 for at, _ in points], [value for _, value in points], label=label, lw=0.9)
    if lines:
        place.legend(fontsize=4.5, loc="upper left", framealpha=0.5)
        highest = max(value for line in lines for _, value in line.points)
        place.set_ylim(0, highest * 1.1 if highest > 0 else 1)
    else:
        place.text(0.5, 0.5, "no series", ha="center", va="center", fontsize=7, transform=place.transAxes)


def _with_gaps(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the points, with one that is not drawn where a series was absent."""
    before = None
    for at, value in points:
        if before is not None and at - before > 1.5 * STEP_S:
            yield before + STEP_S, math.nan
        yield at, value
        before = at


def _lines(prometheus: str, query: Query, span: Mapping[str, float]) -> list[Line]:
    url = f"{prometheus}/api/v1/query_range?{urlencode({'query': filled(query), **span})}"
    result = ask(url, timeout_s=ANSWER_S)["data"]["result"]
    return [
        Line(_name(query, one["metric"]), tuple((at, float(value)) for at, value in one["values"])) for one in result
    ]


def _name(query: Query, labels: Mapping[str, Any]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: str(labels.get(found[1], "")), query.legend)

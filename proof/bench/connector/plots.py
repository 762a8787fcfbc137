"""The figures as pictures, for docs/benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

from . import bars
from .results import Results

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "pdpool", "axes.spines.top": False, "axes.spines.right": False})


def draw(results: Results, directory: Path) -> None:
    """Write one SVG for each series that was measured."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        if name in results.series:
            figure, axes = pyplot.subplots(figsize=(8, 4))
            plot(axes, results.series[name])
            figure.tight_layout()
            figure.savefig(directory / f"connector_{name}.svg", metadata={"Date": None})
            pyplot.close(figure)


def _big(axes: Axes, rows: list[tuple[str, str, int, float, float]]) -> None:
    axes.bar(range(len(rows)), [ratio for *_, ratio, _ in rows])
    axes.set_xticks(range(len(rows)), [f"{name}\n{layout}\n{mib} MiB" for name, layout, mib, *_ in rows], fontsize=6)
    axes.axhline(0.95, linestyle="--", color="black")
    axes.set_ylabel("throughput, of the bare engine")
    for index, (*_, rate) in enumerate(rows):
        axes.text(index, 0.02, f"{rate:.1f} GB/s", rotation=90, ha="center", color="white", fontsize=7)


def _tiny(axes: Axes, times: dict[str, list[float]]) -> None:
    for name, values in times.items():
        axes.plot(np.sort(values), np.linspace(0, 1, len(values)), label=f"{name}, p50 {np.median(values):.2f} ms")
    axes.set_xscale("log")
    axes.set_xlabel("ms from the last send to decode's scheduler seeing it, one page")
    axes.set_ylabel("share of hand-offs")
    axes.legend()


def _threads(axes: Axes, planes: dict[str, dict[str, float]]) -> None:
    names = sorted({name for threads in planes.values() for name, used in threads.items() if used >= 1})
    left = np.zeros(len(planes))
    for name in names:
        used = np.array([threads.get(name, 0.0) for threads in planes.values()])
        axes.barh(list(planes), used, left=left, label=name)
        left += used
    axes.set_xlabel("CPU of one hand-off, microseconds, by process and thread")
    axes.legend(fontsize=7)


def _abort(axes: Axes, planes: dict[str, list[float]]) -> None:
    for name, values in planes.items():
        axes.plot(np.sort(values), np.linspace(0, 1, len(values)), label=f"{name}, {len(values)} aborts")
    axes.set_xlabel("ms from decode's abort to the release of its pages, chunks of 16 MiB")
    axes.set_ylabel("share of aborts")
    axes.legend()


def _goodput(axes: Axes, planes: dict[str, list[tuple[float, float, float]]]) -> None:
    for name, rows in planes.items():
        shares, kept, useful = zip(*rows, strict=True)
        (line,) = axes.plot([100 * share for share in shares], kept, marker="o", label=f"{name}: goodput")
        axes.plot(
            [100 * share for share in shares], useful, linestyle="--", color=line.get_color(), label=f"{name}: useful"
        )
    axes.set_xlabel("% of the requests aborted")
    axes.set_ylabel("of the goodput without aborts")
    axes.set_ylim(bottom=0)
    axes.legend()


def _held(axes: Axes, planes: dict[str, list[tuple[float, float, float]]]) -> None:
    delays = axes.twinx()
    delays.spines["right"].set_visible(True)
    for name, rows in planes.items():
        shares, held, delay_ms = zip(*rows, strict=True)
        percent = [100 * share for share in shares]
        (line,) = axes.plot(percent, held, marker="o", label=f"{name}: pages held")
        axes.plot([], [], linestyle="--", color=line.get_color(), label=f"{name}: admission delay")
        delays.plot(percent, delay_ms, marker="o", linestyle="--", color=line.get_color())
    axes.set_xlabel("% of the requests aborted")
    axes.set_ylabel("of 256 pages, mean over time")
    delays.set_ylabel("ms that a request waits for them, mean")
    for one in (axes, delays):
        one.set_ylim(bottom=0)
    axes.legend()


def _stages(axes: Axes, handoffs: dict[tuple[str, str], list[tuple[str, float]]]) -> None:
    for (what, name), reached in handoffs.items():
        axes.plot([when for _, when in reached], [stage for stage, _ in reached], marker="o", label=f"{what}, {name}")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("microseconds after the last send, medians")
    axes.legend()


PLOTS: dict[str, Callable[[Axes, Any], None]] = {
    "big": _big,
    "tiny": _tiny,
    "threads": _threads,
    "abort": _abort,
    "goodput": _goodput,
    "held": _held,
    "stages": _stages,
    "rate": bars.rate,
    "rooms": bars.rooms,
    "frozen": bars.frozen,
    "concurrent": bars.concurrent,
    "idle": bars.idle,
    "startup": bars.startup,
}

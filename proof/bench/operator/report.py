"""The figures as a table, as plots, as a page of the documentation, and as a last line."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot

from .measure import Figures

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "pdpool", "axes.spines.top": False, "axes.spines.right": False})

GROWTH = 1.5
"""Growth is about linear while a figure per pod at the largest size is at most so many times that at the one before."""


def rows(figures: Figures) -> dict[str, str]:
    """Return the cells of the table, by heading."""
    made, idle, change = figures.making, figures.idle, figures.change
    return {
        "pools x instances": str(figures.size),
        "apply, s": f"{figures.applied_s:.1f}",
        "all pods made, s": f"{figures.pods_s:.1f}",
        "all ready, s": f"{figures.ready_s:.1f}",
        "reconcile p50 / p99, ms": _both(figures.all_ms),
        "while making": _both(figures.making_ms),
        "idle": _both(figures.idle_ms),
        "under change": _both(figures.change_ms),
        "samples a second": f"{idle.samples_per_s:.0f}",
        "API calls a minute, idle": f"{idle.calls_per_min:.0f}",
        "writes a minute, idle": f"{idle.writes_per_min:.1f}",
        "API calls a minute, change": f"{change.calls_per_min:.0f}",
        "CPU making / idle / change, cores": f"{made.cpu:.2f} / {idle.cpu:.2f} / {change.cpu:.2f}",
        "RSS idle / peak, MB": f"{idle.rss_mb:.0f} / {figures.peak_mb:.0f}",
        "load of the machine": f"{made.load:.1f} / {idle.load:.1f} / {change.load:.1f}",
    }


def _both(ms: tuple[float, float]) -> str:
    return "no reconcile" if math.isnan(ms[0]) else f"{ms[0]:.0f} / {ms[1]:.0f}"


def targets(figures: list[Figures]) -> list[str]:
    """Return one line for each target, of the last size."""
    last = figures[-1]
    met = {
        f"reconcile p99 {last.all_ms[1]:.0f} ms, target below 1000": last.all_ms[1] < 1000,
        f"writes while idle {last.idle.writes_per_min:.1f} a minute, target 0": last.idle.writes_per_min == 0,
        f"peak RSS {last.peak_mb:.0f} MB, target below 300": last.peak_mb < 300,
    }
    if len(figures) > 1:
        before = figures[-2]
        growth = (last.idle.cpu / last.size.pods) / (before.idle.cpu / before.size.pods)
        met[f"idle CPU per pod {growth:.2f} times that of {before.size}, target at most {GROWTH}"] = growth <= GROWTH
    return [f"{last.size}: {text}: {'met' if good else 'missed'}" for text, good in met.items()]


def last_line(figures: Figures) -> str:
    """Return the line that a check reads."""
    values = {
        "pools": f"{figures.size.pools}",
        "instances": f"{figures.size.pods}",
        "reconcile_p99_ms": f"{figures.all_ms[1]:.0f}",
        "idle_writes_per_min": f"{figures.idle.writes_per_min:.1f}",
        "api_calls_per_min": f"{figures.idle.calls_per_min:.1f}",
        "cpu": f"{figures.idle.cpu:.2f}",
        "rss_mb": f"{figures.peak_mb:.0f}",
    }
    return "bench-operator: " + " ".join(f"{name}={value}" for name, value in values.items())


def document(figures: list[Figures]) -> str:
    """Return the figures as Markdown."""
    table = [rows(one) for one in figures]
    lines = [
        "# Operator: the last run",
        "",
        f"`make bench-operator` on {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}.",
        "What is measured, and how to read it: [README.md](README.md#speed-of-the-operator).",
        "",
        "| figure | " + " | ".join(str(one.size) for one in figures) + " |",
        "|---" * (len(figures) + 1) + "|",
        *(f"| {name} | " + " | ".join(row[name] for row in table) + " |" for name in list(table[0])[1:]),
        "",
        "## Targets",
        "",
        *(f"- {line}" for line in targets(figures)),
        "",
        "## Growth",
        "",
        "![Figures by number of instances](operator.svg)",
        "",
        "## Last line",
        "",
        "```",
        last_line(figures[-1]),
        "```",
    ]
    return "\n".join([*lines, ""])


def draw(figures: list[Figures], file: Path) -> None:
    """Plot the growth over the number of instances."""
    pods = [one.size.pods for one in figures]
    panels = {
        "reconcile, ms": {"p50": [one.all_ms[0] for one in figures], "p99": [one.all_ms[1] for one in figures]},
        "s after the apply": {"pods made": [one.pods_s for one in figures], "ready": [one.ready_s for one in figures]},
        "CPU, cores": {"idle": [one.idle.cpu for one in figures], "making": [one.making.cpu for one in figures]},
        "RSS, MB": {"idle": [one.idle.rss_mb for one in figures], "peak": [one.peak_mb for one in figures]},
        "API calls a minute": {"idle": [one.idle.calls_per_min for one in figures]},
        "samples a second": {"idle": [one.idle.samples_per_s for one in figures]},
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 6))
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=True):
        for name, values in lines.items():
            axis.plot(pods, values, marker="o", label=name)
        axis.set_ylabel(title)
        axis.set_xlabel("instances")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)

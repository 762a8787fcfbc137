"""Pictures of medians with their 10th and 90th percentile, beside the targets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from .results import short

WIDTH = 0.38
"""Of a bar; two stand side by side."""
Values = Sequence[float]


def _bars(axes: Axes, at: Values, found: Sequence[Values], label: str | None = None, width: float = WIDTH) -> None:
    """A bar for each entry, which says its median."""
    low, middle, high = np.array([np.percentile(values, (10, 50, 90)) for values in found]).T
    axes.bar(at, middle, width, yerr=(middle - low, high - middle), capsize=3, label=label)
    for x, value, top in zip(at, middle, high, strict=True):
        clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        above = (0, 4)
        axes.annotate(short(value), (x, top), above, textcoords="offset points", ha="center", fontsize=7, bbox=clear)


def _target(axes: Axes, value: float, start: float, end: float, label: str) -> None:
    axes.hlines(value, start, end, linestyle="--", color="black")
    axes.text(end, value, f" {label}", fontsize=7, va="center")


def rate(axes: Axes, planes: dict[str, tuple[Values, float]]) -> None:
    """Hand-offs a second."""
    _bars(axes, range(len(planes)), [values for values, _ in planes.values()])
    for at, (_, target) in enumerate(planes.values()):
        _target(axes, target, at - 0.4, at + 0.3, f">= {target}")
    axes.set_xticks(range(len(planes)), list(planes))
    axes.set_ylabel("hand-offs a second, 64 under way")


def rooms(axes: Axes, planes: dict[str, dict[int, Values]]) -> None:
    """CPU of a hand-off over the number of live rooms."""
    for name, found in planes.items():
        low, middle, high = np.array([np.percentile(values, (10, 50, 90)) for values in found.values()]).T
        spread = (middle - low, high - middle)
        line, *_ = axes.errorbar(list(found), middle, yerr=spread, marker="o", capsize=3, label=name)
        axes.axhline(1.2 * middle[0], linestyle="--", color=line.get_color(), label=f"{name}: 1.2 of the first")
    axes.set_xscale("log")
    axes.set_xlabel("other hand-offs open")
    axes.set_ylabel("CPU of a hand-off, microseconds")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="lower right")


def frozen(axes: Axes, planes: dict[str, dict[str, tuple[Values, Values, float]]]) -> None:
    """Milliseconds beside a frozen peer and without one."""
    entries = {f"{name}\n{what}": found for name, whats in planes.items() for what, found in whats.items()}
    at = np.arange(len(entries))
    _bars(axes, list(at - WIDTH / 2), [before for before, *_ in entries.values()], "without a frozen peer")
    _bars(axes, list(at + WIDTH / 2), [during for _, during, _ in entries.values()], "beside one")
    for x, (before, _, most) in enumerate(entries.values()):
        _target(axes, most * float(np.median(before)), x, x + 0.4, f"{most} x")
    axes.set_xticks(at, list(entries), fontsize=8)
    axes.set_ylabel("ms")
    axes.legend(fontsize=8)


def concurrent(axes: Axes, planes: dict[str, tuple[Values, Values, Values]]) -> None:
    """Eight at once, and how fairly."""
    at = np.arange(3)
    for number, (name, found) in enumerate(planes.items()):
        _bars(axes, list(at + (number - 0.5) * WIDTH), found, name)
    for x, value, label in ((0, 1.0, ">= 1"), (2, 1.5, "<= 1.5")):
        _target(axes, value, x - 0.42, x + 0.42, label)
    axes.set_xticks(at, ["8 at once,\nof the bare engine", "8 at once,\nof 1 by 1", "slowest / fastest\nof the 8"])
    axes.set_ylabel("ratio")
    axes.legend(fontsize=8)


def idle(axes: Axes, planes: dict[str, Values]) -> None:
    """CPU without work."""
    _bars(axes, range(len(planes)), list(planes.values()))
    _target(axes, 2, -0.4, len(planes) - 0.6, "< 2 %")
    axes.set_xticks(range(len(planes)), list(planes))
    axes.set_ylabel("% of a core, paired and without work")


def startup(axes: Axes, planes: dict[str, dict[str, Values]]) -> None:
    """Phases of a start, and the first transfers."""
    for number, (name, phases) in enumerate(planes.items()):
        at = np.arange(len(phases)) + (number - 0.5) * WIDTH
        _bars(axes, list(at), list(phases.values()), name)
        last = len(phases) - 3
        most = 3 * float(np.median(phases["in a row"]))
        _target(axes, most, at[last] - WIDTH / 2, at[last] + WIDTH / 2, "")
        axes.set_xticks(range(len(phases)), list(phases), fontsize=8)
    axes.plot([], [], linestyle="--", color="black", label="first transfer: 3 x one in a row")
    axes.set_yscale("log")
    axes.set_ylabel("ms (import and start: of a process)")
    axes.legend(fontsize=8)

"""What was measured, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Row:
    """One measured figure. `met`: whether the target is reached; None where there is none."""

    figure: str
    plane: str
    what: str
    value: float
    unit: str
    spread: str = ""
    target: str = ""
    met: bool | None = None
    note: str = ""


@dataclass
class Results:
    """All rows, and the series that the plots need."""

    rows: list[Row] = field(default_factory=list)
    series: dict[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = print

    def add(self, row: Row) -> None:
        """Add a row and print it."""
        self.rows.append(row)
        self.say(f"  {row.plane}: {row.what}: {short(row.value)} {row.unit} {row.spread} {row.note}".rstrip())

    def worst(self, figure: str, plane: str = "", *, least: bool = False) -> float:
        """The worst value of a figure; nan when it was not measured."""
        values = [row.value for row in self.rows if row.figure == figure and row.plane.startswith(plane)]
        return (min if least else max)(values, default=float("nan"))


def short(value: float) -> str:
    """Three digits, or all of a whole number, never as a power of ten."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def spread(values: Sequence[float], unit: str = "") -> str:
    """10th to 90th percentile."""
    low, high = np.percentile(values, (10, 90))
    return f"[{short(low)} .. {short(high)}]{unit}"

"""What checksums and flight records cost, beside a connector that has neither."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from .figures import TINY, latencies, paced
from .memory import Shape
from .pair import Pair
from .process import NIXL, Plane
from .results import Results, Row, spread
from .scheduler import Job

Options = dict[str, Any]
MEDIUM = Shape(layers=16, item_bytes=32768, pages=256)
"""1 MiB a page."""


def watching(results: Results, stack: ExitStack) -> None:
    """CPU of a hand-off, both sides together: with checksums of 1 in 64, of all, and with flight records."""
    directory = Path(stack.enter_context(TemporaryDirectory()))
    variants: dict[str, Options] = {
        "without": {"checksum_rate": 0.0},
        "checksums of 1 in 64": {"checksum_rate": 1 / 64},
        "checksums of all": {"checksum_rate": 1.0},
        "flight recorder": {"checksum_rate": 0.0, "flight_dir": directory},
    }
    _compare(results, stack, NIXL, "one page", TINY, Job(0, 1500, 64, 1), variants)
    _compare(results, stack, NIXL, "64 MiB", MEDIUM, Job(0, 12, 1, 64), variants)


def _compare(
    results: Results, stack: ExitStack, plane: Plane, what: str, shape: Shape, job: Job, variants: dict[str, Options]
) -> None:
    """Ratios are taken within a round, for the machine's load changes from round to round."""
    pairs = {name: Pair(stack, plane, shape, options=options) for name, options in variants.items()}
    names = {id(pair): name for name, pair in pairs.items()}
    costs: dict[str, list[float]] = defaultdict(list)
    waits: dict[str, list[float]] = defaultdict(list)
    for pair in paced(list(pairs.values()), 5):
        times = pair.run(job)
        if pair.warm:
            costs[names[id(pair)]].append(sum(side.cpu_s for side in times) / job.count)
            waits[names[id(pair)]] += latencies(times)
    for name in variants:
        share = np.array(costs[name]) / np.array(costs["without"])
        cpu, wait = np.median(costs[name]) * 1e6, np.median(waits[name]) * 1e3
        note = f"{cpu:.0f} us of CPU a hand-off; last send to DONE p50 {wait:.2f} ms"
        results.add(
            Row("watching", plane.name, f"{what}: {name}", float(np.median(share)), "", spread(share), note=note)
        )

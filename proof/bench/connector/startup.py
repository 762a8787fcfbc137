"""How long a process takes until it can be offered work, and whether its first transfer is slower than others."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from .figures import PLANES, TINY, latencies
from .pair import Pair
from .process import Plane
from .results import Results, Row, spread
from .scheduler import Job

SAMPLES = 5
"""Of each plane, each with processes of its own: only they have a first transfer."""
IMPORTING = "import time; t = time.monotonic(); import pdpool_connector; print(time.monotonic() - t)"
ONE = Job(0, 1, 1, 1)
REST_S = 0.1


@dataclass
class Seen:
    """What fresh pairs of a plane took."""

    started: list[float] = field(default_factory=list)
    """Seconds, of the slower side."""
    ready: list[float] = field(default_factory=list)
    """Milliseconds from decode's first call to prefill's first send."""
    first: list[float] = field(default_factory=list)
    """Milliseconds."""
    later: list[float] = field(default_factory=list)
    """Milliseconds, of one in a row of others."""
    rested: list[float] = field(default_factory=list)
    """Milliseconds, of one after a rest: the code is out of the caches, as at the first, but has run before."""


def startup(results: Results, stack: ExitStack) -> None:
    """How long a process takes until it can be offered work, and whether its first transfer is slower than others."""
    del stack  # no process outlives its sample
    imported = [_imported() for _ in range(SAMPLES)]
    results.add(Row("import", "any", "import", float(np.median(imported)), "s", spread(imported)))
    found = {plane.name: Seen() for plane in PLANES}
    for _ in range(SAMPLES):
        for plane in PLANES:
            _sample(plane, found[plane.name])
    for name, seen in found.items():
        ratios = [first / later for first, later in zip(seen.first, seen.later, strict=True)]
        ratio = float(np.median(ratios))
        note = (
            f"first {np.median(seen.first):.2f} ms, later ones {np.median(seen.later):.2f} ms in a row "
            f"and {np.median(seen.rested):.2f} ms after a rest"
        )
        results.series.setdefault("startup", {})[name] = {
            "import": [spent * 1e3 for spent in imported],
            "start": [spent * 1e3 for spent in seen.started],
            "first room ready": seen.ready,
            "first transfer": seen.first,
            "after a rest": seen.rested,
            "in a row": seen.later,
        }
        what = "first transfer / later ones"
        results.add(Row("start", name, "start", float(np.median(seen.started)), "s", spread(seen.started)))
        results.add(Row("ready", name, "first room ready", float(np.median(seen.ready)), "ms", spread(seen.ready)))
        results.add(Row("startup", name, what, ratio, "x", spread(ratios), "<= 3", ratio <= 3, note))


def _imported() -> float:
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, check=True, timeout=60)
    return float(done.stdout)


def _sample(plane: Plane, seen: Seen) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, plane, TINY, warm_up=False)
        seen.started.append(max(side.facts["started_s"] for side in (pair.prefill, pair.decodes[0])))
        prefill, decode = pair.run(ONE)
        seen.ready.append((min(prefill.sent.values()) - decode.begun) * 1e3)
        seen.first += [spent * 1e3 for spent in latencies((prefill, decode))]
        seen.later.append(float(np.median(latencies(pair.run(Job(0, 50, 1, 1))))) * 1e3)
        for _ in range(SAMPLES):
            time.sleep(REST_S)
            seen.rested += [spent * 1e3 for spent in latencies(pair.run(ONE))]

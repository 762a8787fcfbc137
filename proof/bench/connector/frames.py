"""How many frames a hand-off without trouble takes, beside what the protocol needs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterable
from contextlib import ExitStack

from pdpool_connector.protocol.frames import Frame

from .figures import PLANES, TINY
from .pair import Pair
from .results import Results, Row
from .scheduler import Job

NEEDED = {"write": ("Open", "Accepted", "Done", "Ack"), "read": ("Open", "Accepted", "Computed", "Done", "Ack")}
"""What a protocol without aborts needs as well: an offer and an end, each with the answer that stops its repetition.
In READ decode moves the pages itself, so it has to be told where they are: `Computed`, which `Done` answers."""
ABORT_FRAMES = ("Abort", "Drained", "Failed", "Query")
"""What is said of an end other than Done, and asked about one: a protocol without aborts would lack these."""
HANDOFFS = 200
Said = tuple[str, Hashable]
"""Type of a frame, and what it is about: who says the same of the same again repeats himself."""


def said(frame: Frame) -> Said:
    """What counts as the same frame said again."""
    return type(frame).__name__, (getattr(frame, "attempt", None), getattr(frame, "sequence", None))


def frames(results: Results, stack: ExitStack) -> None:
    """Frames that a hand-off without trouble costs, said first and again, and how many of them only aborts need."""
    for plane in PLANES:
        for direction in NEEDED:
            pair = Pair(stack, plane, TINY, options={"direction": direction})
            sides = (pair.prefill, pair.decodes[0])
            for side in sides:
                side.call("count_frames")
            pair.run(Job(0, HANDOFFS, 1, 1))
            time.sleep(0.3)  # the last acknowledgement
            counts: Counter[Said] = Counter()
            for side in sides:
                counts.update(side.call("frames_sent"))
            for row in judged(plane.name, direction, counts, HANDOFFS):
                results.add(row)


def judged(plane: str, direction: str, counts: Counter[Said], handoffs: int) -> Iterable[Row]:
    """Rows of what was said, each judged by the value that it shows."""
    where = direction.upper()
    first = Counter(name for name, _ in counts)
    again = Counter(dict.fromkeys(first, 0))
    for (name, _), number in counts.items():
        again[name] += number - 1
    target = len(NEEDED[direction])
    each, repeated = first.total() / handoffs, again.total() / handoffs
    safety = sum(first[name] + again[name] for name in ABORT_FRAMES) / handoffs
    what = f"frames of a hand-off in {where}, each counted once"
    yield Row("frames", plane, what, each, "", "", f"<= {target}", each <= target, _list(first, handoffs))
    note = _list(+again, handoffs)
    if again["Accepted"]:
        note += "; Accepted answers an Open that is there before prefill's request, and says again when that has come"
    yield Row("frames again", plane, f"frames said again of a hand-off in {where}", repeated, "", note=note)
    note = f"{', '.join(ABORT_FRAMES)} all together, said again or not, where nobody aborts"
    what = f"frames for the safety of aborts in {where}"
    yield Row("frames for aborts", plane, what, safety, "", "", "<= 0", safety <= 0, note)


def _list(counts: Counter[str], handoffs: int) -> str:
    return ", ".join(f"{name} {number / handoffs:g}" for name, number in counts.items()) or "none"

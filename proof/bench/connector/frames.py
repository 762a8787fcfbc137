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

NEEDED = ("Open", "Offer", "Ended", "Ack")
"""What a protocol without aborts needs as well: request, memory, end, and the answer that stops its repetition."""
ANSWER = "Accepted"
"""Sent only because a frame was repeated."""
ABORT_FRAMES = ("Abort", "Query")
"""Frames about an end other than success: a protocol without aborts would lack these."""
HANDOFFS = 200
Content = tuple[str, Hashable]
"""Type of a frame, and what it is about: a second frame with the same content is a repetition."""


def content(frame: Frame) -> Content:
    """What two frames have in common if the second repeats the first."""
    return type(frame).__name__, getattr(frame, "attempt", None)


def frames(results: Results, stack: ExitStack) -> None:
    """Frames that a hand-off without trouble costs, first ones and repetitions, and those that only aborts need."""
    for plane in PLANES:
        pair = Pair(stack, plane, TINY, counts_frames=True)
        sides = (pair.prefill, pair.decodes[0])
        for side in sides:
            side.call("count_frames")
        pair.run(Job(0, HANDOFFS, 1, 1))
        time.sleep(0.3)  # the last acknowledgement
        counts: Counter[Content] = Counter()
        for side in sides:
            counts.update(side.call("frames_sent"))
        for row in judged(plane.name, counts, HANDOFFS):
            results.add(row)


def judged(plane: str, counts: Counter[Content], handoffs: int) -> Iterable[Row]:
    """Rows of what was sent, each judged by the value that it shows."""
    first = Counter(name for name, _ in counts if name != ANSWER)
    again = Counter(dict.fromkeys(first, 0))
    for (name, _), number in counts.items():
        again[name] += number if name == ANSWER else number - 1
    target = len(NEEDED)
    each, repeated = first.total() / handoffs, again.total() / handoffs
    safety = sum(first[name] + again[name] for name in ABORT_FRAMES) / handoffs
    what = "frames of a hand-off, each counted once"
    yield Row("frames", plane, what, each, "", "", f"<= {target}", each <= target, _list(first, handoffs))
    again_note = _list(+again, handoffs)
    yield Row("frames again", plane, "repeated frames of a hand-off", repeated, "", note=again_note)
    note = f"{', '.join(ABORT_FRAMES)} together, repeated or not, where no side aborts"
    yield Row("frames for aborts", plane, "frames for the safety of aborts", safety, "", "", "<= 0", safety <= 0, note)


def _list(counts: Counter[str], handoffs: int) -> str:
    return ", ".join(f"{name} {number / handoffs:g}" for name, number in counts.items()) or "none"

"""From tokens to text that may be shown: complete characters only, and nothing of a stop string."""

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, one by one."""

    def add(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


class TextStream:
    """The text of one sequence. Holds back an ending that may turn into a stop string.

    Args:
        detokenizer: fresh, used by this sequence only.
        stops: texts that end the sequence; none of their characters is shown.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._pending = ""

    def add(self, token: int) -> tuple[str, str | None]:
        """The text to show after this token, and the stop string that it completed, if any."""
        self._pending += self._detokenizer.add(token)
        found = [(at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            text, self._pending = self._pending[:at], ""
            return text, stop
        keep = max((_overlap(self._pending, stop) for stop in self._stops), default=0)
        cut = len(self._pending) - keep
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text, None

    def flush(self) -> str:
        """What was held back, for a sequence that ends otherwise than by a stop string."""
        text, self._pending = self._pending + self._detokenizer.flush(), ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

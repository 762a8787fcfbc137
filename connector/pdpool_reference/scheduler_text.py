"""From tokens to text: complete characters only, and nothing of a stop string."""

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, one by one."""

    def add(self, token: int) -> str:
        """Return the text that this token completes, possibly none."""
        ...

    def flush(self) -> str:
        """Return the rest of the text at the end."""
        ...


class TextStream:
    """The text of one sequence. Keeps back an ending that may become a stop string.

    Args:
        detokenizer: fresh, used by this sequence only.
        stops: texts that end the sequence, and are not part of its text.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._pending = ""

    def add(self, token: int) -> tuple[str, str | None]:
        """Return the new text after this token, and the stop string that it completed, if any."""
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
        """Return the text kept back, of a sequence that does not end by a stop string."""
        text, self._pending = self._pending + self._detokenizer.flush(), ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest ending of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

"""Where hand-offs of which something may still come are found: by room, sibling and prompt.

A router may use a room again while a half of its last request is still queued somewhere, and each side may have made up
a request id of its own. The prompt is what both sides know: halves of different prompts never meet, and equal prompts
have equal caches. A half that does not tell its prompt (an engine or a peer that does not know how) meets any.
"""

from collections.abc import Iterator

from pdpool_connector.protocol.exchange import HandOff


def may_meet(prompt: bytes, other: bytes) -> bool:
    """False for halves that cannot be of the same request."""
    return prompt == other or not prompt or not other


class Rooms:
    """Live hand-offs; in each place those that came first stand first."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], dict[bytes, HandOff]] = {}

    def __iter__(self) -> Iterator[HandOff]:
        for here in self._rows.values():
            yield from here.values()

    def find(self, room: int, sibling: int, prompt: bytes) -> HandOff | None:
        """The hand-off that a half belongs to: that of its own prompt before one of which no prompt is known."""
        here = self._rows.get((room, sibling))
        if here is None:
            return None
        if prompt in here:
            return here[prompt]
        return here.get(b"") if prompt else next(iter(here.values()))

    def enter(self, handoff: HandOff, prompt: bytes) -> None:
        """Put a hand-off where its other halves will look for it; `prompt` is that of the half that has just come."""
        if prompt and not handoff.prompt:
            self.leave(handoff)
            handoff.prompt = prompt
        self._rows.setdefault(handoff.key, {})[handoff.prompt] = handoff

    def leave(self, handoff: HandOff) -> None:
        """Nothing more is to come of it, or has anything to do with it."""
        here = self._rows.get(handoff.key)
        if here is not None and here.get(handoff.prompt) is handoff:
            del here[handoff.prompt]
            if not here:
                del self._rows[handoff.key]

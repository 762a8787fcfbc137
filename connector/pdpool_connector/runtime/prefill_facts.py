"""What the registries of prefill instances say of their engines, by bootstrap address."""

from collections.abc import Mapping


class PrefillFacts:
    """Owner thread, but for `of`: any thread.

    Args:
        pause_s: Seconds until a registry that has not answered is asked again.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._known: dict[str, Mapping[str, str]] = {}
        """Replaced whole, so that any thread may read it."""
        self._asked: dict[str, float] = {}

    def of(self, prefill: str) -> Mapping[str, str] | None:
        """The facts of an instance; None as long as its registry has not answered."""
        return self._known.get(prefill)

    def note(self, prefill: str, facts: Mapping[str, str]) -> None:
        """A registry has answered."""
        self._known = {**self._known, prefill: facts}

    def forget(self, prefill: str) -> None:
        """The instance is no longer connected."""
        self._known = {one: facts for one, facts in self._known.items() if one != prefill}

    def ask(self, prefill: str, now: float) -> bool:
        """Whether to ask a registry now. True once in `pause_s`."""
        self._asked = {one: at for one, at in self._asked.items() if now - at < self._pause_s}
        if prefill in self._asked:
            return False
        self._asked[prefill] = now
        return True

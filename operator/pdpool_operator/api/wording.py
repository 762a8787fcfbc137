"""How messages list many things: the first few, and how many more there are."""

from collections.abc import Sequence

SHOWN = 5


def some(items: Sequence[str], between: str = ", ") -> str:
    """Return the first items as text, and how many more there are."""
    return between.join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")

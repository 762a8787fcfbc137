"""Tables and ages, in the form that kubectl prints them."""

from collections.abc import Sequence
from datetime import datetime


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Return aligned lines, the head first, without spaces at their ends."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        indent + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def age(since: datetime, now: datetime) -> str:
    """Return how long ago a moment was: `92s`, `12m`, `5h`, `3d`."""
    return seconds((now - since).total_seconds())


def seconds(value: float) -> str:
    """Return a time in its largest unit of which there are two or more, as kubectl does: `92s`, `12m`, `5h`, `3d`."""
    whole = max(0, int(value))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def counted(number: int, noun: str, rest: str = "") -> str:
    """Return `1 pool`, `2 pools`, or with `rest` behind the noun `1 question unanswered`."""
    return " ".join(filter(None, (str(number), noun if number == 1 else f"{noun}s", rest)))

"""Makes a failing schedule short: steps are left out for as long as what is left still breaks a promise."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def shrink(items: Sequence[Item], fails: Callable[[list[Item]], bool], most_tries: int = 2000) -> list[Item]:
    """Return a part of `items` that still fails, from which no single item can be left out (within `most_tries`).

    Delta debugging: ever smaller runs of items are left out, from the end backward, since what follows the violation
    goes first and cheaply.
    """
    left = list(items)
    tries = 0
    size = max(len(left) // 2, 1)
    while True:
        shorter = False
        at = len(left)
        while at > 0 and tries < most_tries:
            at = max(at - size, 0)
            candidate = left[:at] + left[at + size :]
            tries += 1
            if len(candidate) < len(left) and fails(candidate):
                left, shorter = candidate, True
        if tries >= most_tries or (size == 1 and not shorter):
            return left
        size = size if shorter and size == 1 else max(size // 2, 1)

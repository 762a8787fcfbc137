"""Which keys a new engine pod gets, so that a rotation of all keys never parts two engines that serve together.

Keys are numbered by epochs. Prefill listens with the key of one epoch. Decode connects with the key of its newest epoch
or of the one before it, if it has both. Two engines can connect if prefill's epoch is one of decode's. A rotation from
epoch n to n + 1 has three steps, and each waits until the one before it is complete:

    decode n + 1 and n,  then prefill n + 1,  then decode n + 1
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .names import Role

FIRST_EPOCH = 1


@dataclass(frozen=True, order=True, slots=True)
class KeyEpochs:
    """Epochs of the keys that one pod has. Value of the annotation `pdpool.dev/key-epoch`: `2`, or `2-1`."""

    newest: int = FIRST_EPOCH
    oldest: int = 0
    """0 stands for the same as `newest`."""

    def __post_init__(self) -> None:
        """Store the oldest epoch, so that equal keys compare equal."""
        object.__setattr__(self, "oldest", self.oldest or self.newest)

    @property
    def all(self) -> frozenset[int]:
        """Both epochs, or the only one."""
        return frozenset({self.newest, self.oldest})

    def __str__(self) -> str:
        """Return the annotation's text, which also names the key file."""
        return f"{self.newest}" if self.newest == self.oldest else f"{self.newest}-{self.oldest}"

    @classmethod
    def parse(cls, text: str) -> "KeyEpochs | None":
        """Read an annotation; None if it is missing or malformed."""
        found = re.fullmatch(r"([1-9]\d{0,3})(?:-([1-9]\d{0,3}))?", text)
        return cls(int(found[1]), int(found[2] or 0)) if found else None


FIRST_KEYS = KeyEpochs()
"""Keys before any rotation."""


def next_epochs(role: Role, target: int, others: Iterable[KeyEpochs]) -> KeyEpochs:
    """Return the keys of new pods, so that they can connect to all present pods of the other role.

    Args:
        role: Prefill or decode.
        target: The epoch that the operator's settings ask for.
        others: Keys of every engine pod of the other role in the namespace.
    """
    present = list(others)
    if not present:
        return KeyEpochs(target)
    if role is Role.PREFILL:
        common = frozenset.intersection(*(one.all for one in present))
        return KeyEpochs(max(common)) if common else min(present, key=lambda one: one.newest)
    oldest, newest = min(one.newest for one in present), max(one.newest for one in present)
    return KeyEpochs(min(max(target, newest), oldest + 1), oldest)

"""Regions of a model's state, and what of them a tensor rank holds, by the slow obvious way: numpy's slices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pdpool_connector.layout.memory import StateCut

WHOLE_BYTES = 5  # of an item that moves whole


@dataclass(frozen=True)
class Kind:
    """A region of one layer's state: items of [outer, units of each group in the model, bytes of a unit].

    Groups that are `copied` are on no rank in part. Without groups items move whole, and are the same on all ranks.
    """

    outer: int = 1
    groups: tuple[int, ...] = ()
    copied: tuple[bool, ...] = ()
    unit: int = 1

    def held(self, ranks: int) -> tuple[int, ...]:
        return tuple(
            units if copied else units // ranks for units, copied in zip(self.groups, self.copied, strict=True)
        )

    def cut(self, ranks: int) -> StateCut | None:
        return StateCut(self.outer, self.held(ranks)) if self.groups else None

    def item_bytes(self, ranks: int) -> int:
        return self.outer * sum(self.held(ranks)) * self.unit if self.groups else WHOLE_BYTES

    def share(self, items: int, seed: Sequence[int], rank: int, ranks: int) -> np.ndarray:
        """What one rank holds of the model's state that `seed` stands for: (item, byte)."""
        random = np.random.default_rng(seed)
        if not self.groups:
            return random.integers(1, 256, (items, WHOLE_BYTES), np.uint8)
        parts = []
        for units, held, copied in zip(self.groups, self.held(ranks), self.copied, strict=True):
            group = random.integers(1, 256, (items, self.outer, units, self.unit), np.uint8)
            parts.append(group if copied else group[:, :, rank * held : (rank + 1) * held])
        return np.concatenate(parts, axis=2).reshape(items, -1)

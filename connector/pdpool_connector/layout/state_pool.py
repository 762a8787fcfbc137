"""State pools: what a request keeps beside its KV pages (Mamba, sliding window, indexer)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from .regions import (
    MAX_ITEM_BYTES,
    LayoutError,
    Region,
    check_kinds,
    check_name,
    check_pool,
    check_range,
)
from .tensors import Tensor, read_tensor

MAX_LAYERS: Final = 2048
"""Most layers of one model; no known model comes near."""
MAX_STATE_REGIONS: Final = 4096
"""Most regions of one state pool, and of all state pools of one memory."""
MAX_RANKS: Final = 512
"""Most ranks of one instance: TP 8 x PP 64, and no deployment comes near."""
MAX_GROUPS: Final = 8
"""Most groups of one axis; known models have three (q, k, v; or x, B, C)."""
MAX_SEGMENTS: Final = 1 << 14
"""Most segments (`StateCut`) of all state regions, each of which is a row of the plan. Nemotron-H 56B has some 500."""


class StateCut(msgspec.Struct, frozen=True, array_like=True):
    """How the items of one state region are cut over tensor-parallel ranks: each is [outer, axis, the rest], in bytes.

    An axis may be a concatenation of groups that are cut one by one, such as x, B and C of a convolution. A unit has
    as many bytes as the item leaves for it. A *segment* is the contiguous bytes of one group: an item has
    outer * len(groups) of them.

    Args:
        outer: Product of the dimensions before the axis that is cut, 1 where that is the first.
        groups: Units of each group that this rank holds.

    Raises:
        LayoutError: A number is out of bounds.
    """

    outer: int
    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        check_range("outer of a state cut", self.outer, 1, MAX_SEGMENTS)
        check_kinds("groups of a state cut", self.groups, int)
        check_range("number of groups of a state cut", len(self.groups), 1, MAX_GROUPS)
        for index, units in enumerate(self.groups):
            check_range(f"groups[{index}] of a state cut", units, 1, MAX_ITEM_BYTES)

    @property
    def units(self) -> int:
        """Units in one item."""
        return self.outer * sum(self.groups)

    @property
    def segments(self) -> int:
        """Segments in one item."""
        return self.outer * len(self.groups)


class StatePool(msgspec.Struct, frozen=True):
    """Regions in which one state id selects an item each. Ids of different pools have nothing to do with each other.

    Both sides of a pairing have the same pools in the same order. Regions of one pool must not overlap; they may
    overlap those of other pools, as the cache groups of vLLM do.

    Args:
        name: Kind of the state, such as "mamba" or "swa".
        regions: Regions with equally many items, all in the same memory.
        layers: For each region its layer, by its number in the model, in ascending order. Empty where the state
            belongs to all layers of the rank together.
        cuts: For each region how its items are cut over ranks, None for one that moves whole. Empty where all do.
        rank: Which of the `ranks` equal shares this rank holds.
        ranks: Number of shares; 0 where no region is cut, 1 where each rank has all of it.

    Raises:
        LayoutError: A field is out of bounds, or the fields do not fit together.
    """

    name: str
    regions: tuple[Region, ...]
    layers: tuple[int, ...] = ()
    cuts: tuple[StateCut | None, ...] = ()
    rank: int = 0
    ranks: int = 0

    def __post_init__(self) -> None:
        check_name("name of a state pool", self.name)
        named = f"state pool {self.name!r}"
        check_kinds(f"regions of {named}", self.regions, Region)
        check_kinds(f"layers of {named}", self.layers, int)
        check_kinds(f"cuts of {named}", self.cuts, StateCut, or_none=True)
        check_range(f"number of regions of {named}", len(self.regions), 1, MAX_STATE_REGIONS)
        check_share(self.rank, self.ranks)
        check_pool(named, "items", self.regions)
        self._check_layers(named)
        self._check_cuts(named)

    @classmethod
    def from_tensors(
        cls,
        name: str,
        tensors: Sequence[Tensor],
        *,
        layers: tuple[int, ...] = (),
        cuts: tuple[StateCut | None, ...] = (),
        rank: int = 0,
        ranks: int = 0,
    ) -> StatePool:
        """A pool of contiguous tensors [items, ...], one for each region; see the class for the other arguments."""
        regions = [read_tensor(f"{name}[{index}]", tensor).rows() for index, tensor in enumerate(tensors)]
        return cls(name, tuple(regions), layers=layers, cuts=cuts, rank=rank, ranks=ranks)

    def _check_layers(self, named: str) -> None:
        if not self.layers:
            return
        if len(self.layers) != len(self.regions):
            raise LayoutError(
                f"layers of {named} has {len(self.layers)} numbers for {len(self.regions)} regions, must be as many"
            )
        least = 0
        for index, layer in enumerate(self.layers):
            check_range(f"layers[{index}] of {named}", layer, least, MAX_LAYERS - 1)
            least = layer

    def _check_cuts(self, named: str) -> None:
        if self.cuts and len(self.cuts) != len(self.regions):
            raise LayoutError(
                f"cuts of {named} has {len(self.cuts)} cuts for {len(self.regions)} regions, must be as many"
            )
        for index, (cut, region) in enumerate(zip(self.cuts, self.regions, strict=False)):
            if cut is None:
                continue
            check_range(f"ranks of {named} (region {index} is cut)", self.ranks, 1, MAX_RANKS)
            if region.item_bytes % cut.units:
                raise LayoutError(
                    f"item_bytes of region {index} of {named} is {region.item_bytes}, must be a multiple of the "
                    f"{cut.units} units of its cut (outer {cut.outer} * groups {cut.groups})"
                )
        check_range(f"segments of {named}", self.segments, 0, MAX_SEGMENTS)

    @property
    def items(self) -> int:
        """Number of items of each region: valid ids are 0..items - 1."""
        return self.regions[0].items

    @property
    def item_bytes(self) -> int:
        """Bytes of one item over all regions."""
        return sum(region.item_bytes for region in self.regions)

    @property
    def device(self) -> int | None:
        """The device that holds the pool, None for host memory."""
        return self.regions[0].device

    @property
    def segments(self) -> int:
        """Segments of one item over all regions that are cut."""
        return sum(cut.segments for cut in self.cuts if cut is not None)

    def cut_of(self, region: int) -> StateCut | None:
        """How the items of a region are cut; None where they move whole."""
        return self.cuts[region] if self.cuts else None

    def regions_in(self, first_layer: int, layers: int) -> list[int]:
        """Indices of the regions that belong to these layers; all where `layers` of the pool is empty."""
        if not self.layers:
            return list(range(len(self.regions)))
        wanted = range(first_layer, first_layer + layers)
        return [index for index, layer in enumerate(self.layers) if layer in wanted]


def check_share(rank: int, ranks: int) -> None:
    """Raise LayoutError unless `rank` is one of the `ranks` that share the state, or both are 0."""
    check_range("state_ranks", ranks, 0, MAX_RANKS)
    check_range(f"state_rank (of {ranks} state_ranks)", rank, 0, max(ranks - 1, 0))

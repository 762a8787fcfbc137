"""What a process registers for hand-offs, and how it is told to a peer.

The terms: a *region* is a dense array of equal items; an item of a KV region is one page (of one layer's K or V), an
item of the aux region is one aux row, an item of a state region is what one layer keeps of a request beside the cache
(Mamba) or a page of a sliding window. A page id selects the same item of every KV region, a state id of every state
region.
"""

from __future__ import annotations

import itertools
from typing import Final

import msgspec

from .process import ProcessName

MAX_REGIONS: Final = 4096
"""Bound on KV regions of one rank: 2 for each layer, and no model comes near 2048 layers."""
MAX_ITEMS: Final = 2**31 - 1
"""Bound on all items of one memory together: item indices are int32 in every engine."""
MAX_ITEM_BYTES: Final = 2**32
MAX_ADDRESS: Final = 2**63 - 1
"""Bound on the end of a region, so that address arithmetic in int64 cannot wrap."""
MAX_DESCRIPTOR_BYTES: Final = 1 << 20
MAX_NAME: Final = 256
MAX_ENCODED_BYTES: Final = 2 << 20
"""Bound on an encoded `RemoteMemory`: a full descriptor plus `MAX_REGIONS` regions."""
MAX_RANKS: Final = 512
"""Bound on the ranks of one instance, among which a layer's state may be shared: TP 8 x PP 64, and no deployment comes
near."""
MAX_GROUPS: Final = 8
"""Bound on the groups of one axis; known models have three (q, k, v; or x, B, C)."""
MAX_SEGMENTS: Final = 1 << 14
"""Bound on the segments (`StateCut`) of all state regions together, each of which is a row of the plan. Nemotron-H 56B,
with 54 layers of Mamba, has some 500."""


class LayoutError(ValueError):
    """A memory, page list or plan that cannot be right; the message names the field, the value and what would be."""


def _within(field: str, value: int, low: int, high: int) -> None:
    if type(value) is not int:
        raise LayoutError(f"{field} is {value!r} ({type(value).__name__}), must be a plain int")
    if not low <= value <= high:
        raise LayoutError(f"{field} is {value}, must be {low}..{high}")


def _is_a(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise LayoutError(f"{field} is {value!r} ({type(value).__name__}), must be a {kind.__name__}")


def _are_all(field: str, values: object, kind: type, *, or_none: bool = False) -> None:
    if not isinstance(values, tuple | list):
        raise LayoutError(f"{field} is {values!r} ({type(values).__name__}), must be a tuple of {kind.__name__}")
    for index, value in enumerate(values):
        if value is not None or not or_none:
            _is_a(f"{field}[{index}]", value, kind)


def _named(field: str, value: str) -> None:
    _is_a(field, value, str)
    if not 1 <= len(value) <= MAX_NAME:
        raise LayoutError(f"{field} has {len(value)} characters, must have 1..{MAX_NAME}")


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A dense array of `items` items of `item_bytes` bytes, the first at virtual address `address`.

    Raises LayoutError when a field is out of bounds or the region would end beyond `MAX_ADDRESS`.
    """

    address: int
    item_bytes: int
    items: int

    def __post_init__(self) -> None:
        _within("region.address", self.address, 1, MAX_ADDRESS)
        _within("region.item_bytes", self.item_bytes, 1, MAX_ITEM_BYTES)
        _within("region.items", self.items, 1, MAX_ITEMS)
        _within("region end (address + item_bytes * items)", self.end, 1, MAX_ADDRESS)

    @property
    def nbytes(self) -> int:
        """Length of the region in bytes."""
        return self.item_bytes * self.items

    @property
    def end(self) -> int:
        """First address behind the region."""
        return self.address + self.nbytes


class StateCut(msgspec.Struct, frozen=True, array_like=True):
    """How the items of one state region are cut over tensor-parallel ranks: each is [outer, axis, the rest], in bytes.

    outer: product of the dimensions before the axis that is cut, 1 where it is the first. groups: units of the axis
    that this rank holds: one number, or one for each of the groups of which the axis is a concatenation and which are
    cut each on its own (a convolution's q, k, v or x, B, C). A unit is as many bytes as the item leaves for it. A
    *segment* is what lies together of one group: there are outer * len(groups) in an item.

    Raises LayoutError when a number is out of bounds.
    """

    outer: int
    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        _within("outer of a state cut", self.outer, 1, MAX_SEGMENTS)
        _are_all("groups of a state cut", self.groups, int)
        _within("number of groups of a state cut", len(self.groups), 1, MAX_GROUPS)
        for index, units in enumerate(self.groups):
            _within(f"groups[{index}] of a state cut", units, 1, MAX_ITEM_BYTES)

    @property
    def units(self) -> int:
        """Units in one item, over all that is before the axis."""
        return self.outer * sum(self.groups)

    @property
    def segments(self) -> int:
        """Segments in one item."""
        return self.outer * len(self.groups)


class KVMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that one rank registers, with the identity of the model whose cache it holds.

    kv: two regions for each layer held, in the order K, V of the first, K, V of the next, …, or one where K and V come
    from the same latent (MLA); all have the same number of items (pages). A page is [page_tokens, kv_heads, elements of
    a head], without padding; K's heads may be longer than V's. aux: one region of aux rows. page_tokens: tokens in one
    page. head_dim: elements of one head. dtype: element type by its numpy name (`float32`, `bfloat16`, …). model: name
    that both sides must agree on.

    state: none, or regions that all have the same number of items. state_layers: for each of them the layer, by its
    number in the model, that it belongs to, in ascending order; none where state is of all that is held together.
    state_cuts: for each of them how its items are cut over tensor-parallel ranks, None for one that moves whole; none
    where all do. state_rank, state_ranks: this rank holds share number `state_rank` of the `state_ranks` equal ones
    that state is cut into, whatever heads it holds; 0 ranks where none is cut, 1 where each rank has all of it.

    The part of the model that this rank holds: `layers` layers from `first_layer` on out of `total_layers`, and of each
    `kv_heads` heads from `first_head` on out of `total_heads`. By default that is all of it: a total of 0 is replaced
    by what is held. A cache that every tensor-parallel rank has in full (MLA) has one head in total.

    Raises LayoutError when counts do not fit together, a field is out of bounds, or regions overlap.
    """

    kv: tuple[Region, ...]
    aux: Region
    page_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    model: str
    first_layer: int = 0
    total_layers: int = 0
    first_head: int = 0
    total_heads: int = 0
    state: tuple[Region, ...] = ()
    state_layers: tuple[int, ...] = ()
    state_cuts: tuple[StateCut | None, ...] = ()
    state_rank: int = 0
    state_ranks: int = 0

    def __post_init__(self) -> None:
        _within("layers", self.layers, 1, MAX_REGIONS // 2)
        _within("page_tokens", self.page_tokens, 1, 1 << 20)
        _within("kv_heads", self.kv_heads, 1, 1 << 20)
        _within("head_dim", self.head_dim, 1, 1 << 20)
        self._place("layer", self.layers, MAX_REGIONS // 2)
        self._place("head", self.kv_heads, 1 << 20)
        self._check_kinds()
        _named("dtype", self.dtype)
        _named("model", self.model)
        if len(self.kv) not in (self.layers, 2 * self.layers):
            raise LayoutError(
                f"kv has {len(self.kv)} regions, must have 2 * layers = {2 * self.layers}, or one for each layer"
            )
        _within("number of state regions", len(self.state), 0, MAX_REGIONS)
        self._check_state_layers()
        check_share(self.state_rank, self.state_ranks)
        self._check_state_cuts()
        self._refuse_indivisible()
        _refuse_unequal("kv", "pages", self.kv)
        _refuse_unequal("state", "items", self.state)
        total = sum(region.items for region in self.regions)
        _within("items of all regions together", total, 1, MAX_ITEMS)
        _refuse_overlap(self.regions)

    def _check_kinds(self) -> None:
        _are_all("kv", self.kv, Region)
        _is_a("aux", self.aux, Region)
        _are_all("state", self.state, Region)
        _are_all("state_layers", self.state_layers, int)
        _are_all("state_cuts", self.state_cuts, StateCut, or_none=True)

    def _place(self, unit: str, held: int, most: int) -> None:
        """Put what is held in the place of a total that was left out, and check the range."""
        first_field, total_field = f"first_{unit}", f"total_{unit}s"
        first, total = getattr(self, first_field), getattr(self, total_field)
        if total == 0 and type(total) is int:
            total = held
            msgspec.structs.force_setattr(self, total_field, total)
        _within(total_field, total, 1, most)
        if held > total:
            raise LayoutError(f"{total_field} is {total}, must be at least the {held} {unit}s held")
        _within(f"{first_field} (with {held} of {total} {unit}s held)", first, 0, total - held)

    def _check_state_layers(self) -> None:
        if not self.state_layers:
            return
        if len(self.state_layers) != len(self.state):
            raise LayoutError(
                f"state_layers has {len(self.state_layers)} layers for {len(self.state)} state regions, must be as many"
            )
        least = self.first_layer
        for index, layer in enumerate(self.state_layers):
            _within(f"state_layers[{index}]", layer, least, self.first_layer + self.layers - 1)
            least = layer

    def _check_state_cuts(self) -> None:
        if not self.state_cuts:
            return
        if len(self.state_cuts) != len(self.state):
            raise LayoutError(
                f"state_cuts has {len(self.state_cuts)} cuts for {len(self.state)} state regions, must be as many"
            )
        segments = 0
        for index, (cut, region) in enumerate(zip(self.state_cuts, self.state, strict=True)):
            if cut is None:
                continue
            _within(f"state_ranks (state region {index} is cut)", self.state_ranks, 1, MAX_RANKS)
            segments += cut.segments
            if region.item_bytes % cut.units:
                raise LayoutError(
                    f"item_bytes of state region {index} is {region.item_bytes}, must be a multiple of the {cut.units} "
                    f"units that state_cuts tells (outer {cut.outer} * groups {cut.groups})"
                )
        _within("segments of all state regions together", segments, 0, MAX_SEGMENTS)

    def _refuse_indivisible(self) -> None:
        """Where only some heads are held, pages may have to be cut between heads."""
        cells = self.page_tokens * self.kv_heads
        for index, region in enumerate(self.kv if self.kv_heads < self.total_heads else ()):
            if region.item_bytes % cells:
                raise LayoutError(
                    f"item_bytes of kv region {index} is {region.item_bytes}, must be a multiple of "
                    f"page_tokens * kv_heads = {cells}"
                )

    @property
    def regions(self) -> tuple[Region, ...]:
        """All memory of this rank that is to be registered."""
        return (*self.kv, *self.state, self.aux)

    @property
    def regions_per_layer(self) -> int:
        """2 where K and V are apart, otherwise 1."""
        return len(self.kv) // self.layers

    def region_of(self, layer: int, part: int) -> int:
        """Index in `kv` of a layer that is held, by its number in the whole model; part: 0 is K, 1 is V."""
        return (layer - self.first_layer) * self.regions_per_layer + part

    @property
    def pages(self) -> int:
        """Number of pages: valid page ids are 0..pages - 1."""
        return self.kv[0].items

    def state_in(self, first_layer: int, layers: int) -> list[int]:
        """Indices of the state regions that belong to these layers; all where state is of no single layers."""
        if not self.state_layers:
            return list(range(len(self.state)))
        wanted = range(first_layer, first_layer + layers)
        return [index for index, layer in enumerate(self.state_layers) if layer in wanted]

    def cut_of(self, index: int) -> StateCut | None:
        """How the items of a state region are cut; None where they move whole."""
        return self.state_cuts[index] if self.state_cuts else None

    @property
    def state_items(self) -> int:
        """Number of items of each state region: valid state ids are 0..state_items - 1."""
        return self.state[0].items if self.state else 0

    @property
    def aux_rows(self) -> int:
        """Number of aux rows: valid aux slots are 0..aux_rows - 1."""
        return self.aux.items

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V."""
        return sum(region.item_bytes for region in self.kv)

    @property
    def state_bytes(self) -> int:
        """Bytes of one item of state over all its regions."""
        return sum(region.item_bytes for region in self.state)


def differs(field: str, ours: object, theirs: object) -> str:
    """What is said of a field that must be the same in two memories and is not."""
    return f"{field} is {ours!r} here and {theirs!r} at the peer, must be the same"


def first_of(found: list[str]) -> list[str]:
    """Of what is said of each region that differs, the first line, and how many more there are; mostly all differ."""
    more = f" ({len(found) - 1} more regions differ)" if len(found) > 1 else ""
    return [line + more for line in found[:1]]


def check_share(rank: int, ranks: int) -> None:
    """Raise LayoutError unless `rank` is one of the `ranks` that share the state, or both are 0."""
    _within("state_ranks", ranks, 0, MAX_RANKS)
    _within(f"state_rank (of {ranks} state_ranks)", rank, 0, max(ranks - 1, 0))


def _refuse_unequal(field: str, unit: str, regions: tuple[Region, ...]) -> None:
    counts = sorted({region.items for region in regions})
    if len(counts) > 1:
        raise LayoutError(f"{field} regions hold {counts} {unit}, must all hold the same number")


def _refuse_overlap(regions: tuple[Region, ...]) -> None:
    ordered = sorted(regions, key=lambda region: region.address)
    for left, right in itertools.pairwise(ordered):
        if left.end > right.address:
            raise LayoutError(
                f"region at {left.address:#x} with {left.nbytes} bytes overlaps the region at {right.address:#x}"
            )


class RemoteMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer tells of its memory at pairing.

    backend: name of the transfer backend that registered it. memory: its geometry; the addresses are the peer's own.
    descriptor: what that backend's `register` returned, opaque to other backends. process: the process that holds it;
    None if the peer does not say.

    Raises LayoutError when a field is out of bounds.
    """

    backend: str
    memory: KVMemory
    descriptor: bytes
    process: ProcessName | None = None

    def __post_init__(self) -> None:
        _named("backend", self.backend)
        if len(self.descriptor) > MAX_DESCRIPTOR_BYTES:
            raise LayoutError(f"descriptor has {len(self.descriptor)} bytes, must have at most {MAX_DESCRIPTOR_BYTES}")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RemoteMemory)


def encode_remote(remote: RemoteMemory) -> bytes:
    """Serialise for the wire (msgpack)."""
    return _encoder.encode(remote)


def decode_remote(data: bytes) -> RemoteMemory:
    """Parse and validate what a peer sent; unknown fields are ignored, so that newer peers may add some.

    Raises LayoutError for anything that is not a valid `RemoteMemory`.
    """
    if len(data) > MAX_ENCODED_BYTES:
        raise LayoutError(f"encoded memory has {len(data)} bytes, must have at most {MAX_ENCODED_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # msgspec lets the last two through
        raise LayoutError(f"encoded memory is not valid: {error}") from error

"""What a process registers for hand-offs, and how it is described to a peer.

A memory is a set of *pools*. In a pool one id selects an item of every region. A page id selects an item of each KV
region, a state id an item of each region of one `StatePool`, an aux slot a row of each aux region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, get_args

import msgspec

from .process import ProcessName
from .regions import (
    MAX_ITEMS,
    Block,
    LayoutError,
    Region,
    blocks_of,
    check_kinds,
    check_name,
    check_pool,
    check_range,
)
from .state_pool import MAX_LAYERS, MAX_SEGMENTS, MAX_STATE_REGIONS, StateCut, StatePool
from .tensors import Tensor, read_cache, read_tensor

__all__ = [
    "KVMemory",
    "LayerHeads",
    "LayoutError",
    "Region",
    "RemoteMemory",
    "StateCut",
    "StatePool",
    "decode_remote",
    "encode_remote",
]

Layout = Literal["NHD", "HND"]
"""Order within a page: [page_tokens, heads, head_dim] or [heads, page_tokens, head_dim]."""
KVOrder = Literal["separate", "interleaved", "packed"]
"""K and V in regions of their own; or in one region, K before V in each page, or K beside V in each head."""

MAX_HEADS: Final = 1 << 20
MAX_PAGE_TOKENS: Final = 1 << 20
MAX_STATE_POOLS: Final = 8
"""Most state pools of one memory; known models have at most three."""
MAX_AUX_REGIONS: Final = 64
"""SGLang has 10 to 13."""
MAX_AUX_BYTES: Final = 4 << 20
"""Most bytes of one aux row over all regions: it goes out beside pages, within one chunk."""
MAX_DESCRIPTOR_BYTES: Final = 1 << 20
MAX_ENCODED_BYTES: Final = 2 << 20
"""Bound on an encoded `RemoteMemory`: a full descriptor, and all regions."""


class LayerHeads(msgspec.Struct, frozen=True, array_like=True):
    """The KV heads of one layer, where layers differ: heads `first_head`.. of `total_heads`.

    Args:
        kv_heads: Heads that this rank holds.
        head_dim: Elements of one head.
        first_head: Number of the first one held, in the model.
        total_heads: Heads of this layer in the model.
    """

    kv_heads: int
    head_dim: int
    first_head: int
    total_heads: int


class KVMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that one rank registers, and which part of which model's cache it holds.

    The rank holds layers `first_layer`.. of `total_layers`, and of each the heads `first_head`.. of `total_heads`.
    A total of 0 means: all that there is. A cache that every tensor-parallel rank has in full (MLA) has one head.

    A page has no padding. Its order is `layout`; of an interleaved cache, a page is K in that order, then V. In
    a packed cache, each head of a token is K, then V, and `head_dim` counts both.

    Args:
        kv: Regions of the layers held, in order. Separate order: K, V of the first layer, K, V of the next, or one
            region a layer where K and V come from one latent (MLA). Interleaved and packed order: one region a layer.
            All have the same number of items (pages). Heads of K may be longer than those of V.
        aux: Regions with rows in common: an aux slot selects a row of each. May be empty.
        page_tokens: Tokens in one page.
        layers: Number of layers held.
        kv_heads: KV heads held of each layer.
        head_dim: Elements of one head.
        dtype: Element type by its numpy name (`float32`, `bfloat16`, …).
        model: Name that both sides must agree on.
        first_layer, total_layers, first_head, total_heads: Which part of the model is held.
        layout: Order of tokens and heads within a page.
        kv_order: Whether K and V have regions of their own.
        heads: For each layer its own heads, where layers differ (a draft model behind its target). `kv_heads` and
            the other fields then describe the layers whose heads are divided over most ranks, and a layer holds the
            heads that meet this rank's share of those (`ModelShard.heads_of`). Empty where all layers are alike.
        state: The state pools.

    Raises:
        LayoutError: Counts do not fit together, a field is out of bounds, or regions of one pool overlap.
    """

    kv: tuple[Region, ...]
    aux: tuple[Region, ...] = ()
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
    layout: Layout = "NHD"
    kv_order: KVOrder = "separate"
    heads: tuple[LayerHeads, ...] = ()
    state: tuple[StatePool, ...] = ()

    def __post_init__(self) -> None:
        check_range("layers", self.layers, 1, MAX_LAYERS)
        check_range("page_tokens", self.page_tokens, 1, MAX_PAGE_TOKENS)
        check_range("kv_heads", self.kv_heads, 1, MAX_HEADS)
        check_range("head_dim", self.head_dim, 1, MAX_HEADS)
        self._place("layer", self.layers, MAX_LAYERS)
        self._place("head", self.kv_heads, MAX_HEADS)
        check_name("dtype", self.dtype)
        check_name("model", self.model)
        check_kinds("kv", self.kv, Region)
        check_kinds("aux", self.aux, Region)
        self._check_order()
        self._check_heads()
        self._refuse_indivisible()
        check_pool("kv", "pages", self.kv)
        self._check_aux()
        self._check_state()
        check_range("items of all regions together", sum(region.items for region in self.regions), 1, MAX_ITEMS)

    @classmethod
    def from_tensors(
        cls,
        kv: Sequence[Tensor | tuple[Tensor, Tensor]],
        *,
        model: str,
        aux: Sequence[Tensor] = (),
        state: Sequence[StatePool] = (),
        layout: Layout = "NHD",
        kv_order: KVOrder = "separate",
        page_tokens: int | None = None,
        first_layer: int = 0,
        total_layers: int = 0,
        first_head: int = 0,
        total_heads: int = 0,
        heads: Sequence[LayerHeads] = (),
    ) -> KVMemory:
        """The memory that tensors of torch, or arrays of numpy, describe. torch is not imported.

        Args:
            kv: For each layer a pair (K, V) or one tensor. A tensor is [pages, page_tokens, heads, head_dim], in
                layout HND [pages, heads, page_tokens, head_dim]. `kv_split` makes pairs of two lists. Other shapes:

                - [tokens, heads, head_dim] with `page_tokens` given
                - one tensor [2, pages, ...] for K and V
                - in interleaved order one tensor [pages, 2, ...]
                - in packed order one tensor with K and V in the last dimension
                - for MLA one tensor [pages, page_tokens, latent]
            aux: Tensors [rows, ...].
            state: State pools, see `StatePool.from_tensors`.
            page_tokens: Tokens in one page, only for tensors whose first dimension is tokens.
            heads: For layers that differ, see the class; `kv_heads` and `head_dim` are then those of the first layer.

        The other arguments are fields of the class. The tensors must live until the connector is closed.

        Raises:
            LayoutError: A tensor is not contiguous or has another shape, or a check of the class fails.
        """
        cache = read_cache(kv, layout=layout, kv_order=kv_order, page_tokens=page_tokens)
        if not heads and len(set(cache.heads)) > 1:
            raise LayoutError(f"kv has layers of (heads, head_dim) {sorted(set(cache.heads))}: give `heads` for each")
        for layer, (given, found) in enumerate(zip(heads, cache.heads, strict=False)):
            if (shape := (given.kv_heads, given.head_dim)) != found:
                raise LayoutError(
                    f"heads[{layer}] has (kv_heads, head_dim) {shape} and kv[{layer}] {found}, must be the same"
                )
        kv_heads, head_dim = cache.heads[0]
        return cls(
            kv=cache.regions,
            aux=tuple(read_tensor(f"aux[{index}]", tensor).rows() for index, tensor in enumerate(aux)),
            page_tokens=cache.page_tokens,
            layers=len(kv),
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=cache.dtype,
            model=model,
            first_layer=first_layer,
            total_layers=total_layers,
            first_head=first_head,
            total_heads=total_heads,
            layout=layout,
            kv_order=kv_order,
            heads=tuple(heads),
            state=tuple(state),
        )

    def _place(self, unit: str, held: int, most: int) -> None:
        """Replace a total of 0 by what is held, and check the range."""
        first_field, total_field = f"first_{unit}", f"total_{unit}s"
        first, total = getattr(self, first_field), getattr(self, total_field)
        if total == 0 and type(total) is int:
            total = held
            msgspec.structs.force_setattr(self, total_field, total)
        check_range(total_field, total, 1, most)
        if held > total:
            raise LayoutError(f"{total_field} is {total}, must be at least the {held} {unit}s held")
        check_range(f"{first_field} (with {held} of {total} {unit}s held)", first, 0, total - held)

    def _check_order(self) -> None:
        for field, value, allowed in (
            ("layout", self.layout, get_args(Layout)),
            ("kv_order", self.kv_order, get_args(KVOrder)),
        ):
            if value not in allowed:
                raise LayoutError(f"{field} is {value!r}, must be one of {', '.join(allowed)}")
        counts = (self.layers, 2 * self.layers) if self.kv_order == "separate" else (self.layers,)
        if len(self.kv) not in counts:
            more = f"2 * layers = {2 * self.layers}, or one for each layer" if len(counts) > 1 else "one for each layer"
            raise LayoutError(f"kv has {len(self.kv)} regions for {self.layers} layers, must have {more}")
        if self.kv_order == "separate" and len(self.kv) == self.layers and self.total_heads > 1:
            raise LayoutError(
                f"kv has one region for each layer and total_heads is {self.total_heads}, must be 1 (a latent) in "
                "separate order; where a page holds K and V, set kv_order='interleaved' or 'packed'"
            )
        for index, region in enumerate(self.kv):
            if self.kv_order == "interleaved" and region.item_bytes % 2:
                raise LayoutError(f"item_bytes of kv region {index} is {region.item_bytes}, must be even: K and V")

    def _check_heads(self) -> None:
        check_kinds("heads", self.heads, LayerHeads)
        if self.heads and len(self.heads) != self.layers:
            raise LayoutError(f"heads has {len(self.heads)} entries for {self.layers} layers, must be as many")
        for index, one in enumerate(self.heads):
            check_range(f"heads[{index}].total_heads", one.total_heads, 1, MAX_HEADS)
            check_range(f"heads[{index}].head_dim", one.head_dim, 1, MAX_HEADS)
            first, held = share_of_heads(self.first_head, self.kv_heads, self.total_heads, one.total_heads)
            if (one.first_head, one.kv_heads) != (first, held):
                raise LayoutError(
                    f"heads[{index}] holds {one.kv_heads} heads from {one.first_head} of {one.total_heads}, must hold "
                    f"{held} from {first}: those that meet heads {self.first_head}.."
                    f"{self.first_head + self.kv_heads - 1} of {self.total_heads}"
                )

    def _refuse_indivisible(self) -> None:
        """Where only some heads are held, pages may have to be cut between heads."""
        layers = [self.heads_of(self.first_layer + index) for index in range(self.layers)]
        if all(one.kv_heads == one.total_heads for one in layers):
            return
        for index, region in enumerate(self.kv):
            cells = self.strips * layers[index // self.regions_per_layer].kv_heads
            if region.item_bytes % cells:
                raise LayoutError(
                    f"item_bytes of kv region {index} is {region.item_bytes}, must be a multiple of {cells}: "
                    f"{self.strips} strips of a page * kv_heads"
                )

    def _check_aux(self) -> None:
        check_range("number of aux regions", len(self.aux), 0, MAX_AUX_REGIONS)
        check_pool("aux", "rows", self.aux)
        check_range("bytes of an aux row", self.aux_bytes, 0, MAX_AUX_BYTES)

    def _check_state(self) -> None:
        check_kinds("state", self.state, StatePool)
        check_range("number of state pools", len(self.state), 0, MAX_STATE_POOLS)
        names = [pool.name for pool in self.state]
        if len(set(names)) != len(names):
            raise LayoutError(f"state has pools named {names}, must have each name once")
        shares = {(pool.rank, pool.ranks) for pool in self.state if pool.ranks}
        if len(shares) > 1:
            raise LayoutError(f"state pools hold shares (rank, ranks) {sorted(shares)}, must all hold the same share")
        check_range("number of state regions", sum(len(pool.regions) for pool in self.state), 0, MAX_STATE_REGIONS)
        check_range("segments of all state pools", sum(pool.segments for pool in self.state), 0, MAX_SEGMENTS)
        for pool in self.state:
            for index, layer in enumerate(pool.layers):
                last = self.first_layer + self.layers - 1
                check_range(f"layers[{index}] of state pool {pool.name!r}", layer, self.first_layer, last)

    @property
    def regions(self) -> tuple[Region, ...]:
        """All regions: KV, state pools, aux. Those of different pools may overlap, see `blocks`."""
        return (*self.kv, *(region for pool in self.state for region in pool.regions), *self.aux)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The stretches of memory that a backend registers; no two overlap."""
        return blocks_of(self.regions)

    @property
    def on_device(self) -> bool:
        """Whether the KV pages lie in the memory of a device, which the CPU must not touch."""
        return self.kv[0].device is not None

    @property
    def regions_per_layer(self) -> int:
        """2 where K and V are apart, otherwise 1."""
        return len(self.kv) // self.layers

    @property
    def strips(self) -> int:
        """In how many pieces the bytes of some heads lie in a page of one region."""
        return (self.page_tokens if self.layout == "NHD" else 1) * (2 if self.kv_order == "interleaved" else 1)

    def region_of(self, layer: int, part: int) -> int:
        """Index in `kv` of a layer that is held, by its number in the model; part: 0 is K, 1 is V."""
        return (layer - self.first_layer) * self.regions_per_layer + part

    def heads_of(self, layer: int) -> LayerHeads:
        """The heads of a layer that is held, by its number in the model."""
        if self.heads:
            return self.heads[layer - self.first_layer]
        return LayerHeads(self.kv_heads, self.head_dim, self.first_head, self.total_heads)

    @property
    def pages(self) -> int:
        """Number of pages: valid page ids are 0..pages - 1."""
        return self.kv[0].items

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V."""
        return sum(region.item_bytes for region in self.kv)

    @property
    def aux_rows(self) -> int:
        """Number of aux rows: valid aux slots are 0..aux_rows - 1. 0 where there is no aux."""
        return self.aux[0].items if self.aux else 0

    @property
    def aux_bytes(self) -> int:
        """Bytes of one aux row over all aux regions."""
        return sum(region.item_bytes for region in self.aux)

    @property
    def state_rank(self) -> int:
        """Which share of cut state this rank holds; 0 where no pool is cut."""
        return max((pool.rank for pool in self.state), default=0)

    @property
    def state_ranks(self) -> int:
        """Number of shares of cut state; 0 where no pool is cut."""
        return max((pool.ranks for pool in self.state), default=0)


def share_of_heads(first: int, held: int, total: int, layer_total: int) -> tuple[int, int]:
    """Of `layer_total` heads, the first and the number of those that meet heads `first`.. of `total`."""
    start = first * layer_total // total
    return start, -(-(first + held) * layer_total // total) - start


class RemoteMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's memory, as the peer describes it when the two pair.

    Args:
        backend: Name of the transfer backend that registered it.
        memory: Its geometry; the addresses are the peer's own.
        descriptor: The bytes that this backend's `register` returned, opaque to other backends.
        process: The process that holds it; None if the peer does not say.

    Raises:
        LayoutError: A field is out of bounds.
    """

    backend: str
    memory: KVMemory
    descriptor: bytes
    process: ProcessName | None = None

    def __post_init__(self) -> None:
        check_name("backend", self.backend)
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

"""SGLang's cache, described to the connector: `KVArgs` to `KVMemory`. Pure: addresses and numbers only.

SGLang lists its KV buffers as [K0..Kn, V0..Vn, draft K.., draft V..], or one for each layer with MLA. An item of a
buffer is one page. Each kind of state has buffers, items and ids of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import KVMemory, LayerHeads, LayoutError, ModelShard, Region, StateCut, StatePool, shard_model

REFUSED_STATE: Final = {
    "dsa_tail": "its ids name parts of items (kpool compression): start without it",
}
MAX_CUT_SEGMENTS: Final = 1 << 14
"""The connector's bound on the segments of all state; a window with more moves whole, between equal TP sizes."""


@dataclass(frozen=True)
class Heads:
    """The KV heads of one pool of SGLang's.

    Args:
        held: Heads on this rank; 1 for MLA.
        total: Heads in the model; 1 for MLA.
        latent: MLA, one buffer for each layer.
        element_bytes: Size of one element.
    """

    held: int
    total: int
    latent: bool = False
    element_bytes: int = 2


@dataclass(frozen=True)
class Placement:
    """Where this rank stands in its instance: the tensor and context ranks of one data-parallel rank.

    Args:
        tp_rank, tp_size: Attention tensor parallelism. State that is cut is divided over the same ranks.
        cp_rank, cp_size: Context parallelism; these ranks are replicas.
    """

    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    @property
    def rank(self) -> int:
        """This rank's number in the instance."""
        return self.cp_rank * self.tp_size + self.tp_rank


def instance_of(place: Placement, memory: KVMemory) -> tuple[ModelShard, ...]:
    """What each rank of the instance holds, in order of rank, as one of them describes its memory."""
    return _shards(place, memory.layers, memory.total_heads, cut_state=_is_cut(memory.state))


def _shards(place: Placement, layers: int, total_heads: int, *, cut_state: bool) -> tuple[ModelShard, ...]:
    return shard_model((layers,), total_heads, tp=place.tp_size, split_state=cut_state) * place.cp_size


def _reference_heads(target: Heads, draft: Heads | None) -> int:
    """The heads by which shards are counted: those of the pool whose heads are divided over most ranks."""
    return max(target.total, draft.total if draft is not None else 0)


def describe(
    args: Any,  # noqa: ANN401 - SGLang's KVArgs, which has no types here
    *,
    model: str,
    place: Placement,
    target: Heads,
    draft: Heads | None = None,
    window_heads: int = 0,
    device: int | None = None,
) -> KVMemory:
    """Describe the memory of one rank.

    Args:
        args: SGLang's KVArgs.
        model: Name that prefill and decode have in common.
        place: This rank's place in its instance.
        target, draft: Heads of the two pools.
        window_heads: Heads held of a sliding-window pool with K and V; 0 where its items move whole.
        device: Index of the GPU that holds the cache; None for host memory.

    Raises:
        LayoutError: The connector cannot describe this memory. The message names the field.
    """
    drafts = int(getattr(args, "num_draft_entries", 0) or 0)
    entries = list(zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True))
    split = len(entries) - drafts
    state = state_pools(args, place, window_heads, device)
    regions = _by_layer(entries[:split], target, "kv_data_ptrs", device)
    layers = [target] * _layers(split, target)
    if drafts:
        if draft is None or draft.latent != target.latent:
            raise LayoutError("kv_data_ptrs has draft layers, must be of the kind (MLA or not) of the target's")
        regions += _by_layer(entries[split:], draft, "draft kv_data_ptrs", device)
        layers += [draft] * _layers(drafts, draft)
    heads = _reference_heads(target, draft if drafts else None)
    shard = _shards(place, len(layers), heads, cut_state=_is_cut(state))[place.rank]
    return KVMemory(
        kv=tuple(regions),
        aux=tuple(
            Region(address, item, length // item)
            for address, length, item in zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True)
        ),
        page_tokens=args.page_size,
        layers=len(layers),
        kv_heads=shard.kv_heads,
        head_dim=_head_dim(entries[0][2], target, args.page_size),
        dtype=str(args.kv_cache_dtype_str),
        model=model,
        first_head=shard.first_head,
        total_heads=shard.total_heads,
        heads=_layer_heads(args, layers, shard, split, target) if draft is not None and drafts else (),
        state=state,
    )


def _layer_heads(
    args: Any,  # noqa: ANN401
    layers: Sequence[Heads],
    shard: ModelShard,
    split: int,
    target: Heads,
) -> tuple[LayerHeads, ...]:
    """The heads of each layer where a draft model stands behind its target."""
    found = []
    for index, one in enumerate(layers):
        first, held = shard.heads_of(one.total)
        item = args.kv_item_lens[0 if index < _layers(split, target) else split]
        found.append(LayerHeads(held, _head_dim(item, one, args.page_size), first, one.total))
    return tuple(found)


def _layers(entries: int, heads: Heads) -> int:
    return entries if heads.latent else entries // 2


def _head_dim(item_bytes: int, heads: Heads, page_tokens: int) -> int:
    """Elements of one head; buffers that pack several tokens are described by whole items, and this is a name."""
    return max(item_bytes // (page_tokens * heads.held * heads.element_bytes), 1)


def _by_layer(entries: Sequence[tuple[int, int, int]], heads: Heads, field: str, device: int | None) -> list[Region]:
    """Regions in the connector's order: K0, V0, K1, V1; with MLA as SGLang lists them."""
    regions = [Region(address, item, length // item, device) for address, length, item in entries]
    if heads.latent:
        return regions
    if len(regions) % 2:
        raise LayoutError(f"{field} has {len(regions)} buffers, must be as many of K as of V")
    half = len(regions) // 2
    return [region for pair in zip(regions[:half], regions[half:], strict=True) for region in pair]


def state_pools(
    args: Any,  # noqa: ANN401
    place: Placement,
    window_heads: int,
    device: int | None,
) -> tuple[StatePool, ...]:
    """One pool for each kind of state, named by its kind; a second one of a kind gets a number.

    Raises LayoutError for a kind that the connector cannot move.
    """
    pools: list[StatePool] = []
    for index, name in enumerate(state_names(args)):
        kind = name.split("#")[0]
        if kind in REFUSED_STATE:
            raise LayoutError(f"state_types has {kind!r}, which cannot be moved: {REFUSED_STATE[kind]}")
        regions = tuple(
            Region(address, item, length // item, device)
            for address, length, item in zip(
                args.state_data_ptrs[index], args.state_data_lens[index], args.state_item_lens[index], strict=True
            )
        )
        cuts = _cuts(args, index, kind, place, window_heads, len(regions))
        if any(cuts):
            pools.append(StatePool(name, regions, cuts=cuts, rank=place.tp_rank, ranks=place.tp_size))
        else:
            pools.append(StatePool(name, regions))
    return tuple(pools)


def state_names(args: Any) -> list[str]:  # noqa: ANN401
    """Names of the state pools, in SGLang's order."""
    names: list[str] = []
    for kind in getattr(args, "state_types", None) or []:
        text = str(getattr(kind, "value", kind))
        again = sum(name.split("#")[0] == text for name in names)
        names.append(f"{text}#{again + 1}" if again else text)
    return names


def _cuts(
    args: Any,  # noqa: ANN401
    index: int,
    kind: str,
    place: Placement,
    window_heads: int,
    regions: int,
) -> tuple[StateCut | None, ...]:
    dims = args.state_dim_per_tensor[index]
    if kind == "mamba" and dims:
        outers = args.state_slice_outer_counts[index] or [1] * regions
        groups = args.state_conv_shard_groups[index] or [None] * regions
        return tuple(
            _mamba_cut(dim, outer, group, place.tp_size) for dim, outer, group in zip(dims, outers, groups, strict=True)
        )
    if kind == "swa" and window_heads and args.page_size * regions <= MAX_CUT_SEGMENTS:
        return (StateCut(args.page_size, (window_heads,)),) * regions
    return (None,) * regions


def _mamba_cut(dim: int, outer: int, groups: Sequence[int] | None, ranks: int) -> StateCut:
    """How an item of Mamba state is cut. SGLang gives the axis held, and the groups of it in the whole model."""
    if not dim:
        return StateCut(1, (1,))  # the same on every rank
    held = tuple(group // ranks for group in groups) if groups else ()
    return StateCut(outer, held if sum(held) == dim else (dim,))


def _is_cut(pools: Sequence[StatePool]) -> bool:
    return any(pool.ranks for pool in pools)


def state_ids(args: Any, indices: Sequence[Any] | None) -> Mapping[str, NDArray[np.int32]] | None:  # noqa: ANN401
    """Ids of state items by pool, as `send` and `offer` take them; None where the model has no state.

    Args:
        indices: for each kind of state an array, or a list of numbers or of arrays, or None.
    """
    names = state_names(args)
    if not names or indices is None:
        return None
    return {name: _flat(ids) for name, ids in zip(names, indices, strict=True)}


def _flat(ids: Any) -> NDArray[np.int32]:  # noqa: ANN401
    if ids is None or len(ids) == 0:
        return np.zeros(0, np.int32)
    return np.concatenate([np.atleast_1d(np.asarray(one)) for one in ids]).astype(np.int32)


def pages_of(tokens: int, page_tokens: int, field: str) -> int:
    """Tokens as whole pages: SGLang counts prefixes in tokens, the connector in pages.

    Raises ValueError where a page would be cut.
    """
    if tokens % page_tokens:
        raise ValueError(f"{field} is {tokens} tokens, must be a multiple of the page size {page_tokens}")
    return tokens // page_tokens

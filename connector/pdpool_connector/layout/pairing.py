"""Which ranks of a prefill instance write to which ranks of a decode instance. Pure: both sides find the same.

A *rank* is one engine worker process with one connector. An *instance* is the ranks that hold one model together. A
*shard* is the layers and KV heads of the model that one rank holds. A *cell* is one head of one layer. State that is
cut (Mamba and the like) is divided by ranks, not by heads: each rank holds one *share* of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from .memory import MAX_HEADS, KVMemory, LayoutError, share_of_heads
from .state import shares_meet
from .state_pool import MAX_LAYERS, MAX_RANKS, check_share


class ModelShard(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model that one rank holds: some layers of it, and some KV heads of those.

    A cache without heads (MLA) has `total_heads` 1. Ranks of one instance that hold the same cells are replicas. Ranks
    that hold the same share of the same layers are replicas for the state.

    Args:
        first_layer, layers, total_layers: Layers `first_layer`.. of `total_layers`.
        first_head, kv_heads, total_heads: Heads `first_head`.. of `total_heads`. Where layers differ in heads, these
            are the reference heads of `KVMemory`.
        state_rank, state_ranks: Which of the equal shares of cut state it holds; 0 of 0 where none is cut.

    Raises:
        LayoutError: A field is out of range.
    """

    first_layer: int
    layers: int
    total_layers: int
    first_head: int
    kv_heads: int
    total_heads: int
    state_rank: int = 0
    state_ranks: int = 0

    def __post_init__(self) -> None:
        check_share(self.state_rank, self.state_ranks)
        _fits("layer", "layers", self.first_layer, self.layers, self.total_layers, MAX_LAYERS)
        _fits("head", "kv_heads", self.first_head, self.kv_heads, self.total_heads, MAX_HEADS)

    def heads_of(self, total_heads: int) -> tuple[int, int]:
        """First head and number of heads that this rank holds of a layer with `total_heads` heads of its own."""
        return share_of_heads(self.first_head, self.kv_heads, self.total_heads, total_heads)

    @property
    def layer_end(self) -> int:
        """First layer behind it."""
        return self.first_layer + self.layers

    @property
    def head_end(self) -> int:
        """First head behind it."""
        return self.first_head + self.kv_heads

    @property
    def cells(self) -> tuple[int, int, int, int]:
        """What of the cache it holds: first layer, layer end, first head, head end."""
        return self.first_layer, self.layer_end, self.first_head, self.head_end

    @property
    def share(self) -> tuple[int, int, int]:
        """What of the state it holds: first layer, layer end, number of the share."""
        return self.first_layer, self.layer_end, self.state_rank

    def overlaps(self, other: ModelShard) -> bool:
        """Whether both hold some cell."""
        return self._meets(other) and self.first_head < other.head_end and other.first_head < self.head_end

    def shares(self, other: ModelShard) -> bool:
        """Whether both hold something of the shares of some layer."""
        return self._meets(other) and shares_meet(
            self.state_rank, self.state_ranks, other.state_rank, other.state_ranks
        )

    def _meets(self, other: ModelShard) -> bool:
        return self.first_layer < other.layer_end and other.first_layer < self.layer_end


def shard_of(memory: KVMemory) -> ModelShard:
    """The shard that a rank with this memory holds."""
    return ModelShard(**{field: getattr(memory, field) for field in ModelShard.__struct_fields__})


def _fits(what: str, count: str, first: int, held: int, total: int, most: int) -> None:
    if not 1 <= total <= most:
        raise LayoutError(f"total_{what}s is {total}, must be 1..{most}")
    if not 1 <= held <= total:
        raise LayoutError(f"{count} is {held}, must be 1..total_{what}s = {total}")
    if not 0 <= first <= total - held:
        raise LayoutError(f"first_{what} is {first}, must be 0..{total - held} for {held} of {total} {what}s")


def shard_model(layers: Sequence[int], heads: int, *, tp: int = 1, split_state: bool = False) -> tuple[ModelShard, ...]:
    """The shards of an instance in rank order, rank = pipeline stage * tp + tensor rank, as engines number them.

    Args:
        layers: How many layers each pipeline stage holds.
        heads: KV heads of the model, divided evenly over the `tp` ranks of each stage. With fewer heads than ranks,
            each head is held by `tp / heads` ranks. Where layers differ, the heads of those with most.
        tp: tensor-parallel ranks of each stage.
        split_state: The model keeps state beside the cache (Mamba and the like), cut over the `tp` ranks.

    Raises:
        LayoutError: Heads cannot be divided evenly.
    """
    if isinstance(layers, int):
        raise LayoutError(f"layers is {layers!r}, must be a sequence: how many layers each pipeline stage holds")
    if tp < 1 or heads < 1 or (heads % tp and tp % heads):
        raise LayoutError(f"heads is {heads}, must be a multiple or a divisor of tp = {tp}")
    held = max(heads // tp, 1)
    total = sum(layers)
    return tuple(
        ModelShard(
            first_layer=sum(layers[:stage]),
            layers=count,
            total_layers=total,
            first_head=rank * heads // tp,
            kv_heads=held,
            total_heads=heads,
            state_rank=rank if split_state else 0,
            state_ranks=tp if split_state else 0,
        )
        for stage, count in enumerate(layers)
        for rank in range(tp)
    )


class Writer(NamedTuple):
    """A prefill rank as one decode rank sees it.

    Args:
        rank: Its number in the prefill instance.
        rank_index, rank_count: This decode rank is number `rank_index` of the `rank_count` that it serves.
        kv: It writes the cells that both hold, and with them state that is not cut.
        aux: It writes the aux row.
        state: It writes what both hold of the shares of cut state.
    """

    rank: int
    rank_index: int
    rank_count: int
    kv: bool
    aux: bool
    state: bool = False


def check_instance(side: str, shards: Sequence[ModelShard]) -> None:
    """Raise LayoutError unless the shards make up one model: every cell is held, by one rank or by replicas.

    Ranks that hold the same layers form a stage; stages follow each other without gap, and so do the heads within one,
    and the shares of state where that is cut.
    """
    if not 1 <= len(shards) <= MAX_RANKS:
        raise LayoutError(f"{side} has {len(shards)} ranks, must have 1..{MAX_RANKS}")
    shapes = {(shard.total_layers, shard.total_heads, shard.state_ranks) for shard in shards}
    if len(shapes) != 1:
        raise LayoutError(f"ranks of {side} disagree on (total_layers, total_heads, state_ranks): {sorted(shapes)}")
    total_layers, total_heads, state_ranks = shapes.pop()
    stages = sorted({(shard.first_layer, shard.layer_end) for shard in shards})
    _refuse_gap(f"layers of {side}", stages, total_layers)
    for first, end in stages:
        heads = {(shard.first_head, shard.head_end) for shard in shards if shard.first_layer == first}
        _refuse_gap(f"heads of {side} in layers {first}..{end - 1}", sorted(heads), total_heads)
        shares = {(shard.state_rank, shard.state_rank + 1) for shard in shards if shard.first_layer == first}
        if state_ranks:
            _refuse_gap(f"shares of the state of {side} in layers {first}..{end - 1}", sorted(shares), state_ranks)


def _refuse_gap(what: str, ranges: Sequence[tuple[int, int]], total: int) -> None:
    reached = 0
    for first, end in [*ranges, (total, total)]:
        if first > reached:
            raise LayoutError(f"{what}: from {reached} to {first - 1} no rank holds them")
        if first < reached:
            raise LayoutError(f"{what}: {first} is held by ranks that are no replicas of each other")
        reached = end


def pair(prefill: Sequence[ModelShard], decode: Sequence[ModelShard]) -> tuple[tuple[Writer, ...], ...]:
    """For each decode rank, in order, the prefill ranks that serve it, in order of rank.

    Each cell of a decode rank has exactly one writer, and so has each piece of its share of cut state. Decode ranks
    take replicas in turn; a replica that writes state to the rank is preferred for its cells. Exactly one writer of
    each decode rank writes aux; it holds the model's last layer. A prefill rank without work serves one decode rank
    all the same. It has nothing to write; its half of every hand-off ends as well.

    Raises:
        LayoutError: An instance is not whole, or the two are not of one model.
    """
    check_instance("prefill", prefill)
    check_instance("decode", decode)
    for field in ("total_layers", "total_heads"):
        ours, theirs = getattr(prefill[0], field), getattr(decode[0], field)
        if ours != theirs:
            raise LayoutError(f"{field} is {ours} at prefill and {theirs} at decode")
    if bool(prefill[0].state_ranks) != bool(decode[0].state_ranks):
        raise LayoutError(
            f"state_ranks is {prefill[0].state_ranks} at prefill and {decode[0].state_ranks} at decode, must be 0 on "
            "both sides or on neither"
        )
    state = _share_state(prefill, decode)
    kv = _share_cells(prefill, decode, state)
    busy = [cells | shares for cells, shares in zip(kv, state, strict=True)]
    aux = _share_aux(prefill, busy)
    idle = set(range(len(prefill))).difference(aux, *busy)
    serves = [{*writers, aux[rank]} for rank, writers in enumerate(busy)]
    for rank in idle:
        serves[rank % len(decode)].add(rank)
    served = [[at for at, writers in enumerate(serves) if rank in writers] for rank in range(len(prefill))]
    return tuple(
        tuple(
            Writer(rank, served[rank].index(at), len(served[rank]), rank in kv[at], rank == aux[at], rank in state[at])
            for rank in sorted(writers)
        )
        for at, writers in enumerate(serves)
    )


def _share_state(prefill: Sequence[ModelShard], decode: Sequence[ModelShard]) -> list[set[int]]:
    """For each decode rank, the prefill ranks that write its share: of replicas those with cells of it, in turn."""
    writers: list[set[int]] = [set() for _ in decode]
    for ranks in _replicas(prefill, lambda shard: shard.share) if prefill[0].state_ranks else ():
        takers = [at for at, held in enumerate(decode) if held.shares(prefill[ranks[0]])]
        for turn, at in enumerate(takers):
            able = [rank for rank in ranks if prefill[rank].overlaps(decode[at])] or ranks
            writers[at].add(able[turn % len(able)])
    return writers


def _share_cells(
    prefill: Sequence[ModelShard], decode: Sequence[ModelShard], state: Sequence[set[int]]
) -> list[set[int]]:
    """For each decode rank, the prefill ranks that write its cells: of replicas those that write its state, in turn."""
    writers: list[set[int]] = [set() for _ in decode]
    for ranks in _replicas(prefill, lambda shard: shard.cells):
        takers = [at for at, held in enumerate(decode) if held.overlaps(prefill[ranks[0]])]
        for turn, at in enumerate(takers):
            able = [rank for rank in ranks if rank in state[at]] or ranks
            writers[at].add(able[turn % len(able)])
    return writers


def _share_aux(prefill: Sequence[ModelShard], busy: Sequence[set[int]]) -> list[int]:
    """For each decode rank, the prefill rank that writes its aux row: rather one that writes to it anyway."""
    last = [rank for rank, shard in enumerate(prefill) if shard.layer_end == shard.total_layers]
    chosen = []
    for at, writers in enumerate(busy):
        able = [rank for rank in last if rank in writers] or last
        chosen.append(able[at % len(able)])
    return chosen


def _replicas(shards: Sequence[ModelShard], held: Callable[[ModelShard], tuple[int, ...]]) -> Iterable[list[int]]:
    """The ranks that hold the same, for each thing held."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, shard in enumerate(shards):
        ranks.setdefault(held(shard), []).append(rank)
    return ranks.values()

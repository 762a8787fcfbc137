"""vLLM's cache, described to the connector. Pure: it reads attributes of tensors.

vLLM views the cache of a layer as [blocks, heads, tokens, K and V of a head]. Its layout says in which order that lies
in memory: LBHNC in this one, LBNHC with tokens before heads.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pdpool_connector import KVMemory, LayoutError, ModelShard, shard_model

Layout = Literal["NHD", "HND"]
REMEDY: Final = "set VLLM_KV_CACHE_LAYOUT=LBHNC"


@dataclass(frozen=True)
class Place:
    """This worker in its instance, and the model's KV heads.

    Args:
        tp_rank, tp_size: Tensor parallelism.
        total_heads: KV heads of the model; 1 for MLA.
        latent: MLA: a token has one latent in place of K and V.
    """

    tp_rank: int
    tp_size: int
    total_heads: int
    latent: bool = False


def instance_of(place: Place, layers: int) -> tuple[ModelShard, ...]:
    """What each worker of the instance holds, in order of rank."""
    return shard_model((layers,), place.total_heads, tp=place.tp_size)


def describe(caches: Mapping[str, Any], *, blocks: int, model: str, place: Place) -> KVMemory:
    """Describe the cache of one worker.

    Args:
        caches: For each layer its tensor, as vLLM registers them. Layers that share a tensor are described once.
        blocks: Number of vLLM's blocks.
        model: Name that prefill and decode have in common.
        place: This worker in its instance.

    Raises:
        LayoutError: The connector cannot describe this cache. The message names the layer and what would be right.
    """
    tensors: list[Any] = []
    layouts: set[Layout] = set()
    seen: set[int] = set()
    for name in sorted(caches, key=_natural):
        cache = caches[name]
        shape = tuple(getattr(cache, "shape", ()))
        if len(shape) != 4 or shape[0] != blocks:
            raise LayoutError(
                f"cache of {name} has shape {shape}, must be [{blocks} blocks, heads, tokens, content]: the connector "
                "moves attention caches whose blocks the kernels do not split; set --block-size to the kernel's"
            )
        if cache.data_ptr() in seen:
            continue
        seen.add(cache.data_ptr())
        layout, tensor = _as_in_memory(name, cache)
        layouts.add(layout)
        tensors.append(tensor)
    if len(layouts) > 1:
        raise LayoutError(f"layouts of the layers are {sorted(layouts)}, must be the same: {REMEDY}")
    shard = instance_of(place, len(tensors))[place.tp_rank]
    return KVMemory.from_tensors(
        tensors,
        model=model,
        layout=layouts.pop() if layouts else "HND",
        kv_order="separate" if place.latent else "packed",
        first_head=shard.first_head,
        total_heads=shard.total_heads,
    )


def _as_in_memory(name: str, cache: Any) -> tuple[Layout, Any]:  # noqa: ANN401
    """The connector's layout, and the view of the tensor in that order."""
    if cache.is_contiguous():
        return "HND", cache
    by_token = cache.permute(0, 2, 1, 3)
    if by_token.is_contiguous():
        return "NHD", by_token
    raise LayoutError(
        f"cache of {name} has strides {tuple(cache.stride())}, must have each layer's blocks one behind the other: "
        f"{REMEDY}"
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

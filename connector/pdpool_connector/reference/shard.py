"""Which part of the model each rank of an engine holds."""

from typing import NamedTuple

from pdpool_connector.reference.config import ModelConfig


class Shard(NamedTuple):
    """The part of one rank: layers first_layer..first_layer+layers-1, and of each the KV heads from `first_head` on.

    rank counts stage by stage: rank = stage * tensor + place within the stage.
    """

    rank: int
    stage: int
    first_layer: int
    layers: int
    first_head: int
    kv_heads: int


def shards(config: ModelConfig, tensor: int = 1, pipeline: int = 1) -> tuple[Shard, ...]:
    """The parts of all ranks of an engine with `tensor` ranks in each of `pipeline` stages, in the order of ranks.

    Layers that cannot be shared out evenly go to the first stages. Raises ValueError when the model cannot be cut so.
    """
    if tensor < 1 or config.kv_heads % tensor:
        raise ValueError(f"tp-size is {tensor}, must divide the model's {config.kv_heads} KV heads")
    if not 1 <= pipeline <= config.layers:
        raise ValueError(f"pp-size is {pipeline}, must be 1..{config.layers}, for the model has {config.layers} layers")
    heads = config.kv_heads // tensor
    parts = []
    first = 0
    for stage in range(pipeline):
        layers = config.layers // pipeline + (stage < config.layers % pipeline)
        parts += [
            Shard(stage * tensor + place, stage, first, layers, place * heads, heads) for place in range(tensor)
        ]
        first += layers
    return tuple(parts)

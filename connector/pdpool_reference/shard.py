"""Which part of the model each rank of an engine holds."""

from pdpool_connector.layout.pairing import ModelShard, shard_model

from pdpool_reference.config import ModelConfig


def shards_of(config: ModelConfig, tensor: int = 1, pipeline: int = 1) -> tuple[ModelShard, ...]:
    """Return the shards of an engine with `tensor` ranks in each of `pipeline` stages, in the order of ranks.

    The first stages take the layers that do not divide evenly. Raises ValueError when the model cannot be cut so.
    """
    if tensor < 1 or config.kv_heads % tensor:
        raise ValueError(f"tp-size is {tensor}, must divide the model's {config.kv_heads} KV heads")
    if not 1 <= pipeline <= config.layers:
        raise ValueError(f"pp-size is {pipeline}, must be 1..{config.layers}: the model has {config.layers} layers")
    layers = [config.layers // pipeline + (stage < config.layers % pipeline) for stage in range(pipeline)]
    return shard_model(layers, config.kv_heads, tp=tensor)

"""The shards of an instance, from the shape that a test gives it."""

from pdpool_connector.layout.pairing import ModelShard, shard_model


def shards_of(
    layers: list[int], heads: int, tp: int = 1, cp: int = 1, split_state: bool = False
) -> tuple[ModelShard, ...]:
    """In rank order: every stage's tensor ranks, and all of them again for each further context parallel rank."""
    return shard_model(layers, heads, tp=tp, split_state=split_state) * cp


def kv_fields(shard: ModelShard) -> dict[str, int]:
    """The fields of a `KVMemory` that say which part of the cache it holds."""
    names = ("first_layer", "layers", "total_layers", "first_head", "kv_heads", "total_heads")
    return {name: getattr(shard, name) for name in names}

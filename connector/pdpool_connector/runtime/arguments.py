"""What an engine gives to a connector beside its configuration: callbacks, and the check of all of it."""

from collections.abc import Callable

from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.layout.pairing import ModelShard, shard_of
from pdpool_connector.runtime.config import ConnectorConfig

OnChange = Callable[[], None]
Running = Callable[[], int]
"""How many requests the engine has under way."""


def nothing() -> None:
    """For an engine that reads the status of its hand-offs in its own time."""


def no_requests() -> int:
    """For an engine that does not count its requests."""
    return 0


def check_arguments(
    config: ConnectorConfig, memory: KVMemory, on_change: OnChange, running: Running
) -> tuple[ModelShard, ...]:
    """Check what a connector is made of, before its transfer backend is opened.

    Returns:
        The shards of all ranks of the instance.

    Raises:
        ValueError: The memory does not hold the shard of its rank.
        TypeError: A callback cannot be called.
    """
    for name, call in (("on_change", on_change), ("running", running)):
        if not callable(call):
            raise TypeError(f"{name}={call!r} cannot be called: give a function without arguments")
    own = shard_of(memory)
    instance = config.instance or (own,)
    if instance[config.rank] != own:
        raise ValueError(f"memory holds {own}, instance says that rank {config.rank} holds {instance[config.rank]}")
    return instance

"""pdpool's connector: moves the KV cache of a request from a prefill engine to a decode engine."""

from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.memory import KVMemory, LayoutError, Region

__all__ = ["HostArena", "KVMemory", "LayoutError", "Region"]

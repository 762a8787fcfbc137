"""Memory of eight pages, for a connector of a test's own."""

from pdpool_connector import HostArena, KVMemory

SMALL_BYTES = 2 * 8 * 256 + 4 * 64


def lay_out(arena: HostArena) -> KVMemory:
    """One layer and four aux rows, in the first `SMALL_BYTES` of an arena."""
    return KVMemory(
        kv=(arena.region(0, 256, 8), arena.region(8 * 256, 256, 8)),
        aux=(arena.region(2 * 8 * 256, 64, 4),),
        page_tokens=16,
        layers=1,
        kv_heads=1,
        head_dim=4,
        dtype="float32",
        model="m",
    )

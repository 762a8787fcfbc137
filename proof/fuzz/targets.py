"""What there is to fuzz, by name."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from proof.fuzz import decoders, documents, looks, machines, planes
from proof.fuzz.samples import Fuzzed

_MAKE: Mapping[str, Callable[[], tuple[Fuzzed, Sequence[bytes]]]] = MappingProxyType(
    {
        "frames": decoders.frames,
        "memory": decoders.memory,
        "json": decoders.json,
        "tokens": documents.tokens,
        "flight": documents.flight,
        "descriptors": planes.descriptors,
        "door": planes.door,
        "state": looks.state,
        "prefill": machines.prefill,
        "decode": machines.decode,
    }
)


def make(name: str) -> tuple[Fuzzed, Sequence[bytes]]:
    """What takes one input of a target, and inputs to begin with."""
    return _MAKE[name]()

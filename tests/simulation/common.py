"""What both simulators share: the machines that they run, page ids, and the error for a broken promise."""

import struct
from typing import NamedTuple

from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.prefill import PrefillMachine


class Machines(NamedTuple):
    """The classes that a world runs; a mutant has classes of its own."""

    prefill: type[PrefillMachine] = PrefillMachine
    decode: type[DecodeMachine] = DecodeMachine


MACHINES = Machines()


class ViolationError(AssertionError):
    """The protocol broke a promise."""


def require(holds: bool, what: str, *about: object) -> None:
    """Raise ViolationError unless `holds`. `about` is shown behind `what`, and costs nothing while all is well."""
    if not holds:
        raise ViolationError(": ".join([what, *map(str, about)]))


def pack(ids: list[int] | tuple[int, ...]) -> bytes:
    """Ids as the machines take them."""
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack(ids: bytes) -> list[int]:
    """Ids as numbers."""
    return [number for (number,) in struct.iter_unpack("<i", ids)]

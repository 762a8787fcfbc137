"""Transfer backends: what moves pages, state items and aux rows from one process's memory to another's.

Every backend implements `base.TransferBackend`; the runtime knows nothing else of them. `open_backend` opens one.
"""

from __future__ import annotations

from typing import Final

from pdpool_connector.protocol.timeouts import DEFAULTS, Timeouts

from .ascend import AscendBackend
from .base import TransferBackend
from .local import LocalBackend
from .mooncake import MooncakeBackend
from .mori import MoriBackend
from .nixl import NixlBackend

BACKENDS: Final = ("nixl", "mooncake", "mori", "ascend", "local")
"""Names of the backends in configuration and frames."""


def open_backend(
    backend: str, incarnation: str, *, target: bool, host: str = "127.0.0.1", timeouts: Timeouts = DEFAULTS
) -> TransferBackend:
    """Open a backend by name.

    Args:
        backend: One of `BACKENDS`.
        incarnation: ours, random for each process.
        target: Whether peers write into our memory (decode).
        host: Address at which peers reach this process; NIXL finds it itself, and `local` needs none.
        timeouts: Bounds of what the backend waits for.

    Raises:
        ValueError: The name is unknown.
        BackendUnavailableError: The backend cannot work here.
    """
    match backend:
        case "nixl":
            return NixlBackend(incarnation, target=target, timeouts=timeouts)
        case "mooncake":
            return MooncakeBackend(incarnation, host=host, timeouts=timeouts)
        case "mori":
            return MoriBackend(incarnation, host=host, timeouts=timeouts)
        case "ascend":
            return AscendBackend(incarnation, target=target, host=host)
        case "local":
            return LocalBackend()
        case _:
            raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")

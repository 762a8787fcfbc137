"""Data planes: what moves pages and aux rows from one process's memory to another's.

Every backend fulfils `base.TransferBackend`; the runtime knows nothing else of them and gets one from `open_backend`.
"""

from __future__ import annotations

from typing import Final

from .ascend import AscendBackend
from .base import Op, TransferBackend
from .local import LocalBackend
from .mooncake import MooncakeBackend
from .mori import MoriBackend
from .nixl import NixlBackend

BACKENDS: Final = ("nixl", "mooncake", "mori", "ascend", "local")
"""Names of the backends, as configuration and peers give them."""


def open_backend(
    backend: str, incarnation: str, *, target: bool, op: Op = Op.WRITE, host: str = "127.0.0.1"
) -> TransferBackend:
    """The backend named `backend`, one of `BACKENDS`.

    incarnation: ours, random for each process. target: whether peers write into our memory or read from it. op: what
    this process will submit; NIXL refuses to READ where that can harm the peer. host: address at which peers reach this
    process; NIXL finds it out by itself, and `local` needs none.
    Raises ValueError for an unknown name and BackendUnavailableError when the backend cannot work here.
    """
    match backend:
        case "nixl":
            return NixlBackend(incarnation, target=target, op=op)
        case "mooncake":
            return MooncakeBackend(incarnation, host=host)
        case "mori":
            return MoriBackend(incarnation, host=host)
        case "ascend":
            return AscendBackend(incarnation, target=target, host=host)
        case "local":
            return LocalBackend()
        case _:
            raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")

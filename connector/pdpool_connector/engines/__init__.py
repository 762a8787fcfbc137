"""Data planes: what moves pages and aux rows from one process's memory to another's.

Every engine fulfils `base.Engine`; the runtime knows nothing else of them and gets one from `open_engine`.
"""

from __future__ import annotations

from typing import Final

from .ascend import AscendEngine
from .base import Engine, Op
from .local import LocalEngine
from .mooncake import MooncakeEngine
from .mori import MoriEngine
from .nixl import NixlEngine

BACKENDS: Final = ("nixl", "mooncake", "mori", "ascend", "local")
"""Names of the engines, as configuration and peers give them."""


def open_engine(backend: str, incarnation: str, *, target: bool, op: Op = Op.WRITE, host: str = "127.0.0.1") -> Engine:
    """The engine named `backend`, one of `BACKENDS`.

    incarnation: ours, random for each process. target: whether peers write into our memory or read from it. op: what
    this process will submit; NIXL refuses to READ where that can harm the peer. host: address at which peers reach this
    process; NIXL finds it out by itself, and `local` needs none.
    Raises ValueError for an unknown name and EngineUnavailableError when the engine cannot work here.
    """
    match backend:
        case "nixl":
            return NixlEngine(incarnation, target=target, op=op)
        case "mooncake":
            return MooncakeEngine(incarnation, host=host)
        case "mori":
            return MoriEngine(incarnation, host=host)
        case "ascend":
            return AscendEngine(incarnation, target=target, host=host)
        case "local":
            return LocalEngine()
        case _:
            raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")

"""Data planes: what moves pages and aux rows from one process's memory to another's.

Every engine fulfils `base.Engine`; the runtime knows nothing else of them and gets one from `open_engine`.
"""

from __future__ import annotations

from .base import Engine
from .local import LocalEngine
from .nixl import NixlEngine


def open_engine(backend: str, incarnation: str, *, target: bool) -> Engine:
    """The engine named `backend` ("nixl" or "local"); target: whether peers write into our memory or read from it.

    Raises ValueError for an unknown name and EngineUnavailableError when the engine cannot work here.
    """
    match backend:
        case "nixl":
            return NixlEngine(incarnation, target=target)
        case "local":
            return LocalEngine()
        case _:
            raise ValueError(f"backend is {backend!r}, must be 'nixl' or 'local'")

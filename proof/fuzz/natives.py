# ruff: noqa: N802 - the names are the packages' own
"""Stand-ins for what is native in the backends: they note the peers that were given to them, and move nothing."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
from pdpool_connector.backends import mooncake_session, mori, nixl_agent

HOST, PORT = "127.0.0.1", 7
LINE = 64


class NativeError(Exception):
    """As NIXL's own, which share no base."""


class Described(msgspec.Struct, frozen=True, array_like=True):
    """MORI's description of an backend, or of a memory of its."""

    engine_key: str
    data: int = 0
    size: int = 0

    @property
    def key(self) -> str:
        """An backend's name."""
        return self.engine_key

    def pack(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> "Described":
        """As it arrives."""
        return msgspec.msgpack.decode(data, type=cls)


class Native:
    """What all of them are asked for. `known`: the peers that were given to it, and by which call."""

    def __init__(self, name: str = "", *_: object) -> None:
        self.name, self.known = name, dict[str, bytes]()
        self.lines: dict[int, bytes] = {}
        """What can be read of peers, by its address."""
        self.writable: set[int] = set()
        self._reached = True

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any method, which moves nothing
        return lambda *_: 0

    # NIXL
    def getLocalMD(self) -> bytes:
        """Its name, as what the peers load."""
        return b"agent" + self.name.encode()

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        """Refuses to know another by the same name, as the real one does."""
        if not metadata.startswith(b"agent"):
            raise NativeError("no metadata")
        name = metadata[len(b"agent") :]
        self.known[name.decode(errors="replace")] = metadata
        return name

    def invalidateRemoteMD(self, name: str) -> None:
        """Refuses whom it does not know."""
        if self.known.pop(name, None) is None:
            raise NativeError(f"{name} is not known")

    def prepXferDlist(self, owner: str, _: object, rows: Any, *__: object) -> int:  # noqa: ANN401 - an array
        """Takes any rows of a peer; of the last it is seen whether they are there."""
        if owner in self.known:
            self._reached = int(rows[-1][0]) in self.lines
        return 1

    def postXferReq(self, _: int) -> int:
        """Over at once, or a failure."""
        return 0 if self._reached else 2

    # MORI
    def get_engine_desc(self) -> Described:
        """Its name."""
        return Described(self.name)

    def register_memory(self, address: int, nbytes: int, *_: object) -> Described:
        """Where it is."""
        return Described(self.name, address, nbytes)

    def register_remote_engine(self, backend: Described) -> None:
        """Know a peer."""
        self.known[backend.key] = backend.pack()

    def deregister_remote_engine(self, backend: Described) -> None:
        """Know it no more."""
        del self.known[backend.key]

    def batch_write(self, *columns: list[Any]) -> list[Any]:
        """Over at once, where it is within the peer's memory."""
        for described, starts, sizes in zip(*columns[2:5], strict=True):
            if any(start + size > described.size for start, size in zip(starts, sizes, strict=True)):
                raise NativeError("out of bounds")
        return [SimpleNamespace(Failed=lambda: False, Succeeded=lambda: True) for _ in columns[0]]

    # Mooncake
    def batch_transfer_async_read(self, _: str, local: list[int], remote: list[int], __: list[int]) -> int:
        """Reads a line that there is."""
        for to, address in zip(local, remote, strict=True):
            line = self.lines.get(address, b"")
            ctypes.memmove(to, line, len(line))
        return 1

    def batch_transfer_async_write(self, _: str, __: list[int], remote: list[int], ___: list[int]) -> int:
        """Writes to peers that have said who they are, and nowhere else."""
        assert set(remote) <= self.writable, f"{remote} is written to, and nobody has been recognised there"
        return 1

    def transfer_check_status(self, _: int) -> int:
        """Over at once."""
        return 1

    def get_rpc_port(self) -> int:
        """Some port."""
        return PORT


class _Choices:
    """Any member of an enumeration."""

    def __getattr__(self, name: str) -> str:
        return name


@contextmanager
def standing_in() -> Iterator[None]:
    """Inside, backends are made of stand-ins."""
    made = SimpleNamespace(
        NIXL_SUCCESS=0, NIXL_IN_PROG=1, nixlAgent=Native, nixlAgentConfig=SimpleNamespace, NativeError=NativeError
    )
    for name in ("NIXL_THREAD_SYNC_STRICT", "DRAM_SEG", "VRAM_SEG", "NIXL_INIT_AGENT", "NIXL_WRITE"):
        setattr(made, name, name)
    made.nixlRegDList = made.nixlXferDList = lambda *given: given
    moris = SimpleNamespace(
        IOEngine=Native, EngineDesc=Described, MemoryDesc=Described, IOEngineConfig=dict, RdmaBackendConfig=dict
    )
    moris.PollCqMode = moris.BackendType = moris.MemoryLocationType = _Choices()
    memfabric = SimpleNamespace(TransferEngine=Native, TransDataOpType=_Choices())
    with (
        mock.patch.dict(os.environ, {"MF_CONFIG_STORE_URL": "tcp://store:1"}),
        mock.patch.dict(sys.modules, {"mori.io": moris, "memfabric_hybrid": memfabric}),
        mock.patch.object(nixl_agent, "_load", return_value=made),
        mock.patch.object(mooncake_session, "_load", return_value=SimpleNamespace(TransferEngine=Native)),
        mock.patch.object(mori, "_rdma_devices", return_value=["mlx5_0"]),
    ):
        yield

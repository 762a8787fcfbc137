# ruff: noqa: A002, N802 - the names are the packages' own
"""Stand-ins for mori.io and memfabric_hybrid that move bytes within this process, held to what the real ones offer.

`record(package)` is what `dev.engine_interfaces` read from the wheel; the tests compare every stand-in with it.
"""

import ctypes
import itertools
import json
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec


def record(package):
    return json.loads((Path(__file__).parent / "recorded" / f"{package}.json").read_text())


def copy(target, source, nbytes):
    ctypes.memmove(target, source, nbytes)


# --- mori.io -------------------------------------------------------------------------------------------------------


class _Packed:
    """A description that travels as bytes."""

    fields: tuple[str, ...]

    def pack(self):
        return msgspec.msgpack.encode([getattr(self, name) for name in self.fields])

    @classmethod
    def unpack(cls, data):
        made = cls.__new__(cls)
        for name, value in zip(cls.fields, msgspec.msgpack.decode(data), strict=True):
            setattr(made, name, value)
        return made


class EngineDesc(_Packed):
    fields = ("key", "host", "port")


class MemoryDesc(_Packed):
    fields = ("engine_key", "data", "size")


class TransferStatus:
    """Ends when it has been asked `rounds` times; then the bytes are there."""

    def __init__(self, copies, rounds, failure):
        self._copies, self._rounds, self._failure = copies, rounds, failure

    def _ended(self):
        self._rounds -= 1
        if self._rounds > 0:
            return False
        for each in self._copies:
            copy(*each)
        self._copies = []
        return True

    def Failed(self):
        return bool(self._failure)

    def Succeeded(self):
        return not self._failure and self._ended()

    def Message(self):
        return self._failure


class IOEngine:
    made: ClassVar[list[Any]] = []
    rounds = 1
    failure = ""
    raises = ""

    def __init__(self, key, config):
        self.key, self.config = key, config
        self.memories, self.remotes, self.backends = {}, set(), []
        self._ids = itertools.count()
        IOEngine.made.append(self)

    def get_engine_desc(self):
        described = EngineDesc()
        described.key, described.host, described.port = self.key, self.config.host, 1234
        return described

    def create_backend(self, type, config=None):
        self.backends.append((type, config))

    def register_remote_engine(self, engine_desc):
        self.remotes.add(engine_desc.key)

    def deregister_remote_engine(self, engine_desc):
        self.remotes.remove(engine_desc.key)

    def register_memory(self, ptr, size, device_id, mem_loc):
        described = MemoryDesc()
        described.engine_key, described.data, described.size = self.key, ptr, size
        self.memories[ptr] = (size, device_id, mem_loc)
        return described

    def deregister_memory(self, mem_desc):
        del self.memories[mem_desc.data]

    def allocate_transfer_uid(self):
        return next(self._ids)

    def _batch(self, ours, local_offsets, theirs, remote_offsets, sizes, ids, *, write):
        assert len({len(ours), len(local_offsets), len(theirs), len(remote_offsets), len(sizes), len(ids)}) == 1
        if self.raises:
            raise RuntimeError(self.raises)
        statuses = []
        for mine, starts, other, ends, lengths in zip(ours, local_offsets, theirs, remote_offsets, sizes, strict=True):
            assert mine.engine_key == self.key
            assert other.engine_key in self.remotes
            copies = []
            for start, end, length in zip(starts, ends, lengths, strict=True):
                assert 0 <= start <= start + length <= mine.size
                assert 0 <= end <= end + length <= other.size
                pair = (other.data + end, mine.data + start) if write else (mine.data + start, other.data + end)
                copies.append((*pair, length))
            statuses.append(TransferStatus(copies, self.rounds, self.failure))
        return statuses

    def batch_write(self, local_dest_mem_desc, local_offsets, remote_src_mem_desc, remote_offsets, sizes, transfer_uid):
        given = (local_dest_mem_desc, local_offsets, remote_src_mem_desc, remote_offsets, sizes, transfer_uid)
        return self._batch(*given, write=True)

    def batch_read(self, local_dest_mem_desc, local_offsets, remote_src_mem_desc, remote_offsets, sizes, transfer_uid):
        given = (local_dest_mem_desc, local_offsets, remote_src_mem_desc, remote_offsets, sizes, transfer_uid)
        return self._batch(*given, write=False)


def _config(*names):
    def make(**given):
        assert set(given) <= set(names), given
        return SimpleNamespace(**given)

    return make


def mori_io():
    """The module, with no engine made yet."""
    IOEngine.made.clear()
    return SimpleNamespace(
        IOEngine=IOEngine,
        EngineDesc=EngineDesc,
        MemoryDesc=MemoryDesc,
        IOEngineConfig=_config("host", "port"),
        RdmaBackendConfig=_config("poll_cq_mode", "enable_notification"),
        BackendType=Enum("BackendType", ["RDMA"]),
        PollCqMode=Enum("PollCqMode", ["EVENT"]),
        MemoryLocationType=Enum("MemoryLocationType", ["CPU", "GPU"]),
    )


# --- memfabric_hybrid ----------------------------------------------------------------------------------------------


class TransferEngine:
    made: ClassVar[list[Any]] = []
    start_code = 0
    code = 0
    raises = ""

    def __init__(self):
        self.started, self.memories, self.ended = None, {}, []
        self.port = 0
        TransferEngine.made.append(self)

    def get_rpc_port(self):
        return self.port

    def initialize(self, store_url, session_id, role, device_id, data_op_type):
        assert role in ("Prefill", "Decode")
        self.started = (store_url, session_id, role, device_id, data_op_type)
        self.port = 16000 + TransferEngine.made.index(self)
        return self.start_code

    def batch_register_memory(self, buffer_addrs, capacities):
        self.memories.update(zip(buffer_addrs, capacities, strict=True))
        return 0

    def unregister_memory(self, buffer_addr):
        del self.memories[buffer_addr]
        return 0

    def _move(self, session, ours, theirs, lengths, *, write):
        if self.raises:
            raise RuntimeError(self.raises)
        peer = next(engine for engine in TransferEngine.made if f"10.0.0.1:{engine.port}" == session)
        for mine, other, length in zip(ours, theirs, lengths, strict=True):
            for engine, address in ((self, mine), (peer, other)):
                assert any(first <= address and address + length <= first + n for first, n in engine.memories.items())
            copy(*((other, mine) if write else (mine, other)), length)
        return self.code

    def batch_transfer_sync_write(self, dest_session, buffers, peer_buffers, lengths):
        return self._move(dest_session, buffers, peer_buffers, lengths, write=True)

    def batch_transfer_sync_read(self, dest_session, buffers, peer_buffers, lengths):
        return self._move(dest_session, buffers, peer_buffers, lengths, write=False)

    def destroy(self):
        self.ended.append("destroy")

    def unInitialize(self):
        self.ended.append("unInitialize")


def memfabric():
    """The module, with no engine made yet."""
    TransferEngine.made.clear()
    return SimpleNamespace(
        TransferEngine=TransferEngine,
        TransDataOpType=Enum("TransDataOpType", ["SDMA", "DEVICE_RDMA"]),
        get_and_clear_last_err_msg=lambda: "the NPU said no",
    )

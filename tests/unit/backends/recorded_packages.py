# ruff: noqa: A002, N802 - the names are the packages' own
"""Stand-ins for mori.io and memfabric_hybrid that move bytes between processes of one host, or within one, and are held
to what the real ones offer.

`record(package)` is what `dev.backend_interfaces` read from the wheel; the tests compare every stand-in with it.
"""

import errno
import itertools
import json
import socket
import sys
import threading
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
from pdpool_connector.backends import mori

from tests.unit.backends.reach import LostError, Owner, Reach, Registered, within

ANSWER_S = 10.0
"""How long the process of a session may take to say where its memory is."""


def record(package):
    return json.loads((Path(__file__).parent / "recorded" / f"{package}.json").read_text())


def install():
    """Let the adapters of this process find the stand-ins, and the RDMA device that MORI needs."""
    sys.modules["mori.io"] = mori_io()
    sys.modules["memfabric_hybrid"] = memfabric()
    mori._rdma_devices = lambda: ["mlx5_0"]


# --- mori.io -------------------------------------------------------------------------------------------------------


class _Packed:
    """A description that travels as bytes. Fields that begin with an underscore are in them and are private."""

    fields: tuple[str, ...]
    _inside: tuple[str, ...] = ()

    def pack(self):
        return msgspec.msgpack.encode([getattr(self, name) for name in (*self.fields, *self._inside)])

    @classmethod
    def unpack(cls, data):
        made = cls.__new__(cls)
        for name, value in zip((*cls.fields, *cls._inside), msgspec.msgpack.decode(data), strict=True):
            setattr(made, name, value)
        return made


class EngineDesc(_Packed):
    fields = ("key", "host", "port")
    _inside = ("_owner",)


class MemoryDesc(_Packed):
    fields = ("engine_key", "data", "size")


class TransferStatus:
    """Ends when it has been asked `rounds` times; then the bytes are there, or it has failed."""

    def __init__(self, moves, rounds, failure):
        self._moves, self._rounds, self._failure = moves, rounds, failure

    def _ended(self):
        self._rounds -= 1
        if self._rounds > 0:
            return False
        moves, self._moves = self._moves, ()
        try:
            for move, *given in moves:
                move(*given)
        except LostError as error:
            self._failure = str(error)
        return not self._failure

    def Failed(self):
        return bool(self._failure)

    def Succeeded(self):
        return not self._failure and self._ended()

    def Message(self):
        return self._failure


class _Remote:
    """Another backend, which is reached with the first transfer: registering it asks nothing of it."""

    def __init__(self, owner):
        self._owner, self._way = owner, None

    def way(self, memory):
        """How to get there, if `memory` is what that backend has registered."""
        if self._way is None:
            self._way = Reach(self._owner)
        if (memory.data, memory.size) not in self._way.registered():
            raise LostError(f"{memory.engine_key} has no memory of {memory.size} bytes at {memory.data:#x} registered")
        return self._way

    def close(self):
        if self._way is not None:
            self._way.close()


class IOEngine:
    made: ClassVar[list[Any]] = []
    rounds = 2
    failure = ""
    raises = ""

    def __init__(self, key, config):
        self.key, self.config = key, config
        self.memories, self.remotes, self.backends = {}, {}, []
        self._registered = Registered()
        self._ids = itertools.count()
        IOEngine.made.append(self)

    def get_engine_desc(self):
        described = EngineDesc()
        described.key, described.host, described.port = self.key, self.config.host, 1234
        described._owner = self._registered.owner
        return described

    def create_backend(self, type, config=None):
        self.backends.append((type, config))

    def register_remote_engine(self, engine_desc):
        # The real one would replace what it knows, and go on with connections to the one before.
        assert engine_desc.key not in self.remotes
        self.remotes[engine_desc.key] = _Remote(msgspec.convert(engine_desc._owner, Owner))

    def deregister_remote_engine(self, engine_desc):
        self.remotes.pop(engine_desc.key).close()

    def register_memory(self, ptr, size, device_id, mem_loc):
        described = MemoryDesc()
        described.engine_key, described.data, described.size = self.key, ptr, size
        self.memories[ptr] = (size, device_id, mem_loc)
        self._tell()
        return described

    def deregister_memory(self, mem_desc):
        del self.memories[mem_desc.data]
        self._tell()

    def _tell(self):
        self._registered.tell([(first, size) for first, (size, *_) in self.memories.items()])

    def allocate_transfer_uid(self):
        return next(self._ids)

    def _batch(self, ours, local_offsets, theirs, remote_offsets, sizes, ids):
        assert len({len(ours), len(local_offsets), len(theirs), len(remote_offsets), len(sizes), len(ids)}) == 1
        assert self.backends
        if self.raises:
            raise RuntimeError(self.raises)
        return [self._one(*given) for given in zip(ours, local_offsets, theirs, remote_offsets, sizes, strict=True)]

    def _one(self, mine, starts, other, ends, lengths):
        assert mine.engine_key == self.key
        assert other.engine_key in self.remotes
        assert self.memories[mine.data][0] == mine.size
        moves, failure = [], self.failure
        try:
            way = self.remotes[other.engine_key].way(other)
            for start, end, length in zip(starts, ends, lengths, strict=True):
                within([(0, mine.size)], start, length)
                within([(0, other.size)], end, length)
                here, there = mine.data + start, other.data + end
                moves.append((way.write, there, here, length))
        except LostError as error:
            failure = failure or str(error)
        return TransferStatus(moves, self.rounds, failure)

    def batch_write(self, local_dest_mem_desc, local_offsets, remote_src_mem_desc, remote_offsets, sizes, transfer_uid):
        given = (local_dest_mem_desc, local_offsets, remote_src_mem_desc, remote_offsets, sizes, transfer_uid)
        return self._batch(*given)


def _config(*names):
    def make(**given):
        assert set(given) <= set(names), given
        return SimpleNamespace(**given)

    return make


def mori_io():
    """The module, with no backend made yet."""
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


class _Session:
    """A backend as its config store knows it: who has the store's URL and the session's name can ask where it is.

    The store is the kernel's table of socket names. A name is gone as soon as its process is.
    """

    def __init__(self, store, host, owner):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.port = self._bind(store, host)
        self._socket.listen()
        self._thread = threading.Thread(target=self._answer, args=(msgspec.msgpack.encode(owner),), daemon=True)
        self._thread.start()

    def _bind(self, store, host):
        for port in range(16000, 2**16):
            try:
                self._socket.bind(_name(store, f"{host}:{port}"))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
        raise OSError("every port is taken")

    def _answer(self, owner):
        while True:
            try:
                asking, _ = self._socket.accept()
            except OSError:  # the end
                return
            with asking, suppress(OSError):  # who asked may have left
                asking.send(owner)

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


def _name(store, session):
    return f"\0memfabric {store} {session}"


def _find(store, session):
    """The way into the memory of a session."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(ANSWER_S)
        try:
            asking.connect(_name(store, session))
            answer = asking.recv(4096)
            return Reach(msgspec.msgpack.decode(answer, type=Owner))
        except (OSError, msgspec.DecodeError) as error:
            raise LostError(f"session {session}: {error}") from error


class TransferEngine:
    made: ClassVar[list[Any]] = []
    start_code = 0
    code = 0
    raises = ""
    last_error = "the NPU said no"

    def __init__(self):
        self.started, self.memories, self.ended = None, {}, []
        self._registered = Registered()
        self._session, self._ways = None, {}
        TransferEngine.made.append(self)

    def get_rpc_port(self):
        return self._session.port if self._session else 0

    def initialize(self, store_url, session_id, role, device_id, data_op_type):
        assert role in ("Prefill", "Decode")
        host, _, port = session_id.rpartition(":")
        assert port == "0"
        assert ":" not in host or host == f"[{host.strip('[]')}]", "non-bracketed ipv6 endpoint is not supported"
        self.started = (store_url, session_id, role, device_id, data_op_type)
        if self.start_code == 0:
            self._session = _Session(store_url, host, self._registered.owner)
        return self.start_code

    def batch_register_memory(self, buffer_addrs, capacities):
        self.memories.update(zip(buffer_addrs, capacities, strict=True))
        self._registered.tell(list(self.memories.items()))
        return 0

    def unregister_memory(self, buffer_addr):
        del self.memories[buffer_addr]
        self._registered.tell(list(self.memories.items()))
        return 0

    def batch_transfer_sync_write(self, dest_session, buffers, peer_buffers, lengths):
        if self.raises:
            raise RuntimeError(self.raises)
        if self.code:
            return self.code
        try:
            self._copy(dest_session, list(zip(buffers, peer_buffers, lengths, strict=True)))
        except LostError as error:
            TransferEngine.last_error = str(error)
            return -1
        return 0

    def _copy(self, session, ranges):
        if session not in self._ways:
            self._ways[session] = _find(self.started[0], session)
        way = self._ways[session]
        reachable = way.registered()
        for mine, other, length in ranges:
            within(self.memories.items(), mine, length)
            within(reachable, other, length)
        for mine, other, length in ranges:
            way.write(other, mine, length)

    def destroy(self):
        self.ended.append("destroy")
        if self._session:
            self._session.close()
        for way in self._ways.values():
            way.close()
        self._ways.clear()

    def unInitialize(self):
        self.ended.append("unInitialize")


def memfabric():
    """The module, with no backend made yet."""
    TransferEngine.made.clear()
    return SimpleNamespace(
        TransferEngine=TransferEngine,
        TransDataOpType=Enum("TransDataOpType", ["SDMA", "DEVICE_RDMA"]),
        get_and_clear_last_err_msg=lambda: TransferEngine.last_error,
    )

"""Input of a peer to the transfer backends: the descriptor in its `Hello`, and its answer to Mooncake's probe."""

import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import msgspec
import numpy as np
from pdpool_connector.backends import mooncake, mooncake_probe
from pdpool_connector.backends.ascend import AscendBackend
from pdpool_connector.backends.base import BackendError, InvalidChunkError, Poll, TransferBackend, UnknownPeerError
from pdpool_connector.backends.local import LocalBackend
from pdpool_connector.backends.mooncake import MooncakeBackend
from pdpool_connector.backends.mori import MoriBackend
from pdpool_connector.backends.nixl import NixlBackend
from pdpool_connector.layout.arena import ArenaLocation, HostArena
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import KVMemory, LayoutError, RemoteMemory, decode_remote, encode_remote

from proof.fuzz.allowance import Allowance
from proof.fuzz.machines import Bytes
from proof.fuzz.natives import HOST, LINE, Described, Native, standing_in
from proof.fuzz.samples import A, B, Fuzzed

PAGES, PAGE_BYTES = 4, 64
ME = "c" * 32
BACKENDS: dict[str, Callable[[str], TransferBackend]] = {
    "local": lambda _: LocalBackend(),
    "nixl": lambda name: NixlBackend(name, target=True),
    "mooncake": lambda name: MooncakeBackend(name, host=HOST),
    "mori": lambda name: MoriBackend(name, host=HOST),
    "ascend": lambda name: AscendBackend(name, target=True, host=HOST),
}
MAX_PORT = 65535
CLOSED, SILENT, BROKEN, ENDLESS = range(4)
"""How an answer ends."""
MOST_ANSWER_BYTES = 8192
"""Most bytes that may be read of an answer to the probe; a real one has some ten."""


class _Where(msgspec.Struct):
    scratch: int


class _Who(msgspec.Struct):
    """The identity of a peer, in the one of these fields that its backend has."""

    metadata: bytes = b""
    backend: bytes = b""
    incarnation: str = ""


class Paired:
    """One backend with an honest peer A; each input describes a peer B."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._arenas = [HostArena(3 * PAGES * PAGE_BYTES) for _ in (ME, A, B)]
        with standing_in():
            self.backend, *others = (BACKENDS[kind](name) for name in (ME, A, B))
        ours, *theirs = (_memory(arena) for arena in self._arenas)
        self.backend.register(ours)
        self.honest = [
            RemoteMemory(backend=kind, memory=memory, descriptor=other.register(memory))
            for other, memory in zip(others, theirs, strict=True)
        ]
        scratch = [self._scratch(remote.descriptor) for remote in self.honest]
        # The stand-in; for a backend without one, one that is not used.
        native = Native()
        if isinstance(self.backend, MooncakeBackend):
            native = self.backend._session._native
        elif isinstance(self.backend, NixlBackend):
            native = self.backend._agent._agent
        native.lines |= {at: hashlib.sha512(name.encode()).digest() for at, name in zip(scratch, (A, B), strict=True)}
        native.writable = {at + LINE for at in scratch}
        with _door_open():
            self.backend.connect(A, self.honest[0])
            native.writable = {scratch[1] + LINE}
            assert self.connect(self.honest[1])

    def _scratch(self, descriptor: bytes) -> int:
        """The scratch address in a descriptor of NIXL's or Mooncake's, otherwise 0."""
        return msgspec.msgpack.decode(descriptor, type=_Where).scratch if self.kind in ("nixl", "mooncake") else 0

    def lies(self) -> list[RemoteMemory]:
        """Descriptions that B must not get through with: A's memory, A's identity, an address without memory."""
        one, other = self.honest
        described = msgspec.msgpack.decode(other.descriptor)
        if self.kind == "mori":
            *memories, last = described["memories"]
            small = msgspec.structs.replace(Described.unpack(last), size=8)
            described |= {"memories": [*memories, small.pack()], "scratch": [small.data, 8, 1]}
        elif self.kind in ("nixl", "mooncake"):
            described["scratch"] += LINE
        lost = msgspec.msgpack.encode(described)
        replace = msgspec.structs.replace
        # The identity is the first field of every descriptor.
        first = next(iter(msgspec.msgpack.decode(one.descriptor).items()))
        mixed = dict([*msgspec.msgpack.decode(other.descriptor).items(), first])
        return [
            replace(other, descriptor=msgspec.msgpack.encode(mixed)),
            one,
            replace(other, descriptor=lost),
            replace(other, memory=one.memory),
        ]

    def check_honest(self, remote: RemoteMemory) -> None:
        """B was connected: check that its identity and its address are B's."""
        if self.kind == "local":
            described = msgspec.msgpack.decode(remote.descriptor, type=ArenaLocation)
            end = described.address + described.nbytes
            assert all(described.address <= one.address and one.end <= end for one in remote.memory.regions)
        elif self.kind == "mooncake":
            assert self._scratch(remote.descriptor) == self._scratch(self.honest[1].descriptor)
        else:
            who = msgspec.msgpack.decode(remote.descriptor, type=_Who)
            assert B in str(who), f"B was let in as {who!r}"

    def connect(self, remote: RemoteMemory) -> bool:
        """Whether B is connected. It is disconnected again in either case, and A is as before."""
        held = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - `iterdir` costs three times as much
        try:
            self.backend.connect(B, remote)
        except BackendError:
            let_in = False
        else:
            let_in = True
            self.check_honest(remote)
            assert self.refuses(B, remote.memory.pages) is InvalidChunkError, "a page outside of its memory is taken"
            self.backend.disconnect(B)
        assert self.refuses(B, 0) is UnknownPeerError, "it is connected, and should not be"
        if isinstance(self.backend, LocalBackend):
            page = np.zeros(1, np.int32)
            handle = self.backend.submit(A, Chunk(page, page))
            assert self.backend.poll(handle) is Poll.DONE, "the peer from before is lost"
        else:
            assert self.refuses(A, PAGES) is InvalidChunkError, "the peer from before has other memory"
        assert len(os.listdir("/proc/self/fd")) <= held, "descriptors are left open"  # noqa: PTH208
        return let_in

    def refuses(self, peer: str, page: int) -> type[BackendError] | None:
        """How it refuses to write to this page of a peer's."""
        try:
            self.backend.submit(peer, Chunk(np.zeros(1, np.int32), np.array([page], np.int32)))
        except BackendError as error:
            return type(error)
        return None


def descriptors() -> tuple[Fuzzed, Sequence[bytes]]:
    """`TransferBackend.connect`. The first byte chooses the backend, and whether the whole memory of the peer or
    only its descriptor follows."""
    allowance = Allowance()
    pairs = [Paired(kind) for kind in BACKENDS]

    def fuzz(data: bytes) -> None:
        if not data:
            return
        pair, whole = pairs[data[0] % len(pairs)], data[0] >= len(pairs)
        with allowance.for_input(data), _door_open():
            try:
                remote = decode_remote(data[1:]) if whole else _described(pair, data[1:])
            except LayoutError:
                return
            assert pair.connect(remote) or pair.connect(pair.honest[1]), "a peer that was refused cannot connect later"

    seeds = []
    for index, pair in enumerate(pairs):
        for remote in (pair.honest[1], *pair.lies()):
            seeds += [bytes([index]) + remote.descriptor, bytes([index + len(pairs)]) + encode_remote(remote)]
    return fuzz, seeds


def _described(pair: Paired, descriptor: bytes) -> RemoteMemory:
    return RemoteMemory(backend=pair.kind, memory=pair.honest[1].memory, descriptor=descriptor)


def _answers(session: str, timeout_s: float) -> bool:
    del session, timeout_s
    return True


def _unbounded(session: str, timeout_s: float) -> contextlib.AbstractContextManager[None]:
    del session, timeout_s
    return contextlib.nullcontext()


@contextlib.contextmanager
def _door_open() -> Iterator[None]:
    with (
        mock.patch.object(mooncake, "answers", _answers),
        mock.patch.object(mooncake, "bounded", _unbounded),
    ):
        yield


def _memory(arena: HostArena) -> KVMemory:
    k, v, aux = (arena.region(part * PAGES * PAGE_BYTES, PAGE_BYTES, PAGES) for part in range(3))
    shape = {"page_tokens": 1, "layers": 1, "kv_heads": 1, "head_dim": 16}
    return KVMemory(kv=(k, v), aux=(aux,), dtype="float32", model="m", **shape)  # type: ignore[arg-type]


class _Door:
    """A connection that returns an input, in pieces of its choice, and ends as it says."""

    def __init__(self, data: Bytes) -> None:
        self._end, self._piece = data.below(4), data.below(64) + 1
        self._data = data
        self.sent = b""
        self.wanted: bool | None = False

    def __enter__(self) -> "_Door":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        """No wait is endless."""
        assert 0 < seconds <= 1

    def sendall(self, message: bytes) -> None:
        """Check the request; it is the same for every session."""
        assert message == (4).to_bytes(8, "little") + b"\3{}\n"

    def recv(self, most: int) -> bytes:
        """The next piece."""
        piece = self._data.take(min(self._piece, most))
        if not piece and self._end == ENDLESS:
            piece = b"x" * most
        self.sent += piece
        assert len(self.sent) <= MOST_ANSWER_BYTES
        if not piece and self._end == SILENT:
            self.wanted = None
            raise TimeoutError
        if not piece and self._end == BROKEN:
            self.wanted = False
            raise ConnectionResetError
        self.wanted = self.sent[8:9] == b"\3"
        return piece


def door() -> tuple[Fuzzed, Sequence[bytes]]:
    """`mooncake_probe.answers`, for a session that a descriptor may hold, and an answer of any length."""
    allowance = Allowance()
    doors: list[_Door] = []

    def fuzz(data: bytes) -> None:
        doors.clear()
        rest = Bytes(data)
        try:
            described = {"session": rest.take(rest.below(64)).decode(), "scratch": 4096}
            session = msgspec.convert(described, mooncake._Descriptor).session
        except (UnicodeDecodeError, msgspec.ValidationError):
            return

        def call(address: tuple[str, int], seconds: float) -> _Door:
            assert 0 < seconds <= 1
            if address[1] > MAX_PORT:
                raise OverflowError("port must be 0-65535")
            with contextlib.suppress(socket.gaierror):  # a name, and names are not resolved here
                socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            doors.append(_Door(rest))
            return doors[-1]

        with allowance.for_input(data), mock.patch.object(socket, "create_connection", call):
            answered = mooncake_probe.answers(session, 1.0)
        assert answered is (doors[0].wanted if doors else False), f"{answered} for {data!r}"

    sessions = (b"127.0.0.1:80", b"[::1]:80", b"a.b:00080", b"a..b:80", b"127.0.0.1:99999")
    answer = (3).to_bytes(8, "little") + b"\3{}"
    return fuzz, [bytes([len(one)]) + one + bytes([end, 7]) + answer for one in sessions for end in range(4)]

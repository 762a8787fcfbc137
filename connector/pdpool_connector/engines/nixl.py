"""The default data plane: NIXL over UCX (RDMA, shared memory, TCP: whatever reaches the peer).

Facts about NIXL 1.5.1 that shape this module, all measured:

- `transfer` over CMA copies inside the call; over TCP it returns at once and moves bytes only while someone polls.
- Nothing can cancel a transfer. Releasing a handle in flight lets its bytes land, and so does removing the peer. A
  connection error does not tell whether bytes are still under way. So every failure after posting is unsettled.
- A progress thread with the delay that NIXL's Python class hard-codes (0) spins on a core. With a delay it sleeps on
  file descriptors, and the delay only bounds how late it finds an event that no descriptor announced. Only an agent
  that peers write to needs the thread.
- Without locking (NIXL's default), several threads crash it; STRICT is one mutex around every call.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec
import numpy as np

from pdpool_connector.layout.memory import KVMemory, LayoutError, RemoteMemory
from pdpool_connector.layout.plan import Pages, PairPlan

from .base import (
    Chunk,
    EngineError,
    EngineUnavailableError,
    Handle,
    IncompatiblePeerError,
    InvalidChunkError,
    PeerUnreachableError,
    Poll,
    UnknownPeerError,
)

_log = logging.getLogger(__name__)

_PROGRESS_DELAY_US: Final = 100_000
"""Idle, the target's thread costs 0.06 % of a core at 100 ms and 3.5 % at 1 ms; latency is the same."""
_SCRATCH_BYTES: Final = 64
_SPIN_S: Final = 100e-6
"""A small transfer over TCP takes about 50 µs, less than the kernel needs to wake a sleeper."""
_SLEEP_SHARE: Final = 1 / 8
_SLEEP_MAX_S: Final = 2e-3


class _Descriptor(msgspec.Struct, frozen=True):
    """What `register` tells peers: NIXL's own metadata, and the address of a scratch line that warm-ups write to."""

    metadata: bytes
    scratch: int


@dataclass(slots=True, eq=False)
class _Peer:
    plan: PairPlan
    items: int
    """Handle of the prepared descriptor list of the peer's memory."""
    progress_at: float
    """When something was last submitted or finished (monotonic seconds)."""
    open: set[_Transfer] = field(default_factory=set)
    broken: str = ""
    """Why the connection failed; nothing more is submitted then."""


@dataclass(slots=True, eq=False)
class _Transfer:
    peer: _Peer
    native: int
    outcome: Poll = Poll.PENDING
    failure: str = ""


def pause(quiet_s: float) -> float:
    """Seconds to sleep before a transfer is polled again, when its peer has made no progress for `quiet_s`.

    Nothing at first, then a share of the time waited, so that a long wait costs little CPU and a short one is
    noticed soon.
    """
    return 0.0 if quiet_s < _SPIN_S else min(quiet_s * _SLEEP_SHARE, _SLEEP_MAX_S)


class NixlEngine:
    """`Engine` over NIXL's UCX backend.

    name_of_agent: our incarnation; peers know us by it. target: whether peers may write into our memory (then a
    progress thread, asleep unless there is traffic, serves them). connect_timeout_s: bound of the warm-up transfer.
    Raises EngineUnavailableError when NIXL cannot be loaded or started.

    Sets the environment variable UCX_MODULES to ^ib if it is not set and the machine has no InfiniBand device: UCX's
    InfiniBand module crashes the interpreter at exit.
    """

    name = "nixl"

    def __init__(self, name_of_agent: str, *, target: bool, connect_timeout_s: float = 10.0) -> None:
        self._nixl = _load()
        self._errors = _error_types(self._nixl)
        self._connect_timeout_s = connect_timeout_s
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = target
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _PROGRESS_DELAY_US
        config.captureTelemetry = False
        try:
            self._agent: Any = self._nixl.nixlAgent(name_of_agent, config)
            self._backend: int = self._agent.createBackend("UCX", {})
        except self._errors as error:
            raise EngineUnavailableError(f"NIXL cannot start its UCX backend: {_reason(error)}") from error
        self._scratch = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._memory: KVMemory | None = None
        self._registered: Any = None
        self._items = 0
        self._peers: dict[str, _Peer] = {}
        self._unreleased: list[int] = []

    def register(self, memory: KVMemory) -> bytes:
        """As `Engine.register`."""
        if self._memory is not None:
            raise EngineError("memory is registered already")
        address = self._scratch.ctypes.data
        regions = [(region.address, region.nbytes, 0, "") for region in (*memory.kv, memory.aux)]
        listed = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [*regions, (address, _SCRATCH_BYTES, 0, "")])
        try:
            self._agent.registerMem(listed, [self._backend])
            self._registered = listed
            self._items = self._prepare(self._nixl.NIXL_INIT_AGENT, memory, address)
            metadata: bytes = self._agent.getLocalMD()
        except self._errors as error:
            raise EngineError(f"NIXL cannot register the memory: {_reason(error)}") from error
        self._memory = memory
        return msgspec.msgpack.encode(_Descriptor(metadata, address))

    def connect(self, peer: str, remote: RemoteMemory) -> None:
        """As `Engine.connect`."""
        if self._memory is None:
            raise EngineError("register memory before connecting a peer")
        if peer in self._peers:
            raise EngineError(f"peer {peer} is connected already")
        if remote.engine != self.name:
            raise IncompatiblePeerError(f"engine is {self.name!r} here and {remote.engine!r} at the peer")
        try:
            plan = PairPlan(self._memory, remote.memory)
            descriptor = msgspec.msgpack.decode(remote.descriptor, type=_Descriptor)
        except (LayoutError, msgspec.DecodeError) as error:
            raise IncompatiblePeerError(str(error)) from error
        self._load_peer(peer, descriptor.metadata)
        try:
            items = self._prepare(peer, remote.memory, descriptor.scratch)
        except self._errors as error:
            self._agent.invalidateRemoteMD(peer)
            raise IncompatiblePeerError(f"the peer's memory is not what it registered: {_reason(error)}") from error
        self._peers[peer] = _Peer(plan, items, time.monotonic())
        try:
            self._warm_up(peer)
        except EngineError:
            self.disconnect(peer)
            raise

    def submit(self, peer: str, chunk: Chunk) -> Handle:
        """As `Engine.submit`; over CMA it copies before it returns."""
        state = self._peers.get(peer)
        if state is None or state.broken:
            raise UnknownPeerError(f"peer {peer} is not connected" + (f": {state.broken}" if state else ""))
        selected = (chunk.local_pages, chunk.remote_pages, chunk.aux)
        try:
            state.plan.check(*selected)
        except LayoutError as error:
            raise InvalidChunkError(str(error)) from error
        local, remote = state.plan.indices(*selected)
        if not len(local):
            return _Transfer(state, 0, Poll.DONE)
        return self._post(state, local, remote)

    def poll(self, handle: Handle) -> Poll:
        """As `Engine.poll`; sleeps 2 ms at most."""
        assert isinstance(handle, _Transfer)
        if handle.outcome is not Poll.PENDING:
            return handle.outcome
        try:
            status = self._agent.getXferStatus(handle.native)
        except self._errors as error:
            return self._fail(handle, error)
        if status != self._nixl.NIXL_IN_PROG:
            return self._finish(handle, status)
        time.sleep(pause(time.monotonic() - handle.peer.progress_at))
        return Poll.PENDING

    def disconnect(self, peer: str) -> None:
        """As `Engine.disconnect`."""
        state = self._peers.pop(peer, None)
        if state is None:
            return
        for transfer in list(state.open):
            self._close_transfer(transfer, Poll.FAILED_UNSETTLED, "disconnected while in flight")
        self._agent.releasedDlistH(state.items)
        self._agent.invalidateRemoteMD(peer)

    def close(self) -> None:
        """As `Engine.close`."""
        if self._agent is None:
            return
        for peer in list(self._peers):
            self.disconnect(peer)
        for native in self._unreleased:
            self._release(native)
        if self._items:
            self._agent.releasedDlistH(self._items)
        if self._registered is not None:
            self._agent.deregisterMem(self._registered, [self._backend])
        self._agent = self._registered = self._memory = None

    def _prepare(self, agent: str, memory: KVMemory, scratch: int) -> int:
        """Prepared descriptor list whose items are numbered as `PairPlan` numbers them, the scratch line last."""
        rows = [(region.address, region.item_bytes, 0, region.item_bytes, region.items) for region in memory.kv]
        rows.append((memory.aux.address, memory.aux.item_bytes, 0, memory.aux.item_bytes, memory.aux.items))
        rows.append((scratch, _SCRATCH_BYTES, 0, _SCRATCH_BYTES, 1))
        handle: int = self._agent.prepXferDlist(agent, self._nixl.DRAM_SEG, np.array(rows, np.int64), [self._backend])
        return handle

    def _load_peer(self, peer: str, metadata: bytes) -> None:
        try:
            name = self._agent.loadRemoteMD(metadata).decode(errors="replace")
        except self._errors as error:
            raise PeerUnreachableError(f"NIXL refuses the peer's metadata: {_reason(error)}") from error
        if name != peer:
            if name not in self._peers:
                self._agent.invalidateRemoteMD(name)
            raise IncompatiblePeerError(f"the metadata is of agent {name!r}, must be of peer {peer!r}")

    def _warm_up(self, peer: str) -> None:
        state = self._peers[peer]
        local, remote = (
            np.array([sum(region.items for region in (*memory.kv, memory.aux))], np.int32)
            for memory in (state.plan.local, state.plan.remote)
        )
        deadline = time.monotonic() + self._connect_timeout_s
        transfer = self._post(state, local, remote)
        while (outcome := self.poll(transfer)) is Poll.PENDING:
            if time.monotonic() > deadline:
                raise PeerUnreachableError(f"peer {peer} did not answer within {self._connect_timeout_s} s")
        if outcome is not Poll.DONE:
            raise PeerUnreachableError(f"the warm-up transfer to peer {peer} failed: {transfer.failure}")

    def _post(self, peer: _Peer, local: Pages, remote: Pages) -> _Transfer:
        write = self._nixl.NIXL_WRITE
        try:
            native = self._agent.makeXferReq(
                write, self._items, local, peer.items, remote, b"", [self._backend], skip_desc_merg=False
            )
        except self._errors as error:
            peer.broken = _reason(error)
            raise UnknownPeerError(f"NIXL cannot prepare a transfer: {peer.broken}") from error
        transfer = _Transfer(peer, native)
        peer.open.add(transfer)
        peer.progress_at = time.monotonic()
        try:
            status = self._agent.postXferReq(native)
        except self._errors as error:
            self._fail(transfer, error)
            return transfer
        if status != self._nixl.NIXL_IN_PROG:
            self._finish(transfer, status)
        return transfer

    def _finish(self, transfer: _Transfer, status: object) -> Poll:
        if status == self._nixl.NIXL_SUCCESS:
            transfer.peer.progress_at = time.monotonic()
            return self._close_transfer(transfer, Poll.DONE, "")
        return self._close_transfer(transfer, Poll.FAILED_UNSETTLED, f"NIXL reports {status}")

    def _fail(self, transfer: _Transfer, error: Exception) -> Poll:
        transfer.peer.broken = _reason(error)
        return self._close_transfer(transfer, Poll.FAILED_UNSETTLED, transfer.peer.broken)

    def _close_transfer(self, transfer: _Transfer, outcome: Poll, failure: str) -> Poll:
        transfer.outcome, transfer.failure = outcome, failure
        transfer.peer.open.discard(transfer)
        if not self._release(transfer.native):
            self._unreleased.append(transfer.native)
        return outcome

    def _release(self, native: int) -> bool:
        try:
            self._agent.releaseXferReq(native)
        except self._errors as error:
            _log.warning("NIXL keeps a transfer handle: %s", _reason(error))
            return False
        return True


def _load() -> ModuleType:
    if "UCX_MODULES" not in os.environ and not Path("/dev/infiniband").exists():
        os.environ["UCX_MODULES"] = "^ib"
        _log.info("no InfiniBand device: UCX_MODULES set to ^ib")
    try:
        return importlib.import_module("nixl_cu12._bindings")
    except ImportError as error:
        raise EngineUnavailableError(
            f"NIXL cannot be imported ({error}); without torch it is installed by "
            "`pip install --no-deps nixl-cu12==1.5.1`"
        ) from error


def _error_types(module: ModuleType) -> tuple[type[Exception], ...]:
    """NIXL's exceptions, which share no base class of their own."""
    return tuple(kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Exception))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

"""The default data plane: NIXL over UCX (RDMA, shared memory, TCP: whatever reaches the peer).

Facts about NIXL 1.5.1 that shape this module, all measured:

- Starting a transfer over CMA copies inside the call; over TCP it returns at once, and bytes move only while someone
  asks for its state.
- Nothing can cancel a transfer. Releasing a handle in flight lets its bytes land, and so does forgetting the peer. A
  connection error does not tell whether bytes are still under way. So every failure after the start is unsettled.
- Only an agent that peers write to or read from needs a progress thread.
- Where no transport can read by itself (TCP), UCX would have the peer send the bytes. Should the reader then be gone,
  the peer's process is aborted: the reply's error goes from `ucp_progress_get_reply` (src/ucp/rma/rma_sw.c) straight
  to `ucs_fatal` in `ucp_request_try_send` (src/ucp/core/ucp_request.inl), whatever the mode of error handling. So this
  emulation is off, and a peer that cannot be read without it is refused.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
import numpy as np

from pdpool_connector.layout.memory import MAX_ADDRESS, KVMemory, Region, RemoteMemory
from pdpool_connector.layout.plan import Chunk, PairPlan
from pdpool_connector.layout.pool import Row

from .base import (
    BackendError,
    Handle,
    IncompatiblePeerError,
    Op,
    PeerUnreachableError,
    Poll,
    UnknownPeerError,
)
from .nixl_agent import NixlAgent, NixlError
from .polling import pause
from .validation import admit, meet, refuse_absent

_log = logging.getLogger(__name__)

_SCRATCH_BYTES: Final = 64
_PARKED: Final = 64
"""Peers that NIXL still knows after `disconnect`. Forgetting one that lives on leaves a socket behind on both sides
until either process exits. So a peer that comes back finds its connection; the oldest of many are forgotten."""
_NO_READ: Final = (
    "NIXL cannot READ from this peer safely: no transport to it reads by itself (TCP does not), and UCX's emulation "
    "ends the peer's process when a reader is lost; use direction 'write', or backend 'mooncake'"
)
_SPIN_S: Final = 100e-6
"""A small transfer over TCP takes about 50 µs, less than the kernel needs to wake a sleeper."""


class _Descriptor(msgspec.Struct, frozen=True):
    """What `register` tells peers: NIXL's own metadata, and the address of a scratch line that warm-ups write to."""

    metadata: bytes
    scratch: Annotated[int, msgspec.Meta(ge=1, le=MAX_ADDRESS - _SCRATCH_BYTES)]


@dataclass(slots=True, eq=False)
class _Peer:
    plan: PairPlan
    metadata: bytes
    """NIXL's description of the peer's agent."""
    local: int
    """Handle of the prepared list of `plan.local_rows` and our scratch line."""
    remote: int
    """Handle of the prepared list of `plan.remote_rows` and the peer's scratch line."""
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


def _wait(quiet_s: float) -> float:
    """Seconds to sleep before the next poll; bytes move only in polls, so at first none."""
    return 0.0 if quiet_s < _SPIN_S else pause(quiet_s, 0.0)


class NixlBackend:
    """`TransferBackend` over NIXL's UCX backend.

    incarnation: ours; peers know our agent by it. target: whether peers write into our memory or read from it (then a
    progress thread, asleep unless there is traffic, serves them). op: what will be submitted; `connect` refuses a peer
    with which it is not safe. connect_timeout_s: bound of each warm-up transfer.
    Raises BackendUnavailableError when NIXL cannot be loaded or started.

    Sets environment variables of UCX that are not set: see `nixl_agent`.
    """

    name = "nixl"
    stages = True

    def __init__(self, incarnation: str, *, target: bool, op: Op = Op.WRITE, connect_timeout_s: float = 10.0) -> None:
        self._agent = NixlAgent(incarnation, progress_thread=target)
        self._op = op
        self._connect_timeout_s = connect_timeout_s
        self._scratch = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._memory: KVMemory | None = None
        self._registered: object = None
        self._peers: dict[str, _Peer] = {}
        self._parked: dict[str, bytes] = {}
        self._parked_lock = threading.Lock()
        self._unreleased: list[int] = []
        self._closed = False

    def register(self, memory: KVMemory, staging: Region | None = None) -> bytes:
        """As `TransferBackend.register`."""
        if self._closed or self._registered is not None:
            raise BackendError("the backend is closed" if self._closed else "memory is registered already")
        refuse_absent(memory)
        scratch = self._scratch.ctypes.data
        blocks = [(region.address, region.nbytes) for region in (*memory.regions, *([staging] if staging else []))]
        try:
            self._registered = self._agent.register([*blocks, (scratch, _SCRATCH_BYTES)])
            descriptor = _Descriptor(self._agent.metadata(), scratch)
        except NixlError as error:
            raise BackendError(f"NIXL cannot register the memory: {error}") from error
        self._memory = memory
        return msgspec.msgpack.encode(descriptor)

    def connect(self, peer: str, remote: RemoteMemory) -> None:
        """As `TransferBackend.connect`."""
        plan, descriptor = meet(self.name, self._memory, self._peers, peer, remote, _Descriptor)
        try:
            self._pair(peer, plan, descriptor)
            if self._op is Op.READ:
                self._try_read(peer, plan, descriptor)
        except BaseException:
            self.disconnect(peer)
            raise

    def _try_read(self, peer: str, plan: PairPlan, descriptor: _Descriptor) -> None:
        if failure := self._warm_up(peer, Op.READ):
            _log.info("the first READ from peer %s failed: %s", peer, failure)
            self.disconnect(peer)
            # A peer that is gone is told apart from one that cannot be read: this raises.
            self._pair(peer, plan, descriptor)
            raise IncompatiblePeerError(_NO_READ)

    def _pair(self, peer: str, plan: PairPlan, descriptor: _Descriptor) -> None:
        self._load(peer, descriptor.metadata)
        try:
            remote_list = self._agent.prepare(peer, [*plan.remote_rows, _scratch_row(descriptor.scratch)])
        except NixlError as error:
            self._forget(peer)
            raise IncompatiblePeerError(f"the peer's memory is not what it registered: {error}") from error
        try:
            local_list = self._agent.prepare(None, [*plan.local_rows, _scratch_row(self._scratch.ctypes.data)])
        except NixlError as error:
            self._release_list(peer, remote_list)
            self._forget(peer)
            raise BackendError(f"NIXL cannot prepare our memory for peer {peer}: {error}") from error
        self._peers[peer] = _Peer(plan, descriptor.metadata, local_list, remote_list, time.monotonic())
        if failure := self._warm_up(peer, Op.WRITE):
            raise PeerUnreachableError(f"the warm-up transfer to peer {peer} failed: {failure}")

    def submit(self, peer: str, chunk: Chunk, op: Op = Op.WRITE) -> Handle:
        """As `TransferBackend.submit`; over CMA it copies before it returns."""
        state = admit(self._peers, peer, chunk, op)
        if chunk.staged is not None:
            runs = state.plan.runs(chunk)
            return self._start(state, lambda: self._agent.make_runs(op, runs, peer))
        local, remote = state.plan.indices(chunk)
        if not len(local):
            return _Transfer(state, 0, Poll.DONE)
        return self._start(state, lambda: self._agent.make(op, state.local, local, state.remote, remote))

    def submit_at_once(self, peer: str, chunk: Chunk, op: Op = Op.WRITE) -> Handle | None:
        """As `PromptBackend.submit_at_once`; None while another thread is in a call of NIXL's: it may copy."""
        state = admit(self._peers, peer, chunk, op)
        local, remote = state.plan.indices(chunk)
        if not len(local):
            return _Transfer(state, 0, Poll.DONE)
        try:
            started = self._agent.start_now(op, state.local, local, state.remote, remote)
        except NixlError as error:
            state.broken = str(error)
            raise UnknownPeerError(f"NIXL cannot make a transfer: {error}") from error
        if started is None:
            return None
        native, over, failure = started
        state.progress_at, state.broken = time.monotonic(), failure
        if not over and not failure:
            transfer = _Transfer(state, native)
            state.open.add(transfer)
            return transfer
        if native:
            self._unreleased.append(native)
        return _Transfer(state, 0, Poll.DONE if over else Poll.FAILED_UNSETTLED, failure)

    def poll(self, handle: Handle) -> Poll:
        """As `TransferBackend.poll`; sleeps 2 ms at most."""
        assert isinstance(handle, _Transfer)
        if handle.outcome is not Poll.PENDING:
            return handle.outcome
        self._settle(handle, self._agent.over)
        if handle.outcome is Poll.PENDING:
            time.sleep(_wait(time.monotonic() - handle.peer.progress_at))
        return handle.outcome

    def disconnect(self, peer: str) -> None:
        """As `TransferBackend.disconnect`; NIXL goes on knowing a peer whose connection is sound, see `_PARKED`."""
        state = self._peers.pop(peer, None)
        if state is None:
            return
        for transfer in list(state.open):
            self._conclude(transfer, Poll.FAILED_UNSETTLED, "disconnected while in flight")
        for prepared in (state.local, state.remote):
            self._release_list(peer, prepared)
        if state.broken:
            self._forget(peer)
        else:
            self._park(peer, state.metadata)

    def close(self) -> None:
        """As `TransferBackend.close`."""
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers):
            self.disconnect(peer)
        self._unreleased = [native for native in self._unreleased if not self._release(native)]
        try:
            if self._registered is not None:
                self._agent.deregister(self._registered)
        except NixlError as error:
            raise BackendError(f"NIXL cannot deregister the memory: {error}") from error
        finally:
            self._memory = None
            self._agent.close()

    def _park(self, peer: str, metadata: bytes) -> None:
        with self._parked_lock:
            self._parked[peer] = metadata
            if len(self._parked) > _PARKED:
                oldest = next(iter(self._parked))
                del self._parked[oldest]
                self._forget(oldest)  # in here: its own worker may be about to load it again

    def _load(self, peer: str, metadata: bytes) -> None:
        with self._parked_lock:
            parked = self._parked.pop(peer, None)
        if parked == metadata:
            return
        if parked is not None:
            self._forget(peer)
        try:
            name = self._agent.load_peer(metadata)
        except NixlError as error:
            raise PeerUnreachableError(f"NIXL cannot reach peer {peer}: {error}") from error
        if name != peer:
            if name not in self._peers and name not in self._parked:
                self._forget(name)
            raise IncompatiblePeerError(f"the metadata is of agent {name!r}, must be of peer {peer!r}")

    def _release_list(self, peer: str, prepared: int) -> None:
        try:
            self._agent.release_prepared(prepared)
        except NixlError as error:
            _log.warning("NIXL keeps a descriptor list of peer %s: %s", peer, error)

    def _forget(self, peer: str) -> None:
        try:
            self._agent.forget_peer(peer)
        except NixlError as error:
            _log.warning("NIXL does not forget peer %s: %s", peer, error)

    def _warm_up(self, peer: str, op: Op) -> str:
        """Move the scratch line; why it failed, or nothing. Raises PeerUnreachableError when the peer is silent."""
        state = self._peers[peer]
        # The scratch line stands behind the rows of the plan.
        local, remote = (
            np.array([sum(row.pieces for row in rows)], np.int32)
            for rows in (state.plan.local_rows, state.plan.remote_rows)
        )
        deadline = time.monotonic() + self._connect_timeout_s
        transfer = self._start(state, lambda: self._agent.make(op, state.local, local, state.remote, remote))
        while self.poll(transfer) is Poll.PENDING:
            if time.monotonic() > deadline:
                raise PeerUnreachableError(f"peer {peer} did not answer within {self._connect_timeout_s} s")
        return transfer.failure

    def _start(self, peer: _Peer, make: Callable[[], int]) -> _Transfer:
        try:
            native = make()
        except NixlError as error:
            peer.broken = str(error)
            raise UnknownPeerError(f"NIXL cannot make a transfer: {error}") from error
        transfer = _Transfer(peer, native)
        peer.open.add(transfer)
        peer.progress_at = time.monotonic()
        self._settle(transfer, self._agent.start)
        return transfer

    def _settle(self, transfer: _Transfer, ask: Callable[[int], bool]) -> None:
        try:
            over = ask(transfer.native)
        except NixlError as error:
            transfer.peer.broken = str(error)
            self._conclude(transfer, Poll.FAILED_UNSETTLED, str(error))
            return
        if over:
            transfer.peer.progress_at = time.monotonic()
            self._conclude(transfer, Poll.DONE, "")

    def _conclude(self, transfer: _Transfer, outcome: Poll, failure: str) -> None:
        transfer.outcome, transfer.failure = outcome, failure
        transfer.peer.open.discard(transfer)
        if not self._release(transfer.native):
            self._unreleased.append(transfer.native)

    def _release(self, native: int) -> bool:
        try:
            self._agent.release(native)
        except NixlError as error:
            _log.warning("NIXL keeps a transfer handle: %s", error)
            return False
        return True


def _scratch_row(address: int) -> Row:
    return Row(address, _SCRATCH_BYTES, _SCRATCH_BYTES, 1)

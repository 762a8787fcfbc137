"""The default transfer backend: NIXL over UCX (RDMA, shared memory, TCP: what reaches the peer).

Facts about NIXL 1.5.1 that shape this module, all measured:

- Starting a transfer over CMA copies inside the call. Over TCP it returns at once, and bytes move only while its state
  is polled.
- Nothing cancels a transfer. Its bytes still land after its handle is released or the peer is forgotten. A connection
  error does not say whether bytes are under way. So every failure after the start is unsettled.
- Only an agent that peers write to needs a progress thread.
- Each attempt to load a peer whose process is dead leaves one socket until our process ends, and nothing closes it. So
  a peer on this host is not loaded once its process has ended.
- A descriptor list holds one kind of memory. So a chunk stays within one group of the plan, and each group has lists.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np

from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import KVMemory, RemoteMemory
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.pool import Row
from pdpool_connector.layout.process import ProcessName, is_gone
from pdpool_connector.layout.regions import MAX_ADDRESS, Block, Region
from pdpool_connector.protocol.timeouts import DEFAULTS, Timeouts

from .base import (
    BackendError,
    Handle,
    IncompatiblePeerError,
    PeerUnreachableError,
    Poll,
    UnknownPeerError,
)
from .memlock import memlock_hint
from .nixl_agent import NixlAgent, NixlError
from .polling import pause
from .transport_probe import PROBE_BYTES, traffic, transport_of
from .validation import admit, plan_pair, refuse_absent

_log = logging.getLogger(__name__)

_SCRATCH_BYTES: Final = PROBE_BYTES
_PROBES: Final = 3
"""Probes of a transport, while other traffic disturbs them."""
_PARKED: Final = 64
"""Peers that NIXL still knows after `disconnect`. Forgetting a live peer leaves a socket behind on both sides until
either process exits. So a peer that is connected again finds its connection; the oldest of many are forgotten."""
_SPIN_S: Final = 100e-6
"""A small transfer over TCP takes about 50 µs, less than the kernel needs to wake a sleeper."""


class _Descriptor(msgspec.Struct, frozen=True):
    """What peers get from `register`: NIXL's own metadata, and the address of scratch bytes that warm-ups write to."""

    metadata: bytes
    scratch: Annotated[int, msgspec.Meta(ge=1, le=MAX_ADDRESS - _SCRATCH_BYTES)]


class _Lists(NamedTuple):
    """Handles of prepared descriptor lists: our rows of a group, and the peer's."""

    local: int
    remote: int


@dataclass(slots=True, eq=False)
class _Peer:
    plan: PairPlan
    metadata: bytes
    """NIXL's description of the peer's agent."""
    lists: list[_Lists]
    """For each group of the plan; the lists of group 0 end with the scratch bytes."""
    progress_at: float
    """When something was last submitted or finished (monotonic seconds)."""
    open: set[_Transfer] = field(default_factory=set)
    broken: str = ""
    """Why the connection failed; nothing more is submitted then."""
    transport: str = ""


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

    Sets environment variables of UCX that are not set: see `nixl_agent`.

    Args:
        incarnation: ours; peers know our agent by it.
        target: whether peers write into our memory. Then a progress thread, asleep without traffic, serves them.
        timeouts: bounds of `connect`, and the like.

    Raises:
        BackendUnavailableError: NIXL cannot be loaded or started.
    """

    name = "nixl"
    stages = True

    def __init__(self, incarnation: str, *, target: bool, timeouts: Timeouts = DEFAULTS) -> None:
        self._agent = NixlAgent(incarnation, progress_thread=target)
        self._timeouts = timeouts
        self._scratch = np.frombuffer(mmap.mmap(-1, _SCRATCH_BYTES), np.uint8)
        self._memory: KVMemory | None = None
        self._registered: list[object] = []
        self._peers: dict[str, _Peer] = {}
        self._parked: dict[str, bytes] = {}
        self._parked_lock = threading.Lock()
        self._unreleased: list[int] = []
        self._closed = False

    def register(self, memory: KVMemory, staging: Region | None = None) -> bytes:
        """As `TransferBackend.register`."""
        if self._closed or self._registered:
            raise BackendError("the backend is closed" if self._closed else "memory is registered already")
        refuse_absent(memory)
        scratch = self._scratch.ctypes.data
        blocks = [*memory.blocks, Block(scratch, _SCRATCH_BYTES, None)]
        if staging is not None:
            blocks.append(Block(staging.address, staging.nbytes, None))
        try:
            self._registered = self._agent.register(blocks)
            descriptor = _Descriptor(self._agent.metadata(), scratch)
        except NixlError as error:
            raise BackendError(f"NIXL cannot register the memory: {error}{memlock_hint(blocks)}") from error
        self._memory = memory
        return msgspec.msgpack.encode(descriptor)

    def connect(self, peer: str, remote: RemoteMemory) -> None:
        """As `TransferBackend.connect`."""
        plan, descriptor = plan_pair(self.name, self._memory, self._peers, peer, remote, _Descriptor)
        if remote.process is not None and is_gone(remote.process):
            raise PeerUnreachableError(f"peer {peer} is process {remote.process.pid} of this host, which has ended")
        try:
            self._pair(peer, plan, descriptor)
            self._peers[peer].transport = self._observe(peer, remote.process)
        except BaseException:
            self.disconnect(peer)
            raise

    def _pair(self, peer: str, plan: PairPlan, descriptor: _Descriptor) -> None:
        self._load(peer, descriptor.metadata)
        state = _Peer(plan, descriptor.metadata, [], time.monotonic())
        try:
            for index in range(len(plan.groups)):
                state.lists.append(self._prepare(peer, plan, index, descriptor.scratch))
        except BackendError:
            self._release_lists(peer, state)
            self._forget(peer)
            raise
        self._peers[peer] = state
        self._warm_up(peer)

    def _prepare(self, peer: str, plan: PairPlan, index: int, scratch: int) -> _Lists:
        group = plan.groups[index]
        ours, theirs = [*group.local_rows], [*group.remote_rows]
        if index == 0:
            ours.append(_scratch_row(self._scratch.ctypes.data))
            theirs.append(_scratch_row(scratch))
        try:
            remote = self._agent.prepare(peer, theirs, group.remote_device)
        except NixlError as error:
            raise IncompatiblePeerError(f"the peer's memory is not what it registered: {error}") from error
        try:
            return _Lists(self._agent.prepare(None, ours, group.local_device), remote)
        except NixlError as error:
            self._release_list(peer, remote)
            raise BackendError(f"NIXL cannot prepare our memory for peer {peer}: {error}") from error

    def submit(self, peer: str, chunk: Chunk) -> Handle:
        """As `TransferBackend.submit`; over CMA it copies before it returns."""
        state = admit(self._peers, peer, chunk)
        if chunk.staged is not None:
            runs, group = state.plan.runs(chunk), state.plan.groups[chunk.group]
            devices = (group.local_device, group.remote_device)
            return self._start(state, lambda: self._agent.make_runs(runs, peer, devices))
        local, remote = state.plan.indices(chunk)
        if not len(local):
            return _Transfer(state, 0, Poll.DONE)
        lists = state.lists[chunk.group]
        return self._start(state, lambda: self._agent.make(lists.local, local, lists.remote, remote))

    def submit_at_once(self, peer: str, chunk: Chunk) -> Handle | None:
        """As `PromptBackend.submit_at_once`; None while another thread is in a call of NIXL's: it may copy."""
        state = admit(self._peers, peer, chunk)
        local, remote = state.plan.indices(chunk)
        if not len(local):
            return _Transfer(state, 0, Poll.DONE)
        lists = state.lists[chunk.group]
        try:
            started = self._agent.start_now(lists.local, local, lists.remote, remote)
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

    def transport(self, peer: str) -> str:
        """As `TransferBackend.transport`, measured at `connect` with a write from host memory to host memory.

        "tcp" is certain. "cma" and "rdma" follow from TCP not being used: to a process of this host, and to another
        host while a device of RDMA is open. Memory of a device may take another way (CUDA IPC on one host).
        """
        state = self._peers.get(peer)
        return state.transport if state is not None else ""

    def disconnect(self, peer: str) -> None:
        """As `TransferBackend.disconnect`; NIXL goes on knowing a peer whose connection is sound, see `_PARKED`."""
        state = self._peers.pop(peer, None)
        if state is None:
            return
        for transfer in list(state.open):
            self._conclude(transfer, Poll.FAILED_UNSETTLED, "disconnected while in flight")
        self._release_lists(peer, state)
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

    def _release_lists(self, peer: str, state: _Peer) -> None:
        for lists in state.lists:
            for prepared in lists:
                self._release_list(peer, prepared)

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

    def _observe(self, peer: str, process: ProcessName | None) -> str:
        """The transport that writes to the peer take, "" if it is not known."""
        group = self._peers[peer].plan.groups[0]
        device = group.local_device is not None or group.remote_device is not None
        for _ in range(_PROBES if process is not None else 0):
            before = traffic()
            self._warm_up(peer)
            if (transport := transport_of(before, traffic(), process, device=device)) is not None:
                return transport
        return ""

    def _warm_up(self, peer: str) -> None:
        """Write the scratch bytes. Raises PeerUnreachableError when that fails or the peer does not answer."""
        state = self._peers[peer]
        lists, group = state.lists[0], state.plan.groups[0]
        # The scratch bytes are behind the rows of the group.
        local, remote = (
            np.array([sum(row.pieces for row in rows)], np.int32) for rows in (group.local_rows, group.remote_rows)
        )
        deadline = time.monotonic() + self._timeouts.backend_connect_s
        transfer = self._start(state, lambda: self._agent.make(lists.local, local, lists.remote, remote))
        while self.poll(transfer) is Poll.PENDING:
            if time.monotonic() > deadline:
                raise PeerUnreachableError(f"peer {peer} did not answer within {self._timeouts.backend_connect_s} s")
        if transfer.failure:
            raise PeerUnreachableError(f"the warm-up transfer to peer {peer} failed: {transfer.failure}")

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

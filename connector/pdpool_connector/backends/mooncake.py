"""The transfer backend over Mooncake's TransferEngine (RDMA or TCP).

Facts about Mooncake 0.3.13 that shape this module, all measured or read in its source:

- It has no cancel, and a failure says nothing about bytes under way: bytes that the kernel holds land later. So every
  failure after the start is unsettled.
- Only the status of a batch of one transfer can be polled. For a larger batch the call spins until its end. So a chunk
  is one batch of all but its last ranges, and each of those is a batch of its own. They are queued behind the first
  batch, so they mark when its status costs nothing.
- Success means that the peer has acknowledged the last byte.
- It closes a connection only when a transfer over it fails. Connections to a dead peer stay until then.
- A session is an address and a port. Reading its incarnation shows which process listens there.
- It keeps the description of the first process of a session for good, and draws ports from 2000. A later process with
  the same port could not be reached. Zeros before the port make another name of the same address.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import KVMemory, RemoteMemory
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.pool import MAX_CHUNK_DESCRIPTORS, Runs
from pdpool_connector.layout.regions import MAX_ADDRESS, Block, Region
from pdpool_connector.protocol.timeouts import DEFAULTS, Timeouts

from .base import (
    BackendError,
    Handle,
    PeerUnreachableError,
    Poll,
)
from .mooncake_probe import answers, bounded
from .mooncake_session import MooncakeSession
from .polling import pause, sharpen_sleeps
from .validation import Session, admit, plan_pair, refuse_absent

_log = logging.getLogger(__name__)

_LINE: Final = 64
_MARKS: Final = 4
"""As many as Mooncake has connections to a peer by default (MC_TCP_LANES_PER_PEER): one for each that may lag."""
_SHORTEST_SLEEP_S: Final = 15e-6
"""A small transfer over TCP takes about 45 µs."""
_NAMED: Final = 4096
"""Sessions whose last process is remembered; beyond them the oldest are forgotten."""
_ZEROS: Final = 64
"""Names of one session, before the first is taken again: Mooncake keeps something for each."""


class _Descriptor(msgspec.Struct, frozen=True):
    """What peers get from `register`: our session, and the address of a line with our identity, before a blank one."""

    session: Session
    scratch: Annotated[int, msgspec.Meta(ge=1, le=MAX_ADDRESS - 2 * _LINE)]


@dataclass(slots=True, eq=False)
class _Peer:
    plan: PairPlan
    session: str
    scratch: int
    """Address of its identity."""
    progress_at: float
    """When something was last submitted or finished (monotonic seconds)."""
    waiting: deque[_Transfer] = field(default_factory=deque)
    """Not begun yet, for want of room."""
    open: list[_Transfer] = field(default_factory=list)
    """Under way, oldest first."""
    descriptors: int = 0
    """Under way; at most `MAX_CHUNK_DESCRIPTORS`."""
    broken: str = ""
    """Why the connection failed; nothing more is begun then."""


@dataclass(slots=True, eq=False)
class _Transfer:
    peer: _Peer
    runs: Runs
    read: bool = False
    """It reads from the peer: only the peer's identity is read."""
    outcome: Poll = Poll.PENDING
    failure: str = ""
    batch: int = 0
    """All ranges but the last ones; 0 if there is no such batch or it is over."""
    marks: list[int] = field(default_factory=list)
    """Batches of one range each, the next to ask at the end."""
    ripe_at: float = 0.0
    """From when on Mooncake frees the batch without waiting for it (monotonic seconds)."""


class MooncakeBackend:
    """`TransferBackend` over Mooncake.

    Sets MC_* environment variables that are not set: see `mooncake_session`.

    Args:
        incarnation: ours, by which peers recognise us.
        host: address at which peers reach this process.
        timeouts: bounds of `connect`, and the like.

    Raises:
        BackendUnavailableError: Mooncake cannot be loaded or started.
    """

    name = "mooncake"
    stages = True

    def __init__(self, incarnation: str, *, host: str, timeouts: Timeouts = DEFAULTS) -> None:
        self._session = MooncakeSession(host)
        self._timeouts = timeouts
        self._identity = _identity(incarnation)
        self._scratch = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._scratch[:_LINE] = np.frombuffer(self._identity, np.uint8)
        self._memory: KVMemory | None = None
        self._blocks: list[int] = []
        self._landings: dict[int, NDArray[np.uint8]] = {}
        self._peers: dict[str, _Peer] = {}
        self._abandoned: list[_Transfer] = []
        self._abandoned_lock = threading.Lock()
        self._named: dict[str, tuple[str, int]] = {}
        """By session: the last peer there, and the zeros before its port."""
        self._named_lock = threading.Lock()
        self._closed = False

    def register(self, memory: KVMemory, staging: Region | None = None) -> bytes:
        """As `TransferBackend.register`."""
        if self._closed or self._memory is not None:
            raise BackendError("the backend is closed" if self._closed else "memory is registered already")
        refuse_absent(memory)
        page = self._scratch
        blocks = [*memory.blocks, Block(page.ctypes.data, page.nbytes, None)]
        if staging is not None:
            blocks.append(Block(staging.address, staging.nbytes, None))
        self._session.register(blocks)
        self._memory, self._blocks = memory, [block.address for block in blocks]
        return msgspec.msgpack.encode(_Descriptor(self._session.name, self._scratch.ctypes.data))

    def connect(self, peer: str, remote: RemoteMemory) -> None:
        """As `TransferBackend.connect`; makes the calling thread's sleeps precise."""
        plan, descriptor = plan_pair(self.name, self._memory, self._peers, peer, remote, _Descriptor)
        sharpen_sleeps()
        self._reap()
        session = self._name(peer, descriptor.session)
        self._peers[peer] = _Peer(plan, session, descriptor.scratch, time.monotonic())
        try:
            self._warm_up(peer)
        except BaseException:
            self._leave(peer)
            raise

    def submit(self, peer: str, chunk: Chunk) -> Handle:
        """As `TransferBackend.submit`; hands the chunk to Mooncake's thread, or queues it behind those under way."""
        state = admit(self._peers, peer, chunk)
        return self._begin(_Transfer(state, state.plan.runs(chunk)))

    def poll(self, handle: Handle) -> Poll:
        """As `TransferBackend.poll`; sleeps 2 ms at most."""
        assert isinstance(handle, _Transfer)
        if handle.outcome is not Poll.PENDING:
            return handle.outcome
        peer = handle.peer
        # Those ahead of it are asked too: one that waits begins when they are over.
        for transfer in list(peer.open):
            if transfer.outcome is Poll.PENDING:
                self._advance(transfer)
            if transfer is handle:
                break
        self._start_what_fits(peer)
        if handle.outcome is Poll.PENDING:
            time.sleep(pause(time.monotonic() - peer.progress_at, _SHORTEST_SLEEP_S))
        return handle.outcome

    def transport(self, peer: str) -> str:
        """As `TransferBackend.transport`: the one protocol that Mooncake has for all peers, by its own topology."""
        return self._session.transport if peer in self._peers else ""

    def disconnect(self, peer: str) -> None:
        """As `TransferBackend.disconnect`. Mooncake keeps and reuses its connections to a peer that is alive."""
        state = self._leave(peer)
        if state is not None and not self._closed and answers(state.session, self._timeouts.backend_probe_s) is False:
            self._hang_up(state)

    def close(self) -> None:
        """As `TransferBackend.close`."""
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers):
            self.disconnect(peer)
        try:
            if self._memory is not None:
                self._session.deregister([*self._blocks, *self._landings])
        finally:
            self._memory = None
            self._session.close()

    def _name(self, peer: str, session: str) -> str:
        """The session by a name that no other process has had, as far as is remembered."""
        with self._named_lock:
            last, zeros = self._named.pop(session, (peer, 0))
            zeros = zeros if last == peer else (zeros + 1) % _ZEROS
            self._named[session] = peer, zeros
            if len(self._named) > _NAMED:
                del self._named[next(iter(self._named))]
        host, _, port = session.rpartition(":")
        return f"{host}:{'0' * zeros}{port}"

    def _leave(self, peer: str) -> _Peer | None:
        state = self._peers.pop(peer, None)
        if state is not None:
            self._break(state, "disconnected while in flight")
        return state

    def _hang_up(self, peer: _Peer) -> None:
        """Let a transfer fail on each connection to a process whose port is closed, so that Mooncake closes them.

        The transfers read, because the port may belong to another process by now. They read into a page of their own.
        """
        landing = self._land()
        address, begun = landing.ctypes.data, time.monotonic()
        run = _one_run(address, peer.scratch)
        tries = [self._session.start(peer.session, *run, read=True) for _ in range(_MARKS)]
        tries = [one for one in tries if one]
        while tries and (waited := time.monotonic() - begun) < self._timeouts.backend_probe_s:
            tries = [one for one in tries if self._session.over(one) is None]
            time.sleep(pause(waited, _SHORTEST_SLEEP_S))
        if not tries:
            self._clear(address)

    def _land(self) -> NDArray[np.uint8]:
        """A page for one read, registered; one that is given up keeps it, for its bytes may land at any later time."""
        landing = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._session.register([Block(landing.ctypes.data, landing.nbytes, None)])
        self._landings[landing.ctypes.data] = landing
        return landing

    def _clear(self, address: int) -> None:
        self._session.deregister([address])
        del self._landings[address]

    def _warm_up(self, peer: str) -> None:
        """Read the peer's identity and write a line, both over the connections that chunks will use."""
        state = self._peers[peer]
        deadline = time.monotonic() + self._timeouts.backend_connect_s
        late = PeerUnreachableError(f"peer {peer} did not answer within {self._timeouts.backend_connect_s} s")
        answered = answers(state.session, self._timeouts.backend_connect_s)
        if not answered:
            raise PeerUnreachableError(f"no process answers at {state.session}") if answered is False else late
        landing = self._land()
        address = landing.ctypes.data
        transfer: _Transfer | None = None
        try:
            for read, line in ((True, state.scratch), (False, state.scratch + _LINE)):
                with bounded(state.session, self._timeouts.backend_open_s):
                    transfer = self._begin(_Transfer(state, _one_run(address, line), read))
                while (outcome := self.poll(transfer)) is Poll.PENDING:
                    if time.monotonic() > deadline:
                        raise late
                if outcome is not Poll.DONE:
                    raise PeerUnreachableError(f"the warm-up transfer to peer {peer} failed: {transfer.failure}")
                # Before anything is written: at that address another process may hold pages.
                if landing[:_LINE].tobytes() != _identity(peer):
                    raise PeerUnreachableError(f"another process than peer {peer} answers at {state.session}")
        finally:
            if transfer is not None and not transfer.marks:  # not begun, or its end was reported
                self._clear(address)

    def _begin(self, transfer: _Transfer) -> _Transfer:
        if not len(transfer.runs.nbytes):
            transfer.outcome = Poll.DONE
            return transfer
        transfer.peer.waiting.append(transfer)
        self._start_what_fits(transfer.peer)
        return transfer

    def _start_what_fits(self, peer: _Peer) -> None:
        while peer.waiting:
            count = len(peer.waiting[0].runs.nbytes)
            if peer.open and peer.descriptors + count > MAX_CHUNK_DESCRIPTORS:
                return
            transfer = peer.waiting.popleft()
            peer.open.append(transfer)
            peer.descriptors += count
            peer.progress_at = time.monotonic()
            if not self._start(transfer):
                self._break(peer, "Mooncake refused a transfer; its reason is on stderr")

    def _start(self, transfer: _Transfer) -> bool:
        runs, session = transfer.runs, transfer.peer.session
        count = len(runs.nbytes)
        singles = min(count, _MARKS)
        timeout_s = self._session.batch_timeout_s + int(runs.nbytes.sum()) * 1e-9
        transfer.ripe_at = time.monotonic() + timeout_s + self._timeouts.backend_reap_s
        if count > singles:
            transfer.batch = self._session.start(session, *(column[:-singles] for column in runs), read=transfer.read)
            if not transfer.batch:
                return False
        for index in range(count - singles, count):
            one = (column[index : index + 1] for column in runs)
            mark = self._session.start(session, *one, read=transfer.read)
            if not mark:
                return False
            transfer.marks.insert(0, mark)
        return True

    def _advance(self, transfer: _Transfer) -> None:
        peer = transfer.peer
        while transfer.marks:
            over = self._session.over(transfer.marks[-1])
            if over is None:
                return
            transfer.marks.pop()
            if not over:
                self._break(peer, "Mooncake reports a failed transfer; its reason is on stderr")
                return
        peer.progress_at = time.monotonic()
        batch, transfer.batch = transfer.batch, 0
        if batch and not self._session.finish(batch):
            self._break(peer, "Mooncake reports a failed batch; its reason is on stderr")
            return
        peer.open.remove(transfer)
        peer.descriptors -= len(transfer.runs.nbytes)
        transfer.outcome = Poll.DONE

    def _break(self, peer: _Peer, why: str) -> None:
        """End all transfers of a peer: those under way may still land bytes, those that wait have moved none."""
        peer.broken = why
        for transfer in peer.open:
            transfer.outcome, transfer.failure = Poll.FAILED_UNSETTLED, why
            if transfer.batch or transfer.marks:
                with self._abandoned_lock:
                    self._abandoned.append(transfer)
        for transfer in peer.waiting:
            transfer.outcome, transfer.failure = Poll.FAILED_SETTLED, f"not begun: {why}"
        peer.open.clear()
        peer.waiting.clear()
        peer.descriptors = 0

    def _reap(self) -> None:
        """Free what Mooncake keeps for transfers that were given up and have ended since."""
        now = time.monotonic()
        with self._abandoned_lock:
            ripe = [transfer for transfer in self._abandoned if transfer.ripe_at < now]
            self._abandoned = [transfer for transfer in self._abandoned if transfer.ripe_at >= now]
        for transfer in ripe:
            for mark in transfer.marks:
                self._session.over(mark)
            if transfer.batch:
                self._session.finish(transfer.batch)


def _identity(incarnation: str) -> bytes:
    return hashlib.sha512(incarnation.encode()).digest()


def _one_run(local: int, remote: int) -> Runs:
    return Runs(np.array([local], np.int64), np.array([remote], np.int64), np.array([_LINE], np.int64))

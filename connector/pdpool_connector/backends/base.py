"""What the runtime asks of a data plane.

Threads. `register` and `close` are called by one thread, before any and after every other call. Calls that name a peer
come one at a time: `connect`, `submit`, `poll` and `disconnect` from that peer's one worker thread, for each may block,
within the bounds told below; `submit_at_once`, of backends that have it, from the thread that owns the connector, while
the worker has nothing to do. Calls for different peers come at the same time, and an backend must be safe for that.

Settled and unsettled. A transfer is *settled* when nobody will read its source or write its target any more because of
it, neither this process, nor the peer's, nor a kernel or a device on behalf of either. DONE is settled, and every byte
has landed. FAILED_SETTLED is settled, and any part of the bytes may have landed. FAILED_UNSETTLED promises nothing:
bytes may land at any time later, so source and target stay held until a fence proves otherwise. An backend says SETTLED
only where that is proved. There is no cancel, for no backend can: an abort is to stop submitting and to poll what is in
flight to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, cast

from pdpool_connector.layout.memory import KVMemory, Region, RemoteMemory
from pdpool_connector.layout.plan import Chunk


class Op(Enum):
    """Which way a transfer moves bytes, seen from the side that starts it."""

    WRITE = "write"
    READ = "read"


class Poll(Enum):
    """State of a transfer; see the module's docstring for what settled means."""

    PENDING = "pending"
    DONE = "done"
    FAILED_SETTLED = "failed_settled"
    FAILED_UNSETTLED = "failed_unsettled"


class Handle(Protocol):
    """One submitted chunk. Belongs to the peer's worker thread."""

    @property
    def outcome(self) -> Poll:
        """What was last known of its state, without looking."""

    @property
    def failure(self) -> str:
        """Why it failed, for a person to read; empty unless `poll` returned one of the FAILED states."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A handle of a transfer that was over when `submit` returned."""

    outcome: Poll
    failure: str = ""


class BackendError(Exception):
    """A call failed, and nothing of it is in flight: whatever it would have moved is settled."""


class BackendUnavailableError(BackendError):
    """The backend cannot work in this process: a package is missing or the machine lacks what it needs."""


class IncompatiblePeerError(BackendError):
    """The peer's memory does not fit ours; the message names every field that differs. Trying again is vain."""


class PeerUnreachableError(BackendError):
    """The peer could not be connected, or the warm-up transfer to it failed. Trying again may help."""


class UnknownPeerError(BackendError):
    """The peer is not connected (never was, was disconnected, or its connection broke)."""


class InvalidChunkError(BackendError):
    """A page id or aux slot lies outside the registered memory, or the lists do not fit together. Nothing was moved."""


class TransferBackend(Protocol):
    """A data plane. `peer` is the peer's incarnation (hex): a restarted peer is another peer."""

    @property
    def name(self) -> str:
        """Name of the backend on the wire and in configuration; both sides of a pair must use the same."""

    @property
    def stages(self) -> bool:
        """Whether staged chunks may be submitted: the cache is host memory, from which the CPU can gather."""

    def register(self, memory: KVMemory, staging: Region | None = None) -> bytes:
        """Make `memory` our end of all transfers and, for an backend opened as a target, of those peers start. Once.

        staging: memory from which staged chunks are written, for backends that take such chunks.
        Returns the descriptor that peers need for `connect` (at most `MAX_DESCRIPTOR_BYTES`). The memory must stay
        mapped until `close`. Raises BackendError.
        """

    def connect(self, peer: str, remote: RemoteMemory) -> None:
        """Pair with a peer and move a few bytes through the new connection, so that the first chunk is not slow.

        May block up to the backend's connect deadline (seconds). Raises IncompatiblePeerError, PeerUnreachableError, or
        BackendError when `peer` is connected already; after any of these the peer is not connected.
        """

    def submit(self, peer: str, chunk: Chunk, op: Op = Op.WRITE) -> Handle:
        """Start one transfer to or from the peer. All indices are checked against both memories first.

        May block while it copies (a bounded chunk: milliseconds). Raises InvalidChunkError or UnknownPeerError before
        anything is moved. A failure after that is told by `poll`, never raised.
        """

    def poll(self, handle: Handle) -> Poll:
        """Advance and tell the state of a transfer; raises nothing.

        Paces itself: while a transfer is PENDING it may sleep a few milliseconds at most, so a worker may call it in a
        loop without a sleep of its own. Once it returned something else it returns the same again, and the backend
        holds nothing for the handle any more.
        """

    def disconnect(self, peer: str) -> None:
        """Forget a peer; no error if it is not connected. Its handles that are still PENDING become FAILED_UNSETTLED,
        or FAILED_SETTLED where nothing had begun.

        OutcomeLog no transfer that is in flight, and is no fence.
        """

    def close(self) -> None:
        """Disconnect all peers and release memory, threads and descriptors. Idempotent; calls after it raise."""


class PromptBackend(TransferBackend, Protocol):
    """An backend that can start small transfers without waiting for anybody."""

    def submit_at_once(self, peer: str, chunk: Chunk, op: Op = Op.WRITE) -> Handle | None:
        """As `submit` for a chunk of a few KiB, but it never blocks, whatever the peer or other threads do.

        Returns None, and has started nothing, where it would have to wait. The handle may be PENDING; `poll` goes on.
        """


def prompt_submit(backend: TransferBackend) -> Callable[[str, Chunk, Op], Handle | None] | None:
    """`submit_at_once` of an backend whose own class has it: a wrapper of another must not pass it on unseen."""
    return cast("PromptBackend", backend).submit_at_once if hasattr(type(backend), "submit_at_once") else None

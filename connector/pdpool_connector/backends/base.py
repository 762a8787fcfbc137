"""What the runtime requires of a transfer backend.

Threads: `register` and `close` are called by one thread, before and after every other call. Calls that name a peer come
one at a time. `connect`, `submit`, `poll` and `disconnect` come from that peer's worker thread, for they may block.
`submit_at_once`, of backends that have it, comes from the thread that owns the connector while the worker is idle.
`transport` may come from any thread. Calls for different peers come at the same time.

Settled: a transfer is *settled* when no process, kernel or device will read its source or write its target any more.
DONE is settled, and every byte has landed. FAILED_SETTLED is settled, and any part of the bytes may have landed. After
FAILED_UNSETTLED bytes may still land at any time, so source and target stay held until a fence proves otherwise. A
backend reports a settled failure only where that is proved. There is no cancel, because no backend has one. An abort
stops submitting and polls what is in flight to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, cast

from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import KVMemory, RemoteMemory
from pdpool_connector.layout.regions import Region


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
        """The last known state, without a new look."""

    @property
    def failure(self) -> str:
        """Why it failed, for a person to read; empty unless `poll` returned one of the FAILED states."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A handle of a transfer that was over when `submit` returned."""

    outcome: Poll
    failure: str = ""


class BackendError(Exception):
    """A call failed, and nothing of it is in flight."""


class BackendUnavailableError(BackendError):
    """The backend cannot work in this process: a package is missing or the machine lacks what it needs."""


class IncompatiblePeerError(BackendError):
    """The peer's memory does not fit ours; the message names every field that differs. A new try cannot help."""


class PeerUnreachableError(BackendError):
    """The peer could not be connected, or the warm-up transfer to it failed. A new try may help."""


class UnknownPeerError(BackendError):
    """The peer is not connected (never was, was disconnected, or its connection broke)."""


class InvalidChunkError(BackendError):
    """A page id or aux slot lies outside the registered memory, or lists do not fit together. Nothing was moved."""


class TransferBackend(Protocol):
    """Moves chunks to peers. `peer` is the peer's incarnation (hex): a restarted peer is another peer."""

    @property
    def name(self) -> str:
        """Name of the backend in frames and configuration; both sides of a pair must use the same."""

    @property
    def stages(self) -> bool:
        """Whether staged chunks may be submitted."""

    def register(self, memory: KVMemory, staging: Region | None = None) -> bytes:
        """Make `memory` our end of all transfers, and open it to writes of peers. Called once.

        Args:
            memory: our memory; it must stay mapped until `close`.
            staging: host memory from which staged chunks are written, for backends that take such chunks.

        Returns:
            The descriptor that peers need for `connect`, at most `MAX_DESCRIPTOR_BYTES`.

        Raises:
            BackendError: the backend cannot register the memory; the message names the region or the reason.
        """

    def connect(self, peer: str, remote: RemoteMemory) -> None:
        """Pair with a peer and move a few bytes to it, so that the first chunk is not slow.

        May block up to the backend's connect deadline. After an error the peer is not connected.

        Raises:
            IncompatiblePeerError: the memories do not fit.
            PeerUnreachableError: the peer does not answer.
            BackendError: `peer` is connected already, or nothing is registered.
        """

    def submit(self, peer: str, chunk: Chunk) -> Handle:
        """Start one write to the peer. All ids are checked against both memories first.

        May block while it copies a bounded chunk (milliseconds). `poll` reports failures after the start.

        Raises:
            InvalidChunkError: the chunk does not fit; nothing was moved.
            UnknownPeerError: the peer is not connected; nothing was moved.
        """

    def poll(self, handle: Handle) -> Poll:
        """Advance a transfer and return its state; raises nothing.

        While a transfer is PENDING this may sleep for up to 2 ms, so callers may loop without a sleep of their own.
        Other states are final, and the backend then holds nothing for the handle.
        """

    def transport(self, peer: str) -> str:
        """The transport that moves bytes to a connected peer: "tcp", "cma", "rdma", "memory"; "" if unknown.

        Never blocks. Each backend says how it knows.
        """

    def disconnect(self, peer: str) -> None:
        """Forget a peer; no error if it is not connected.

        Pending handles become FAILED_UNSETTLED, or FAILED_SETTLED where nothing had begun. This cancels no transfer
        and is no fence.
        """

    def close(self) -> None:
        """Disconnect all peers and release memory, threads and descriptors. Idempotent; calls after it raise."""


class PromptBackend(TransferBackend, Protocol):
    """A backend that can start small transfers without waiting."""

    def submit_at_once(self, peer: str, chunk: Chunk) -> Handle | None:
        """As `submit` for a chunk of a few KiB, but never blocks, not even on a frozen peer or a busy thread.

        Returns None, and has started nothing, where it would have to wait. The handle may be PENDING.
        """


def prompt_submit(backend: TransferBackend) -> Callable[[str, Chunk], Handle | None] | None:
    """`submit_at_once` of a backend whose own class has it; a wrapper must not pass on that of another."""
    return cast("PromptBackend", backend).submit_at_once if hasattr(type(backend), "submit_at_once") else None

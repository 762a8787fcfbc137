"""What goes into the machines and what comes out: plain data on both sides.

`pages` are int32 page ids as little-endian bytes, opaque here but for their number. `handle` is the number under which
the caller knows a hand-off. Times are seconds on one monotonic clock of the caller's choice.
"""

from dataclasses import dataclass
from enum import StrEnum

from pdpool_connector.protocol.frames import AttemptFrame, AttemptId, Frame
from pdpool_connector.protocol.outcome import Cause, TransferStatus

# --- Events of both sides ---


@dataclass(frozen=True, slots=True)
class PeerReady:
    """A process is paired, or paired again after its connection broke; `version` is what it will be spoken to in."""

    peer: str
    version: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """There is evidence (never mere silence) that a process ended or can no longer be reached."""

    peer: str
    message: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """There is proof that a process can touch no memory of ours any more, nor we its; `proof` says which, for logs."""

    peer: str
    proof: str


@dataclass(frozen=True, slots=True)
class Received:
    """A frame about an attempt came from the paired process `frame.sender`."""

    frame: AttemptFrame


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    """The caller gives a hand-off up. Unknown and ended ones are no error: abort may always be said."""

    handle: int
    message: str
    cause: Cause = Cause.ABORTED


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new work; what is under way goes on."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Fail everything under way, and take no new work."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: `next_deadline` of the machine has been reached."""


# --- Events of prefill ---


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The engine has a request whose cache some decode will ask for. `deadline_s` counts from now."""

    handle: int
    room: int
    sibling: int
    request_id: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SendPages:
    """The engine has computed logical pages `start` onward; `pages` hold them.

    `aux_slot` and `state` (ids of items of the state pool) come with the last send.
    """

    handle: int
    pages: bytes
    start: int
    last: bool
    aux_slot: int | None
    state: bytes = b""


class WriteResult(StrEnum):
    """How a write ended."""

    LANDED = "landed"
    """All of it is in place."""
    STOPPED = "stopped"
    """Cut short on request; nothing is in flight."""
    FAILED = "failed"
    """The engine reported an error; nothing is in flight."""
    INVALID = "invalid"
    """The engine refused indices that lie outside the memory of one side; nothing was written."""
    UNSETTLED = "unsettled"
    """The engine reported an error and cannot say whether bytes are still on their way."""


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """A write that the machine asked for has come to its end."""

    attempt: AttemptId
    write: int
    result: WriteResult
    bytes_moved: int
    message: str = ""


# --- Events of decode ---


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """The engine has memory for the cache of a request. `pages` take logical pages `prefix_pages` onward.

    `state`: ids of the items of its state pool that take the request's state, one for each that prefill will send.
    `handle` grows from attempt to attempt: it becomes the attempt's number.
    """

    handle: int
    prefill: str
    room: int
    sibling: int
    request_id: str
    pages: bytes
    prefix_pages: int
    aux_slot: int
    deadline_s: float
    state: bytes = b""


@dataclass(frozen=True, slots=True)
class Writer:
    """A prefill rank that serves this decode rank, which is part `part` of the `parts` that it serves.

    `writes_aux`: it is the one that writes the aux row here.
    """

    incarnation: str
    part: int = 0
    parts: int = 1
    writes_aux: bool = True


@dataclass(frozen=True, slots=True)
class Linked:
    """Every rank behind the bootstrap address `prefill` that serves this one is paired."""

    prefill: str
    writers: tuple[Writer, ...]


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The bootstrap address `prefill` could not be paired with; whoever waits for it fails."""

    prefill: str
    cause: Cause
    message: str


# --- Effects ---


@dataclass(frozen=True, slots=True)
class Send:
    """Put a frame on the way to a paired process; it may get lost."""

    peer: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class Write:
    """Copy pages `source` (ours) into `target` (the peer's); answer with `WriteEnded`.

    `aux`: our row and the peer's. `state`: our items and the peer's, as many. Both come with the last pages.
    """

    attempt: AttemptId
    write: int
    peer: str
    source: bytes
    target: bytes
    aux: tuple[int, int] | None
    state: tuple[bytes, bytes] = (b"", b"")


@dataclass(frozen=True, slots=True)
class StopWriting:
    """Submit no further chunk of this attempt's writes; each still answers with `WriteEnded` once it is settled."""

    attempt: AttemptId
    peer: str


@dataclass(frozen=True, slots=True)
class Connect:
    """Somebody waits for the bootstrap address `prefill`: answer with `Linked` or `Unreachable`."""

    prefill: str


@dataclass(frozen=True, slots=True)
class Report:
    """The caller's view of a hand-off has changed. `attempts`: those that belong to it as far as is known."""

    handle: int
    status: TransferStatus
    attempts: tuple[AttemptId, ...] = ()


@dataclass(frozen=True, slots=True)
class Ignored:
    """A frame changed nothing; `reason` is one word, fit for a metric's label."""

    reason: str
    detail: str


Event = (
    PeerReady
    | PeerLost
    | Fenced
    | Received
    | AbortTransfer
    | Drain
    | Shutdown
    | Tick
    | OpenRequest
    | SendPages
    | WriteEnded
    | OpenAttempt
    | Linked
    | Unreachable
)
Effect = Send | Write | StopWriting | Connect | Report | Ignored

"""What goes into the machines and what comes out: plain data on both sides.

`pages` are int32 page ids as little-endian bytes, opaque here but for their number. `handle` is the number under which
the caller knows a hand-off. Times are seconds on one monotonic clock of the caller's choice.
"""

from enum import StrEnum

import msgspec

from pdpool_connector.protocol.frames import AttemptFrame, AttemptId, Frame
from pdpool_connector.protocol.status import Cause, TransferStatus


class Plain(msgspec.Struct, frozen=True, gc=False):
    """Base of events and effects: made by the thousand for every request, so cheap to make, and never part of a cycle,
    so that the garbage collector need not look at them."""


# --- Events of both sides ---


class PeerReady(Plain, frozen=True):
    """A process is paired, or paired again after its connection broke; `version` is what it will be spoken to in."""

    peer: str
    version: int


class PeerLost(Plain, frozen=True):
    """There is evidence (never mere silence) that a process ended or can no longer be reached."""

    peer: str
    message: str


class Fenced(Plain, frozen=True):
    """There is proof that a process can touch no memory of ours any more, nor we its; `proof` says which, for logs."""

    peer: str
    proof: str


class Received(Plain, frozen=True):
    """A frame about an attempt came from the paired process `frame.sender`."""

    frame: AttemptFrame


class AbortTransfer(Plain, frozen=True):
    """The caller gives a hand-off up. Unknown and ended ones are no error: abort may always be said."""

    handle: int
    message: str
    cause: Cause = Cause.ABORTED


class Drain(Plain, frozen=True):
    """Take no new work; what is under way goes on."""


class Shutdown(Plain, frozen=True):
    """Fail everything under way, and take no new work."""


class Tick(Plain, frozen=True):
    """Time has passed: `next_deadline` of the machine has been reached."""


# --- Events of prefill ---


class OpenRequest(Plain, frozen=True):
    """The engine has a request whose cache some decode will ask for. `deadline_s` counts from now.

    `prompt`: see `frames.Prompt`. `refused`: why the engine will not serve it, if so: whoever comes for it is told,
    with the cause `refused_as`.
    """

    handle: int
    room: int
    sibling: int
    request_id: str
    deadline_s: float
    prompt: bytes = b""
    refused: str = ""
    refused_as: Cause = Cause.REFUSED


class SendPages(Plain, frozen=True):
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
    """How a write, or a read, ended."""

    LANDED = "landed"
    """All of it is in place."""
    STOPPED = "stopped"
    """Cut short on request; nothing is in flight."""
    FAILED = "failed"
    """The engine reported an error; nothing is in flight."""
    INVALID = "invalid"
    """The engine refused indices that lie outside the memory of one side; nothing was moved."""
    CORRUPT = "corrupt"
    """All of it is in place, and its checksum is not the one that was told; nothing is in flight."""
    UNSETTLED = "unsettled"
    """The engine reported an error and cannot say whether bytes are still on their way."""


class WriteEnded(Plain, frozen=True):
    """A write that the machine asked for has come to its end. `checksum`: of its pages, where they are sampled."""

    attempt: AttemptId
    write: int
    result: WriteResult
    bytes_moved: int
    message: str = ""
    checksum: int | None = None


# --- Events of decode ---


class ReadEnded(Plain, frozen=True):
    """A read that the machine asked for has come to its end."""

    attempt: AttemptId
    read: int
    result: WriteResult
    bytes_moved: int
    message: str = ""


class ExpectAttempt(Plain, frozen=True):
    """The engine has a request that it will open, or refuse, within `deadline_s`: prefill may know.

    `handle` is drawn from the same numbers as those of attempts.
    """

    handle: int
    prefill: str
    room: int
    sibling: int
    request_id: str
    deadline_s: float
    prompt: bytes = b""


class OpenAttempt(Plain, frozen=True):
    """The engine has memory for the cache of a request. `pages` take logical pages `prefix_pages` onward.

    `state`: ids of the items of its state pool that take the request's state, one for each that prefill will send.
    `handle` grows from attempt to attempt: it becomes the attempt's number. `prompt`: see `frames.Prompt`. `refused`:
    why the engine will not take it, if so: then prefill is told that instead of any pages, with cause `refused_as`.
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
    prompt: bytes = b""
    refused: str = ""
    refused_as: Cause = Cause.REFUSED


class Writer(Plain, frozen=True):
    """A prefill rank that serves this decode rank, which is part `part` of the `parts` that it serves.

    `writes_aux`: it is the one whose aux row comes here. In READ the same ranks are read from.
    """

    incarnation: str
    part: int = 0
    parts: int = 1
    writes_aux: bool = True


class Linked(Plain, frozen=True):
    """Every rank behind the bootstrap address `prefill` that serves this one is paired."""

    prefill: str
    writers: tuple[Writer, ...]


class Unlinked(Plain, frozen=True):
    """A connection to a rank behind `prefill` ended: what is opened from now on waits until it is linked again."""

    prefill: str


class Unreachable(Plain, frozen=True):
    """The bootstrap address `prefill` could not be paired with; whoever waits for it fails."""

    prefill: str
    cause: Cause
    message: str


# --- Effects ---


class Send(Plain, frozen=True):
    """Put a frame on the way to a paired process; it may get lost."""

    peer: str
    frame: Frame


class Write(Plain, frozen=True):
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


class StopWriting(Plain, frozen=True):
    """Submit no further chunk of this attempt's writes; each still answers with `WriteEnded` once it is settled."""

    attempt: AttemptId
    peer: str


class Read(Plain, frozen=True):
    """Copy pages `source` (the peer's) into `target` (ours); answer with `ReadEnded`.

    `aux`: the peer's row and ours. `state`: the peer's items and ours, as many. Both come with the last pages.
    `checksum`: what the pages must have once they are here, where the attempt is sampled.
    """

    attempt: AttemptId
    read: int
    peer: str
    source: bytes
    target: bytes
    aux: tuple[int, int] | None
    state: tuple[bytes, bytes] = (b"", b"")
    checksum: int | None = None


class StopReading(Plain, frozen=True):
    """Submit no further chunk of this attempt's reads from `peer`; each still answers with `ReadEnded`."""

    attempt: AttemptId
    peer: str


class Connect(Plain, frozen=True):
    """Somebody waits for the bootstrap address `prefill`: answer with `Linked` or `Unreachable`."""

    prefill: str


class Report(Plain, frozen=True):
    """The caller's view of a hand-off has changed. `attempts`: those that belong to it as far as is known."""

    handle: int
    status: TransferStatus
    attempts: tuple[AttemptId, ...] = ()


class Ignored(Plain, frozen=True):
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
    | ReadEnded
    | ExpectAttempt
    | OpenAttempt
    | Linked
    | Unlinked
    | Unreachable
)
Effect = Send | Write | StopWriting | Read | StopReading | Connect | Report | Ignored

"""What goes into the machines and what comes out: plain data on both sides.

`pages` are int32 page ids as little-endian bytes, opaque here but for their number. `handle` is the number under which
the caller knows a hand-off. Times are seconds on one monotonic clock of the caller's choice.
"""

from enum import StrEnum

import msgspec

from pdpool_connector.protocol.frames import AttemptFrame, AttemptId, Frame
from pdpool_connector.protocol.status import Cause, TransferStatus


class Plain(msgspec.Struct, frozen=True, gc=False):
    """Base of events and effects.

    Each request makes thousands of them, so they are cheap to make. None is part of a reference cycle, so the garbage
    collector does not track them.
    """


# --- Events of both sides ---


class PeerReady(Plain, frozen=True):
    """A process is paired, or paired again after its connection broke. `version`: of the protocol, for our frames."""

    peer: str
    version: int


class PeerLost(Plain, frozen=True):
    """There is evidence (never mere silence) that a process ended or can no longer be reached."""

    peer: str
    message: str


class Fenced(Plain, frozen=True):
    """A proof shows that we and a process can no longer access each other's memory. `proof` names it, for logs."""

    peer: str
    proof: str


class Received(Plain, frozen=True):
    """A frame about an attempt came from the paired process `frame.sender`."""

    frame: AttemptFrame


class AbortTransfer(Plain, frozen=True):
    """The caller aborts a hand-off. It may do so at any time: for an unknown or ended one nothing happens."""

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
    """The engine has a request whose cache some decode will take. `deadline_s` counts from now.

    `prompt`: see `frames.Prompt`.
    """

    handle: int
    room: int
    request_id: str
    deadline_s: float
    prompt: bytes = b""


class SendPages(Plain, frozen=True):
    """The engine has computed logical pages `start` onward; `pages` hold them.

    `aux_slot` and `state` come with the last send. `state`: one list of item ids for each state pool, in the order of
    the memory's pools; () where there are no state pools.
    """

    handle: int
    pages: bytes
    start: int
    last: bool
    aux_slot: int | None
    state: tuple[bytes, ...] = ()


class EngineRan(Plain, frozen=True):
    """For how long the loop of prefill's engine was seen running since the connector's start, in seconds.

    A pause of the loop counts 1 s at most: in a long step the engine takes no requests in.
    """

    total_s: float


class WriteResult(StrEnum):
    """How a write ended."""

    LANDED = "landed"
    """All of it is in place."""
    STOPPED = "stopped"
    """Cut short on request; nothing is in flight."""
    FAILED = "failed"
    """The transfer backend reported an error; nothing is in flight."""
    INVALID = "invalid"
    """The transfer backend refused ids that lie outside the memory of one side; nothing was moved."""
    UNSETTLED = "unsettled"
    """The transfer backend reported an error and cannot say whether bytes are still in flight."""


class WriteEnded(Plain, frozen=True):
    """A write that the machine asked for has ended. `checksum`: of its pages, where they are sampled."""

    attempt: AttemptId
    write: int
    result: WriteResult
    bytes_moved: int
    message: str = ""
    checksum: int | None = None


# --- Events of decode ---


class OpenAttempt(Plain, frozen=True):
    """The engine has a request whose cache it will take from the prefill behind the bootstrap address `prefill`.

    There may be no memory for it yet: `OfferPages` follows. `handle` grows from attempt to attempt: it becomes the
    attempt's number. `prompt`: see `frames.Prompt`.
    """

    handle: int
    prefill: str
    room: int
    request_id: str
    deadline_s: float
    prompt: bytes = b""


class OfferPages(Plain, frozen=True):
    """The engine has memory for an attempt: `pages` take logical pages `prefix_pages` onward. Once for each attempt.

    `state`: one list of item ids for each state pool, as many ids as prefill will send. `aux_slot`: the aux row; None
    where the memory has no aux rows.
    """

    handle: int
    pages: bytes
    prefix_pages: int = 0
    aux_slot: int | None = None
    state: tuple[bytes, ...] = ()


class Writer(Plain, frozen=True):
    """A prefill rank that writes to this decode rank, which is number `rank_index` of the `rank_count` it writes to.

    `writes_aux`: it is the one that writes our aux row.
    """

    incarnation: str
    rank_index: int = 0
    rank_count: int = 1
    writes_aux: bool = True


class Linked(Plain, frozen=True):
    """Every rank behind the bootstrap address `prefill` that writes to this one is paired."""

    prefill: str
    writers: tuple[Writer, ...]


class Unlinked(Plain, frozen=True):
    """A connection to a rank behind `prefill` ended: attempts opened from now on wait until it is linked again."""

    prefill: str


class Unreachable(Plain, frozen=True):
    """The bootstrap address `prefill` could not be paired with; attempts that wait for it fail."""

    prefill: str
    cause: Cause
    message: str


# --- Effects ---


class Send(Plain, frozen=True):
    """Send a frame to a paired process; it may get lost."""

    peer: str
    frame: Frame


class Write(Plain, frozen=True):
    """Copy pages `source` (ours) into `target` (the peer's); answer with `WriteEnded`.

    `aux`: our row and the peer's. `state`: for each state pool our item ids and the peer's, as many. Both come with the
    last pages.
    """

    attempt: AttemptId
    write: int
    peer: str
    source: bytes
    target: bytes
    aux: tuple[int, int] | None
    state: tuple[tuple[bytes, bytes], ...] = ()


class StopWriting(Plain, frozen=True):
    """Submit no further chunk of this attempt's writes; each still answers with `WriteEnded` once it is settled."""

    attempt: AttemptId
    peer: str


class Connect(Plain, frozen=True):
    """Attempts wait for the bootstrap address `prefill`: answer with `Linked` or `Unreachable`."""

    prefill: str


class Report(Plain, frozen=True):
    """The status of a hand-off has changed. `attempts`: those that belong to it as far as is known."""

    handle: int
    status: TransferStatus
    attempts: tuple[AttemptId, ...] = ()


class Ignored(Plain, frozen=True):
    """A frame or another event changed nothing; `reason` is one word, fit for a metric's label."""

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
    | EngineRan
    | WriteEnded
    | OpenAttempt
    | OfferPages
    | Linked
    | Unlinked
    | Unreachable
)
Effect = Send | Write | StopWriting | Connect | Report | Ignored

"""The frames of the control channel: typed, tagged, versioned, bounded, and refused whole when anything is off.

A frame is one msgpack array (msgspec `array_like`), tag first, so that a later version may append fields with defaults
and an older one ignores them. Times on the wire are durations, never clock readings: the two sides share no clock.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final

import msgspec

VERSION_MIN = 1
VERSION_MAX = 4
"""Versions of this protocol that this code speaks; pairing settles on the highest that both sides know."""
BATCH_VERSION = 2
"""First version that knows `Batch`; to older peers every frame goes alone."""
EXPECT_VERSION = 3
"""First version that knows `Expect`; older prefills are not told, and go on without the hint."""

MAX_IDS: Final = 2**19
"""Most ids of pages, or of state items, in one frame. A request of 2**20 tokens in pages of 16 offers 2**16."""
PAGE_ID_BYTES = 4
MAX_FRAME_BYTES = 2 * MAX_IDS * PAGE_ID_BYTES + 16 * 1024
"""Largest frame that is looked at: both lists of ids, and whatever else it says."""

Incarnation = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
"""Random 128-bit id of one life of one process, in hex."""
Named = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
"""An incarnation in a frame. That it is hex is checked in `Hello`, by which a process becomes known: other frames must
name a known one to have any effect, and a pattern costs more than all their other checks together."""
_HEX = re.compile("[0-9a-f]{32}")
ROOMS: Final = 2**63
Room = Annotated[int, msgspec.Meta(ge=0, le=ROOMS - 1)]
INDICES: Final = 2**31
"""Page numbers, slots and siblings are int32."""
Index = Annotated[int, msgspec.Meta(ge=0, lt=INDICES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
MAX_SECONDS: Final = 86400
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
MAX_TEXT = 1024
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
MAX_REQUEST_ID: Final = 256
RequestId = Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID)]
Pages = Annotated[bytes, msgspec.Meta(max_length=MAX_IDS * PAGE_ID_BYTES)]
"""Page ids (or ids of state items) as int32, little endian; opaque to the protocol but for their number."""
NO_AUX = -1
AuxSlot = Annotated[int, msgspec.Meta(ge=NO_AUX, lt=INDICES)]
"""Index of a row of the aux region; NO_AUX where the row is not asked of this rank."""
PROMPT_BYTES = 16
Prompt = Annotated[bytes, msgspec.Meta(max_length=PROMPT_BYTES)]
"""A digest of what the request's cache is computed from, the same on both sides; empty where it is not told."""
Parts = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""How many ranks of decode one rank of prefill serves; larger instances than this are not known to exist."""


def is_incarnation(name: str) -> bool:
    """Whether a process can be called so."""
    return _HEX.fullmatch(name) is not None


def text(message: str) -> str:
    """As much of a message as a frame carries, in one line: what cannot be shown is escaped.

    It goes into logs, terminals and answers, and may be a peer's.
    """
    return shown(message[:MAX_TEXT])[:MAX_TEXT]


def shown(words: str) -> str:
    """Somebody's words, of any length, as part of one line: what would end it, or steer a terminal, is escaped."""
    if words.isprintable():
        return words
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)


class AttemptId(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One try at one room: unique for ever, because `decode` is one life of one process and `number` its counter."""

    decode: Named
    number: Count

    def __str__(self) -> str:
        """Short form for messages and logs: enough of the incarnation to tell processes apart."""
        return f"{self.decode[:8]}/{self.number}"


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True, gc=False):
    """What every frame carries: protocol version, and the process that speaks."""

    version: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    sender: Named


class Hello(Frame, frozen=True, kw_only=True):
    """Decode asks for pairing: versions it speaks, its memory, and what must match (opaque, judged by `layout`).

    `kv`: the sender wants the cells that both hold from this prefill rank, and not from a replica of it. `state`: it
    wants what both hold of the shares of cut state (since version 4).
    """

    oldest_version: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    address: Annotated[str, msgspec.Meta(max_length=256)]
    memory: Annotated[bytes, msgspec.Meta(max_length=2**21)]
    kv: bool = True
    state: bool = False


class HelloOk(Frame, frozen=True, kw_only=True):
    """Prefill accepts; `version` is the one both will speak. Sent once its engine has reached decode's memory."""

    memory: Annotated[bytes, msgspec.Meta(max_length=2**21)]


class HelloRefused(Frame, frozen=True, kw_only=True):
    """Prefill will not pair; `reason` names the field and both values. `retry` tells whether later may differ."""

    reason: Text
    retry: bool


class Goodbye(Frame, frozen=True, kw_only=True):
    """The sender's connector closes: what it still had with this peer has been told attempt by attempt."""

    reason: Text


class AttemptFrame(Frame, frozen=True, kw_only=True):
    """What every frame about an attempt carries. `room` and `sibling` are repeated so that a mix-up is noticed."""

    attempt: AttemptId
    room: Room
    sibling: Index


class Open(AttemptFrame, frozen=True, kw_only=True):
    """Decode offers memory: `pages` take logical pages `prefix_pages` onward, `aux_slot` takes the aux row.

    `deadline_s`: what is left of the attempt's life. `part`: index of this decode rank among the `parts` that ask the
    same prefill rank for the same request; all of them give the same `request_id`. `state`: ids of the items of the
    state pool that take what the request keeps beside pages. `prompt`: only halves of the same prompt meet. Repeated
    until answered.
    """

    request_id: RequestId
    pages: Pages
    prefix_pages: Index
    aux_slot: AuxSlot
    deadline_s: Seconds
    part: Index = 0
    parts: Parts = 1
    state: Pages = b""
    prompt: Prompt = b""

    @property
    def id_bytes(self) -> int:
        """Length of both lists of ids."""
        return len(self.pages) + len(self.state)


class Expect(AttemptFrame, frozen=True, kw_only=True):
    """Decode's engine has a request that it has not opened yet: a hint, repeated every few seconds while that is so.

    `attempt`: a number of its own; the attempt that opens the request has a later one. `deadline_s`: what is left of
    the request's life. The other fields are those that its `Open` will have.
    """

    request_id: RequestId
    deadline_s: Seconds
    part: Index = 0
    parts: Parts = 1
    prompt: Prompt = b""


class Accepted(AttemptFrame, frozen=True, kw_only=True):
    """Prefill knows the attempt and will serve it, now or when its own request arrives."""


class Sending(AttemptFrame, frozen=True, kw_only=True):
    """Prefill has begun to write, and the last send is still to come; hand-offs of one send go without this frame."""


class Computed(AttemptFrame, frozen=True, kw_only=True):
    """READ: prefill has computed logical pages `start` onward, and decode may read them from its `pages`.

    `sequence` counts the frames of this kind from 0; none is taken before those that precede it. `aux_slot` and `state`
    (items of prefill's state pool) come with the `last`. Repeated until decode says `Fetching`, or that it has ended.
    `checksum`: of these pages, where this attempt is among those that are sampled (`layout.checksum`).
    """

    sequence: Index
    start: Index
    pages: Pages
    last: bool
    aux_slot: AuxSlot
    state: Pages
    checksum: Count | None = None


class Fetching(AttemptFrame, frozen=True, kw_only=True):
    """READ: decode has taken note of the first `taken` frames `Computed`; said when one is repeated, and when asked."""

    taken: Index


class Done(AttemptFrame, frozen=True, kw_only=True):
    """The mover has moved everything: all of it has landed, it moves no more. Repeated until acknowledged.

    The mover is prefill in WRITE, decode in READ. `checksum`: of the pages that prefill wrote, where this attempt is
    among those that are sampled (`layout.checksum`).
    """

    bytes_moved: Count
    checksum: Count | None = None


class Failed(AttemptFrame, frozen=True, kw_only=True):
    """The attempt has failed at the mover, and some is still in flight: `Drained` follows. Repeated until then."""

    cause: Text
    message: Text


class Drained(AttemptFrame, frozen=True, kw_only=True):
    """The attempt has failed, and the sender moves nothing of it: nothing is in flight. Repeated until acknowledged.

    In READ prefill says so, too, of an attempt that it ends before it has told decode of any pages. `request_id`,
    `part`, `parts` and `prompt` are decode's, for a prefill that has not seen the attempt: they tell which of its
    requests ends.
    """

    cause: Text
    message: Text
    request_id: RequestId = ""
    part: Index = 0
    parts: Parts = 1
    prompt: Prompt = b""


class Ack(AttemptFrame, frozen=True, kw_only=True):
    """The sender has taken note of `Done` or `Drained` and has nothing more to say about this attempt."""


class Abort(AttemptFrame, frozen=True, kw_only=True):
    """The side that does not move gives up. Repeated until the mover has said `Drained` (or `Done`).

    `request_id`, `part`, `parts` and `prompt` tell a prefill that has not seen the attempt which of its requests ends.
    """

    request_id: RequestId
    cause: Text
    message: Text
    part: Index = 0
    parts: Parts = 1
    prompt: Prompt = b""


class Query(AttemptFrame, frozen=True, kw_only=True):
    """The sender asks how the attempt stands; the answer is whichever frame would say so."""


AnyAttemptFrame = (
    Open | Expect | Accepted | Sending | Computed | Fetching | Done | Failed | Drained | Ack | Abort | Query
)
MAX_BATCH: Final = 64
MAX_BATCHED_BYTES: Final = 16 * 1024
"""Ids in an `Open` or a `Computed` that still travels with others, so that no batch comes near `MAX_FRAME_BYTES`."""


class Batch(Frame, frozen=True, kw_only=True):
    """Frames about attempts, in order, that are ready at the same moment: one message instead of many."""

    frames: Annotated[tuple[AnyAttemptFrame, ...], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]


SingleFrame = Hello | HelloOk | HelloRefused | Goodbye | AnyAttemptFrame
AnyFrame = SingleFrame | Batch
_encode: Callable[[Frame], bytes] = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(AnyFrame)


class MalformedFrameError(Exception):
    """Bytes that are no frame of this protocol. `reason` is one word, fit for a metric's label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def encode(frame: Frame) -> bytes:
    """Return the frame as bytes."""
    return _encode(frame)


def decode(data: bytes) -> AnyFrame:
    """Return the frame that `data` holds, every field checked. Raises MalformedFrameError, and nothing else."""
    if len(data) > MAX_FRAME_BYTES:
        raise MalformedFrameError("oversized", f"{len(data)} bytes, at most {MAX_FRAME_BYTES} are read")
    try:
        frame: AnyFrame = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrameError("malformed", str(error)) from None
    if isinstance(frame, Hello):
        if not is_incarnation(frame.sender):
            raise MalformedFrameError("malformed", f"sender {frame.sender!r} is not hex")
        if not frame.address.isprintable():
            raise MalformedFrameError("malformed", f"address {frame.address!r} cannot be shown")
        return frame  # its versions are negotiated
    for single in frame.frames if isinstance(frame, Batch) else (frame,):
        if not VERSION_MIN <= single.version <= VERSION_MAX:
            detail = f"version {single.version}, this side speaks {VERSION_MIN} to {VERSION_MAX}"
            raise MalformedFrameError("version", detail)
        if isinstance(single, Open | Computed):
            _check_ids("pages", single.pages)
            _check_ids("state", single.state)
        elif isinstance(single, Expect | Abort | Drained) and single.part >= single.parts:
            detail = f"part is {single.part} of parts {single.parts}: it must be less than parts"
            raise MalformedFrameError("malformed", detail)
    return frame


def _check_ids(field: str, ids: bytes) -> None:
    if len(ids) % PAGE_ID_BYTES:
        raise MalformedFrameError("malformed", f"{len(ids)} bytes of {field} are no whole number of ids")


def batches(frames: Sequence[Frame]) -> Iterator[Frame]:
    """The messages that carry `frames` to one peer, in order: batches where the peer knows them and sizes allow it."""
    together: list[Frame] = []
    for frame in frames:
        fits = (
            isinstance(frame, AttemptFrame)
            and frame.version >= BATCH_VERSION
            and not (isinstance(frame, Open | Computed) and len(frame.pages) + len(frame.state) > MAX_BATCHED_BYTES)
        )
        if not fits or len(together) == MAX_BATCH:
            yield from _joined(together)
            together = []
        if fits:
            together.append(frame)
        else:
            yield frame
    yield from _joined(together)


def _joined(frames: Sequence[Frame]) -> Sequence[Frame]:
    if len(frames) < 2:
        return frames
    return (Batch(version=frames[0].version, sender=frames[0].sender, frames=tuple(frames)),)  # type: ignore[arg-type]

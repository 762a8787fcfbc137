"""The frames of the control channel: typed, tagged, versioned, bounded, and refused whole when anything is off.

A frame is one msgpack array (msgspec `array_like`), tag first. So a later version may append fields with defaults, and
an older one ignores them. Times on the wire are durations, never clock readings: the two sides share no clock.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final

import msgspec

VERSION_MIN = 1
VERSION_MAX = 1
"""Versions of this protocol that this code speaks; pairing settles on the highest that both sides know."""

MAX_IDS: Final = 2**19
"""Most ids of pages, or of state items, in one frame. A request of 2**20 tokens in pages of 16 offers 2**16."""
PAGE_ID_BYTES = 4
MAX_FRAME_BYTES = 2 * MAX_IDS * PAGE_ID_BYTES + 16 * 1024
"""Largest frame that is read: as many ids of pages and of state items together as two full lists, and the rest."""

Incarnation = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
"""Random 128-bit id of one life of one process, in hex."""
Named = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
"""An incarnation in a frame. Only `Hello`, which makes a process known, is checked for hex digits. Other frames have
no effect unless they name a known process, and a pattern costs more than all their other checks together."""
_HEX = re.compile("[0-9a-f]{32}")
ROOMS: Final = 2**63
Room = Annotated[int, msgspec.Meta(ge=0, le=ROOMS - 1)]
INDICES: Final = 2**31
"""Page numbers and slots are int32."""
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
"""A digest of what the request's cache is computed from, the same on both sides. Empty where the engine gives none."""
RankCount = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""How many ranks of decode one rank of prefill writes to; larger instances than this are not known to exist."""
MAX_STATE_LISTS: Final = 16
"""Leaves room above `layout.memory.MAX_STATE_POOLS`, so that a later version may raise that."""
States = Annotated[tuple[Pages, ...], msgspec.Meta(max_length=MAX_STATE_LISTS)]
"""Item ids of each state pool."""


def is_incarnation(name: str) -> bool:
    """Whether a process can be called so."""
    return _HEX.fullmatch(name) is not None


def text(message: str) -> str:
    """As much of a message as a frame carries, in one line, with unprintable characters escaped.

    It goes into logs, terminals and answers, and may be a peer's.
    """
    return shown(message[:MAX_TEXT])[:MAX_TEXT]


def shown(words: str) -> str:
    """Foreign text of any length as part of one line. Line breaks and terminal control characters are escaped."""
    if words.isprintable():
        return words
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)


class AttemptId(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One try at one room: unique for ever, because `decode` is one life of one process and `number` its counter."""

    decode: Named
    number: Count

    def __str__(self) -> str:
        """Short form for messages and logs: enough of the incarnation to distinguish processes."""
        return f"{self.decode[:8]}/{self.number}"


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True, gc=False):
    """What every frame carries: protocol version, and the process that sends it."""

    version: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    sender: Named


class Hello(Frame, frozen=True, kw_only=True):
    """Decode asks for pairing: versions it speaks, its memory, and what must match (opaque, judged by `layout`).

    `kv`: the sender wants the cells that both hold from this prefill rank, and not from a replica of it. `state`: it
    wants what both hold of the shares of cut state.
    """

    oldest_version: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    address: Annotated[str, msgspec.Meta(max_length=256)]
    memory: Annotated[bytes, msgspec.Meta(max_length=2**21)]
    kv: bool = True
    state: bool = False


class HelloOk(Frame, frozen=True, kw_only=True):
    """Prefill accepts; `version` is the one both use. Sent once its transfer backend has reached decode's memory."""

    memory: Annotated[bytes, msgspec.Meta(max_length=2**21)]


class HelloRefused(Frame, frozen=True, kw_only=True):
    """Prefill will not pair; `reason` names the field and both values. `retry`: whether a later try may succeed."""

    reason: Text
    retry: bool


class Goodbye(Frame, frozen=True, kw_only=True):
    """The sender's connector closes. It has sent the end of each attempt with this peer before."""

    reason: Text


class AttemptFrame(Frame, frozen=True, kw_only=True):
    """What every frame about an attempt carries. `room` is repeated so that a mix-up is noticed."""

    attempt: AttemptId
    room: Room


class RequestFrame(AttemptFrame, frozen=True, kw_only=True):
    """A frame that names the request of an attempt, so that prefill can match an attempt that it does not know.

    `request_id`: the same from all ranks of one decode instance. `rank_index`: this decode rank among the `rank_count`
    ranks that the same prefill rank writes to for this request. `prompt`: only halves of the same prompt match.
    """

    request_id: RequestId
    rank_index: Index = 0
    rank_count: RankCount = 1
    prompt: Prompt = b""


class Open(RequestFrame, frozen=True, kw_only=True):
    """Decode's engine has the request; there may be no memory for it yet. Repeated until answered.

    `deadline_s`: what is left of the attempt's life.
    """

    deadline_s: Seconds


class Offer(AttemptFrame, frozen=True, kw_only=True):
    """Decode offers memory: `pages` take logical pages `prefix_pages` onward, `aux_slot` takes the aux row.

    `state`: for each state pool the ids of the items that take the request's state. Sent after `Open`, on the same
    connection; repeated until answered.
    """

    pages: Pages
    prefix_pages: Index
    aux_slot: AuxSlot
    state: States = ()

    @property
    def id_bytes(self) -> int:
        """Length of all lists of ids."""
        return len(self.pages) + sum(map(len, self.state))


class Accepted(AttemptFrame, frozen=True, kw_only=True):
    """Prefill knows the attempt and will serve it. Sent when decode repeats a frame, asks, or is paired again.

    `offered`: prefill knows the memory as well.
    """

    offered: bool = False


class Ended(AttemptFrame, frozen=True, kw_only=True):
    """The attempt has ended at prefill. Repeated until acknowledged, or, while not `settled`, until it is.

    `cause`: empty when everything has landed, else the cause of the failure. `settled`: nothing is in flight; False
    only for failures. `checksum`: of the pages that were written, where this attempt is sampled (`layout.checksum`).
    """

    cause: Text
    settled: bool
    message: Text = ""
    bytes_moved: Count = 0
    checksum: Count | None = None


class Ack(AttemptFrame, frozen=True, kw_only=True):
    """Decode has received a settled `Ended`, and sends nothing more about this attempt."""


class Abort(RequestFrame, frozen=True, kw_only=True):
    """Decode gives up. Repeated until prefill has sent a settled `Ended`."""

    cause: Text
    message: Text


class Query(AttemptFrame, frozen=True, kw_only=True):
    """Decode asks for the state of the attempt. Prefill answers with the frame that reports this state."""


AnyAttemptFrame = Open | Offer | Accepted | Ended | Ack | Abort | Query
MAX_BATCH: Final = 64
MAX_BATCHED_BYTES: Final = 16 * 1024
"""Ids in an `Offer` that still travels with others, so that no batch comes near `MAX_FRAME_BYTES`."""


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
        if isinstance(single, Offer):
            _check_ids("pages", single.pages)
            for ids in single.state:
                _check_ids("state", ids)
        elif isinstance(single, RequestFrame) and single.rank_index >= single.rank_count:
            detail = f"rank_index is {single.rank_index} of {single.rank_count}: it must be less than rank_count"
            raise MalformedFrameError("malformed", detail)
    return frame


def _check_ids(field: str, ids: bytes) -> None:
    if len(ids) % PAGE_ID_BYTES:
        raise MalformedFrameError("malformed", f"{len(ids)} bytes of {field} are no whole number of ids")


def batches(frames: Sequence[Frame]) -> Iterator[Frame]:
    """The messages that carry `frames` to one peer, in order: batches where the peer knows them and sizes allow it."""
    together: list[Frame] = []
    for frame in frames:
        large = isinstance(frame, Offer) and frame.id_bytes > MAX_BATCHED_BYTES
        fits = isinstance(frame, AttemptFrame) and not large
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

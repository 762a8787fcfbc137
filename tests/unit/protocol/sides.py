"""Both machines under hand: events in, effects out, and short words for what tests say again and again."""

from dataclasses import dataclass, field

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.decode_read import DecodeReadMachine
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Effect,
    Event,
    Linked,
    OpenAttempt,
    OpenRequest,
    PeerReady,
    Read,
    ReadEnded,
    Received,
    Report,
    Send,
    SendPages,
    Tick,
    Write,
    WriteEnded,
    Writer,
    WriteResult,
)
from pdpool_connector.protocol.meeting import MeetingMachine
from pdpool_connector.protocol.opening import OpeningMachine
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.prefill_read import PrefillReadMachine
from pdpool_connector.protocol.status import TransferStatus
from pdpool_connector.protocol.timeouts import Timeouts

PREFILL = "a" * 32
PREFILL_2 = "c" * 32
DECODE = "d" * 32
DECODE_2 = "e" * 32
TIMING = Timeouts(drain_s=5.0, retry_first_s=0.1, retry_max_s=2.0, query_s=3.0, verdict_s=60.0, acked_s=10.0)


def ids(*pages: int) -> bytes:
    return b"".join(page.to_bytes(4, "little") for page in pages)


@dataclass
class Side:
    """One machine, its clock, and what it has said so far."""

    machine: MeetingMachine | OpeningMachine
    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)
    status: dict[int, TransferStatus] = field(default_factory=dict)

    def do(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        self.effects += effects
        self.status |= {effect.handle: effect.status for effect in effects if isinstance(effect, Report)}
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, firing each deadline when it is due."""
        end, effects = self.now + seconds, []
        while (due := self.machine.next_deadline) is not None and due <= end:
            self.now = max(self.now, due)
            effects += self.do(Tick())
        self.now = end
        return effects

    def hear(self, frame: f.Frame) -> list[Effect]:
        return self.do(Received(f.decode(f.encode(frame))))

    def abort(self, handle: int = 1, message: str = "") -> list[Effect]:
        return self.do(AbortTransfer(handle, message))


def sent(effects: list[Effect], kind: type[f.Frame] | None = None) -> list[f.Frame]:
    return [e.frame for e in effects if isinstance(e, Send) and (kind is None or isinstance(e.frame, kind))]


def names(effects: list[Effect]) -> list[str]:
    return [type(frame).__name__ for frame in sent(effects)]


def reads(effects: list[Effect]) -> list[Read]:
    return [effect for effect in effects if isinstance(effect, Read)]


def writes(effects: list[Effect]) -> list[Write]:
    return [effect for effect in effects if isinstance(effect, Write)]


class Prefill(Side):
    make: type[MeetingMachine] = PrefillMachine

    def __init__(self, timing: Timeouts = TIMING, *peers: str) -> None:
        super().__init__(self.make(PREFILL, timing))
        for peer in peers or (DECODE,):
            self.do(PeerReady(peer, f.VERSION_MAX))

    def request(
        self,
        handle: int = 1,
        *,
        room: int = 7,
        sibling: int = 0,
        rid: str = "r",
        deadline_s: float = 30.0,
        prompt: bytes = b"",
    ):
        return self.do(OpenRequest(handle, room, sibling, rid, deadline_s, prompt))

    def opened(self, number: int = 1, *, peer: str = DECODE, **changes: object) -> list[Effect]:
        return self.hear(open_frame(number, peer=peer, **changes))

    def send(
        self, handle: int = 1, pages=(4, 5), *, start: int = 0, last: bool = True, aux_slot: int | None = 2, state=()
    ):
        return self.do(SendPages(handle, ids(*pages), start, last, aux_slot if last else None, ids(*state)))

    def landed(self, write: Write, result: WriteResult = WriteResult.LANDED, message: str = "") -> list[Effect]:
        return self.do(WriteEnded(write.attempt, write.write, result, len(write.source), message))


class PrefillRead(Prefill):
    make = PrefillReadMachine


class Decode(Side):
    make: type[OpeningMachine] = DecodeMachine

    def __init__(
        self, timing: Timeouts = TIMING, writers: tuple[str | Writer, ...] = (PREFILL,), *, linked: bool = True
    ):
        super().__init__(self.make(DECODE, timing))
        self.writers = tuple(
            one if isinstance(one, Writer) else Writer(one, writes_aux=at == 0) for at, one in enumerate(writers)
        )
        if linked:
            self.link()

    def link(self) -> list[Effect]:
        for writer in self.writers:
            self.do(PeerReady(writer.incarnation, f.VERSION_MAX))
        return self.do(Linked("p:1", self.writers))

    def open(
        self,
        handle: int = 1,
        *,
        room: int = 7,
        rid: str = "r",
        pages=(8, 9),
        prefix: int = 0,
        deadline_s=30.0,
        state=(),
        prompt: bytes = b"",
    ):
        items = ids(*state)
        return self.do(OpenAttempt(handle, "p:1", room, 0, rid, ids(*pages), prefix, 3, deadline_s, items, prompt))


class DecodeRead(Decode):
    make = DecodeReadMachine

    def landed(self, read: Read, result: WriteResult = WriteResult.LANDED, message: str = "") -> list[Effect]:
        return self.do(ReadEnded(read.attempt, read.read, result, len(read.source), message))


def about(number: int = 1, *, sender: str = DECODE, room: int = 7, sibling: int = 0) -> dict[str, object]:
    """Header of a frame about one of DECODE's attempts."""
    decode = sender if sender in (DECODE, DECODE_2) else DECODE
    return {
        "version": f.VERSION_MAX,
        "sender": sender,
        "attempt": f.AttemptId(decode, number),
        "room": room,
        "sibling": sibling,
    }


def open_frame(number: int = 1, *, peer: str = DECODE, room: int = 7, sibling: int = 0, **changes: object) -> f.Open:
    fields: dict[str, object] = {
        "request_id": "r",
        "pages": ids(8, 9),
        "prefix_pages": 0,
        "aux_slot": 3,
        "deadline_s": 30.0,
    }
    return f.Open(**(about(number, sender=peer, room=room, sibling=sibling) | fields | changes))


def abort_frame(number: int = 1, *, rid: str = "r", part: int = 0, parts: int = 1, **header: object) -> f.Abort:
    said = {"request_id": rid, "cause": "aborted", "message": "client left", "part": part, "parts": parts}
    return f.Abort(**about(number, **header), **said)


def ack(number: int = 1, **header: object) -> f.Ack:
    return f.Ack(**about(number, **header))


def query(number: int = 1) -> f.Query:
    return f.Query(**about(number))

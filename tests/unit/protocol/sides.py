"""Both machines under test: events in, effects out, and short helpers for what tests repeat."""

from dataclasses import dataclass, field

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Effect,
    Event,
    Ignored,
    Linked,
    OfferPages,
    OpenAttempt,
    OpenRequest,
    PeerReady,
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
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.status import JUST_OPENED, TransferStatus
from pdpool_connector.protocol.timeouts import Timeouts

PREFILL = "a" * 32
PREFILL_2 = "c" * 32
DECODE = "d" * 32
DECODE_2 = "e" * 32
TIMEOUTS = Timeouts(
    match_s=15.0, quiesce_s=5.0, retry_first_s=0.1, retry_max_s=2.0, query_s=3.0, result_s=60.0, acked_s=10.0
)


def ids(*pages: int) -> bytes:
    return b"".join(page.to_bytes(4, "little") for page in pages)


@dataclass
class Side:
    """One machine, its clock, and all effects so far."""

    machine: PrefillMachine | DecodeMachine
    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)
    status: dict[int, TransferStatus] = field(default_factory=dict)

    def do(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        self.effects += effects
        if isinstance(event, OpenRequest | OpenAttempt):
            self.status[event.handle] = JUST_OPENED
        self.status |= {effect.handle: effect.status for effect in effects if isinstance(effect, Report)}
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with a tick at each deadline."""
        end, effects = self.now + seconds, []
        while (due := self.machine.next_deadline) is not None and due <= end:
            self.now = max(self.now, due)
            effects += self.do(Tick())
        self.now = end
        return effects

    def receive(self, frame: f.Frame) -> list[Effect]:
        return self.do(Received(f.decode(f.encode(frame))))

    def abort(self, handle: int = 1, message: str = "") -> list[Effect]:
        return self.do(AbortTransfer(handle, message))


def sent(effects: list[Effect], kind: type[f.Frame] | None = None) -> list[f.Frame]:
    return [e.frame for e in effects if isinstance(e, Send) and (kind is None or isinstance(e.frame, kind))]


def names(effects: list[Effect]) -> list[str]:
    """The frames that were sent, by type, with the fields that matter most."""
    return [_name(frame) for frame in sent(effects)]


def _name(frame: f.Frame) -> str:
    if isinstance(frame, f.Accepted):
        return "Accepted+" if frame.offered else "Accepted"
    if isinstance(frame, f.Ended):
        return f"Ended({frame.cause or 'done'})" if frame.settled else f"Ended({frame.cause}, unsettled)"
    return type(frame).__name__


def ignored(effects: list[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Ignored)]


def writes(effects: list[Effect]) -> list[Write]:
    return [effect for effect in effects if isinstance(effect, Write)]


class Prefill(Side):
    def __init__(self, timeouts: Timeouts = TIMEOUTS, *peers: str) -> None:
        super().__init__(PrefillMachine(PREFILL, timeouts))
        for peer in peers or (DECODE,):
            self.do(PeerReady(peer, f.VERSION_MAX))

    def request(
        self, handle: int = 1, *, room: int = 7, rid: str = "r", deadline_s: float = 30.0, prompt: bytes = b""
    ) -> list[Effect]:
        return self.do(OpenRequest(handle, room, rid, deadline_s, prompt))

    def opened(self, number: int = 1, **fields: object) -> list[Effect]:
        return self.receive(open_frame(number, **fields))

    def offered(self, number: int = 1, **fields: object) -> list[Effect]:
        return self.receive(offer_frame(number, **fields))

    def attempt(self, number: int = 1, *, peer: str = DECODE, room: int = 7, **fields: object) -> list[Effect]:
        """An attempt, and its memory right after it."""
        return self.opened(number, peer=peer, room=room, **fields) + self.offered(number, peer=peer, room=room)

    def send(
        self, handle: int = 1, pages=(4, 5), *, start: int = 0, last: bool = True, aux_slot: int | None = 2, state=()
    ) -> list[Effect]:
        """Pages of the engine. `state`: ids for each state pool."""
        pools = tuple(ids(*pool) for pool in state)
        return self.do(SendPages(handle, ids(*pages), start, last, aux_slot if last else None, pools))

    def landed(self, write: Write, result: WriteResult = WriteResult.LANDED, message: str = "") -> list[Effect]:
        return self.do(WriteEnded(write.attempt, write.write, result, len(write.source), message))


class Decode(Side):
    def __init__(
        self, timeouts: Timeouts = TIMEOUTS, writers: tuple[str | Writer, ...] = (PREFILL,), *, linked: bool = True
    ):
        super().__init__(DecodeMachine(DECODE, timeouts))
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
        self, handle: int = 1, *, room: int = 7, rid: str = "r", deadline_s: float = 30.0, prompt: bytes = b""
    ) -> list[Effect]:
        return self.do(OpenAttempt(handle, "p:1", room, rid, deadline_s, prompt))

    def offer(
        self, handle: int = 1, pages=(8, 9), *, prefix: int = 0, aux_slot: int | None = 3, state=()
    ) -> list[Effect]:
        return self.do(OfferPages(handle, ids(*pages), prefix, aux_slot, tuple(ids(*pool) for pool in state)))

    def offered(self, handle: int = 1, **fields: object) -> list[Effect]:
        """An attempt whose memory is offered and known to all writers."""
        effects = self.open(handle, **fields) + self.offer(handle)
        for writer in self.writers:
            effects += self.receive(accepted(handle, sender=writer.incarnation, offered=True))
        return effects


def about(number: int = 1, *, sender: str = DECODE, room: int = 7) -> dict[str, object]:
    """Header of a frame about an attempt: of the sender, if that is a decode, else of DECODE."""
    decode = sender if sender in (DECODE, DECODE_2) else DECODE
    return {"version": f.VERSION_MAX, "sender": sender, "attempt": f.AttemptId(decode, number), "room": room}


def open_frame(number: int = 1, *, peer: str = DECODE, room: int = 7, rid: str = "r", **changes: object) -> f.Open:
    fields = {"request_id": rid, "deadline_s": 30.0}
    return f.Open(**(about(number, sender=peer, room=room) | fields | changes))


def offer_frame(number: int = 1, *, peer: str = DECODE, room: int = 7, pages=(8, 9), **changes: object) -> f.Offer:
    fields = {"pages": ids(*pages), "prefix_pages": 0, "aux_slot": 3}
    return f.Offer(**(about(number, sender=peer, room=room) | fields | changes))


def abort_frame(number: int = 1, *, peer: str = DECODE, room: int = 7, rid: str = "r", **changes: object) -> f.Abort:
    fields = {"request_id": rid, "cause": "aborted", "message": "client left"}
    return f.Abort(**(about(number, sender=peer, room=room) | fields | changes))


def accepted(number: int = 1, *, sender: str = PREFILL, offered: bool = False) -> f.Accepted:
    return f.Accepted(**about(number, sender=sender), offered=offered)


def ended(
    number: int = 1, cause: str = "", *, settled: bool = True, sender: str = PREFILL, room: int = 7, moved: int = 0
) -> f.Ended:
    message = f"{cause} at prefill" if cause else ""
    header = about(number, sender=sender, room=room)
    return f.Ended(**header, cause=cause, settled=settled, message=message, bytes_moved=moved)


def ack(number: int = 1, *, peer: str = DECODE) -> f.Ack:
    return f.Ack(**about(number, sender=peer))


def query(number: int = 1, *, room: int = 7) -> f.Query:
    return f.Query(**about(number, room=room))

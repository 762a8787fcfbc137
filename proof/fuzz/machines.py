"""The machines, driven by fuzzed input: frames that decode, events of the engine, and time."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Drain,
    EngineRan,
    Event,
    Fenced,
    Linked,
    OfferPages,
    OpenAttempt,
    OpenRequest,
    PeerLost,
    PeerReady,
    Received,
    Report,
    SendPages,
    Shutdown,
    Tick,
    Unlinked,
    Unreachable,
    Write,
    WriteEnded,
    Writer,
    WriteResult,
)
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.status import Cause, TransferStatus
from pdpool_connector.protocol.timeouts import Timeouts

from proof.fuzz.samples import A, B, Fuzzed, sample_frames

AnyMachine = PrefillMachine | DecodeMachine
ME = "c" * 32
PEERS = (A, B)
TIMEOUTS = Timeouts(max_attempts=6, max_tombstones=8)
MOST_EVENTS = 64
IDS = 16
"""Pages, rows and items of each side."""


class Bytes:
    """Numbers from an input, 0 after its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def below(self, limit: int) -> int:
        """A number from 0 up to `limit`."""
        self._at += 1
        return self._data[self._at - 1] % limit if self._at <= len(self._data) else 0

    def take(self, count: int) -> bytes:
        """The next bytes as they are."""
        self._at += count
        return self._data[self._at - count : self._at]

    def ids(self) -> bytes:
        """A few ids within memory."""
        return b"".join(self.below(IDS).to_bytes(4, "little") for _ in range(self.below(4)))

    def prompt(self) -> bytes:
        """A prompt's digest, or none."""
        return (b"", b"one", b"two")[self.below(3)]


def frame_of(data: Bytes) -> f.AttemptFrame | None:
    """A frame: now and then from raw bytes, mostly a real one with fields of its choice; None where it is dropped."""
    raw = data.take(data.below(256)) if data.below(8) == 0 else f.encode(_changed(data))
    try:
        frame = f.decode(raw)
    except f.MalformedFrameError:
        return None
    return frame if isinstance(frame, f.AttemptFrame) else None


def _changed(data: Bytes) -> f.AttemptFrame:
    kinds = [frame for frame in SAMPLES if isinstance(frame, f.AttemptFrame)]
    sample = kinds[data.below(len(kinds))]
    changes: dict[str, Any] = {
        "sender": PEERS[data.below(2)],
        "attempt": f.AttemptId((A, B, ME)[data.below(3)], data.below(6)),
        "room": data.below(3),
    }
    for name, value in FIELDS:
        if name in sample.__struct_fields__:
            changes[name] = value(data)
    return msgspec.structs.replace(sample, **changes)


SAMPLES = sample_frames()
FIELDS: Sequence[tuple[str, Callable[[Bytes], Any]]] = (
    ("request_id", lambda data: f"r{data.below(3)}"),
    ("prompt", Bytes.prompt),
    ("pages", Bytes.ids),
    ("state", lambda data: tuple(data.ids() for _ in range(data.below(3)))),
    ("prefix_pages", lambda data: data.below(4)),
    ("aux_slot", lambda data: data.below(4) - 1),
    ("deadline_s", lambda data: float(data.below(60))),
    ("rank_index", lambda data: data.below(3)),
    ("rank_count", lambda data: data.below(3) + 1),
    ("bytes_moved", lambda data: data.below(256)),
    ("offered", lambda data: bool(data.below(2))),
    ("settled", lambda data: bool(data.below(2))),
    ("cause", lambda data: ("", "aborted", "timed_out", "no such cause")[data.below(4)]),
)


class Watched:
    """One machine of either side, and what must hold for every input."""

    def __init__(self, machine: AnyMachine) -> None:
        self.machine = machine
        self.now = 0.0
        self.statuses: dict[int, TransferStatus] = {}
        self.handles = 0
        self.offered: dict[f.AttemptId, list[bytes]] = {}
        self.writes: list[Write] = []

    def play(self, data: Bytes) -> None:
        """Take events from the input until it ends."""
        for _ in range(MOST_EVENTS):
            if not data:
                return
            event = self.event(data)
            if event is not None:
                self.do(event)

    def event(self, data: Bytes) -> Event | None:
        """The next event; None where what the input says is none."""
        kind = data.below(20)
        if kind < 10:
            frame = frame_of(data)
            if isinstance(frame, f.Offer):
                self.offered.setdefault(frame.attempt, []).append(frame.pages)
            return Received(frame) if frame is not None else None
        peer = PEERS[data.below(2)]
        common: list[Callable[[], Event]] = [
            lambda: PeerReady(peer, f.VERSION_MAX),
            lambda: PeerLost(peer, "fuzzed"),
            lambda: Fenced(peer, "fuzzed"),
            lambda: AbortTransfer(data.below(8), "fuzzed"),
            lambda: self.tick(data),
            lambda: self.ended(data) or Tick(),
            lambda: (Drain, Shutdown)[data.below(2)]() if data.below(8) == 0 else Tick(),
        ]
        prefill = isinstance(self.machine, PrefillMachine)
        own = [self.request, self.send, self.engine_ran] if prefill else [self.attempt, self.link, self.offer]
        choices = [*common, *(lambda make=make: make(data) for make in own)]
        return choices[(kind - 10) % len(choices)]()

    def tick(self, data: Bytes) -> Event:
        self.now = max(self.now + data.below(8), self.machine.next_deadline or 0.0)
        return Tick()

    def engine_ran(self, data: Bytes) -> Event:
        self.now += data.below(4)
        return EngineRan(self.now)

    def request(self, data: Bytes) -> Event:
        self.handles += 1
        return OpenRequest(self.handles, data.below(3), f"r{data.below(3)}", 1.0 + data.below(30), data.prompt())

    def send(self, data: Bytes) -> Event:
        last = bool(data.below(2))
        aux = data.below(IDS) if last and data.below(2) else None
        state = tuple(data.ids() for _ in range(data.below(3))) if last else ()
        return SendPages(data.below(8), data.ids(), data.below(4), last, aux, state)

    def attempt(self, data: Bytes) -> Event:
        self.handles += 1
        where = (f"p{data.below(2)}", data.below(3), f"r{data.below(3)}")
        return OpenAttempt(self.handles, *where, 1.0 + data.below(30), data.prompt())

    def offer(self, data: Bytes) -> Event:
        """Memory for an attempt; the engine offers once, and only for an attempt that it has opened."""
        handle = 1 + data.below(max(self.handles, 1))
        attempt = f.AttemptId(ME, handle)
        if not self.handles or attempt in self.offered:
            return Tick()
        pages = data.ids()
        self.offered[attempt] = [pages]
        aux = data.below(IDS) if data.below(2) else None
        return OfferPages(handle, pages, data.below(4), aux, tuple(data.ids() for _ in range(data.below(3))))

    def link(self, data: Bytes) -> Event:
        prefill = f"p{data.below(2)}"
        kind = data.below(4)
        if kind == 0:
            return Unlinked(prefill)
        if kind == 1:
            return Unreachable(prefill, Cause.PEER_LOST, "fuzzed")
        writers = PEERS[: 1 + data.below(2)]
        return Linked(prefill, tuple(Writer(one, writes_aux=one is writers[-1]) for one in writers))

    def ended(self, data: Bytes) -> Event | None:
        if not self.writes:
            return None
        write = self.writes.pop(data.below(len(self.writes)))
        result = tuple(WriteResult)[data.below(len(WriteResult))]
        return WriteEnded(write.attempt, write.write, result, data.below(256))

    def do(self, event: Event) -> None:
        if isinstance(event, Fenced):  # its writes are over, and need no answer
            self.writes = [write for write in self.writes if write.peer != event.peer]
        for effect in self.machine.handle(event, self.now):
            if isinstance(effect, Report):
                self.check_report(effect)
                self.check_untouched(effect)
            elif isinstance(effect, Write):
                self.check_write(effect)
                self.writes.append(effect)
        most = TIMEOUTS.max_tombstones + 4 * TIMEOUTS.max_attempts + len(self.statuses)
        assert self.machine.rows <= most, f"{self.machine.rows} rows"
        assert self.machine.tombstones <= TIMEOUTS.max_tombstones, f"{self.machine.tombstones} tombstones"

    def check_report(self, report: Report) -> None:
        before, now = self.statuses.get(report.handle), report.status
        if before is not None and before.ended:
            assert (before.phase, before.cause) == (now.phase, now.cause), f"{before} became {now}"
            assert now.releasable or not before.releasable, f"{before} became {now}"
        self.statuses[report.handle] = now

    def check_untouched(self, report: Report) -> None:
        """Memory is given back when no write of ours uses it any more."""
        for write in self.writes if report.status.releasable else ():
            assert write.attempt not in report.attempts, f"{report} gives back what {write} uses"

    def check_write(self, write: Write) -> None:
        """Nothing is written outside what was offered for this attempt."""
        assert len(write.source) == len(write.target)
        offers = self.offered.get(write.attempt, [])
        wanted = _ids(write.target)
        assert any(wanted <= _ids(pages) for pages in offers), f"{write} writes what was never offered: {offers}"
        assert all(len(ours) == len(theirs) for ours, theirs in write.state)


def _ids(pages: bytes) -> set[bytes]:
    return {pages[at : at + 4] for at in range(0, len(pages), 4)}


def _machine(kind: Callable[[str, Timeouts], AnyMachine]) -> tuple[Fuzzed, Sequence[bytes]]:
    def fuzz(data: bytes) -> None:
        Watched(kind(ME, TIMEOUTS)).play(Bytes(data))

    # Peers become ready, are linked, and requests come; what follows is for the fuzzer to find.
    ready = bytes([10, 0, 1, 10, 1, 1])
    return fuzz, [ready + bytes([17, 0, 0, 0, 0, 9] * 4), ready + bytes(range(256)), ready + bytes(range(255, 0, -1))]


def prefill() -> tuple[Fuzzed, Sequence[bytes]]:
    """Prefill's machine."""
    return _machine(PrefillMachine)


def decode() -> tuple[Fuzzed, Sequence[bytes]]:
    """Decode's machine."""
    return _machine(DecodeMachine)

"""The trace of each hand-off replays alone, and a change of behaviour is found."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pdpool_connector.flight import recorder as recorder_module
from pdpool_connector.flight.files import merged
from pdpool_connector.flight.record import Header, Record, RecordError, Step, decode_record, encode_record
from pdpool_connector.flight.recorder import RING, Recorder
from pdpool_connector.flight.replay import MACHINES, replay
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import (
    AbortTransfer,
    Event,
    Linked,
    OfferPages,
    OpenAttempt,
    OpenRequest,
    PeerLost,
    PeerReady,
    Received,
    Report,
    StopWriting,
    Tick,
    WriteEnded,
    Writer,
)
from pdpool_connector.protocol.prefill import PrefillMachine

from tests.unit.protocol.scenarios import (
    DECODE_SCENARIOS,
    PREFILL_SCENARIOS,
    RandomDecode,
    RandomPrefill,
    play,
)
from tests.unit.protocol.sides import TIMEOUTS, Decode, Prefill, Side, ended

ME = "a" * 32
BOUNDS = (
    b"is older than one that is already forgotten",
    b"which has not ended here",
    b"prefill knows nothing of this attempt",
)
"""Effects that depend on all hand-offs of a machine, of which no trace of one room can know."""


def record_of(machine, recorder: Recorder, handle: int, status, now: float) -> Record | None:
    snapshot = recorder.snapshot(handle)
    if snapshot is None:
        return None
    header = Header(
        role="prefill" if isinstance(machine, PrefillMachine) else "decode",
        rank=0,
        incarnation=machine.incarnation,
        room=snapshot.room,
        request_id=snapshot.request_id,
        handle=handle,
        cause=status.cause or "",
        message=status.message,
        releasable=status.releasable,
        missing=snapshot.missing,
        wall=0.0,
        at=now,
        timeouts=machine.timeouts,
    )
    return Record(header, merged(snapshot))


def met_a_bound(record: Record) -> bool:
    data = encode_record(record)
    return any(bound in data for bound in BOUNDS)


@contextmanager
def recording() -> Iterator[list[Record]]:
    """Record each side from its first event, as the runtime does; gives the records of all ends that are reported."""
    records: list[Record] = []
    recorders: dict[int, Recorder] = {}
    do = Side.do

    def recorded(side: Side, event: Event):
        effects, machine, now = do(side, event), side.machine, side.now
        recorder = recorders.setdefault(id(machine), Recorder(machine.incarnation, machine.timeouts.result_s))
        recorder.note(event, now, effects, machine.fired)
        for effect in effects:
            if isinstance(effect, Report) and effect.status.ended:
                if (record := record_of(machine, recorder, effect.handle, effect.status, now)) is not None:
                    records.append(record)
                failed = effect.status.cause is not None
                recorder.ended(effect.handle, now, failed=failed, releasable=effect.status.releasable)
        return effects

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Side, "do", recorded)
        yield records


@pytest.fixture(scope="module")
def records() -> list[Record]:
    kept: list[Side] = []  # so that no two machines have one id
    with recording() as found:
        for make, scenarios in ((Prefill, PREFILL_SCENARIOS), (lambda: Decode(linked=False), DECODE_SCENARIOS)):
            for scenario in scenarios.values():
                kept.append(make())
                play(kept[-1], scenario)
        for seed in range(100):
            for make, player in ((Prefill, RandomPrefill), (Decode, RandomDecode)):
                kept.append(make())
                random = player(kept[-1], seed)
                for _ in range(60):
                    random.step()
    return found


def test_every_trace_replays_alone(records: list[Record]) -> None:
    assert len(records) > 1000
    for role in MACHINES:
        causes = {record.header.cause for record in records if record.header.role == role}
        assert causes >= {"", "aborted", "peer_aborted", "timed_out", "peer_lost"}
    for record in records:
        if not met_a_bound(record):
            result = replay(decode_record(encode_record(record)))
            assert result.difference is None, (record.header, result.difference)
            assert result.events == len(record.steps)


def test_few_traces_meet_a_bound(records: list[Record]) -> None:
    assert sum(map(met_a_bound, records)) < len(records) / 10, "else the test above proves little"


class WritesOn(PrefillMachine):
    """Does not stop the transfer backend when a hand-off has failed."""

    def handle(self, event, now):
        return [effect for effect in super().handle(event, now) if not isinstance(effect, StopWriting)]


class ReleasesTooEarly(DecodeMachine):
    """Reports memory as free as soon as an attempt has failed."""

    def _report(self, attempt) -> None:
        offered, attempt.offered = attempt.offered, False
        super()._report(attempt)
        attempt.offered = offered


@pytest.mark.parametrize(("role", "changed"), [("prefill", WritesOn), ("decode", ReleasesTooEarly)])
def test_changed_machine_differs_at_its_step(records: list[Record], role: str, changed: type) -> None:
    machines = {**MACHINES, role: changed}
    results = [(record, replay(record, machines)) for record in records if record.header.role == role]
    differing = [(record, result.difference) for record, result in results if result.difference is not None]
    assert differing
    for record, difference in differing:
        assert difference.event == record.steps[difference.step - 1].event
        assert difference.recorded != difference.replayed


def test_altered_effect_is_a_difference(records: list[Record]) -> None:
    record = next(record for record in records if len(record.steps) > 3 and record.steps[-1].effects)
    last = record.steps[-1]
    altered = Record(record.header, (*record.steps[:-1], last._replace(effects=last.effects[:-1])))
    assert replay(altered).difference.step == len(record.steps)


def test_fault_of_machine_is_part_of_trace(monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(PrefillMachine, "_on_abort_transfer", broken)
    event = AbortTransfer(1, "client left")
    with recording() as found:
        side = Prefill()
        side.request()
        side.wait(TIMEOUTS.match_s + 0.1)
    (record,) = found
    steps = (*record.steps[:2], Step(1.0, event, (), "ZeroDivisionError"))
    assert replay(Record(record.header, steps)).difference is None
    monkeypatch.undo()
    assert "ZeroDivisionError" in replay(Record(record.header, steps)).difference.recorded


def test_state_of_old_events_for_all_stays(monkeypatch) -> None:
    monkeypatch.setattr(recorder_module, "WIDE", 2)
    with recording() as found:
        side = Decode()
        for number in range(10):
            side.do(PeerReady(f"{number:032x}", f.VERSION_MAX))
            side.do(Linked(f"q:{number}", (Writer(f"{number:032x}"),)))
            side.do(PeerLost(f"{number:032x}", "gone"))
        side.offered()
        side.receive(ended())
    (record,) = found
    assert [type(step.event).__name__ for step in record.steps[:2]] == ["PeerReady", "Linked"]
    assert replay(record).difference is None


def waiting(recorder: Recorder, rooms: int) -> Iterator[PrefillMachine]:
    machine = PrefillMachine(ME, TIMEOUTS)
    for room in range(rooms):
        event = OpenRequest(room + 1, room, f"r{room}", 9.0)
        recorder.note(event, 1.0, machine.handle(event, 1.0))
    yield machine


def test_trace_without_beginning_is_not_replayed() -> None:
    recorder = Recorder(ME, 30.0, ring=2)
    (machine,) = waiting(recorder, 1)
    for _ in range(3):
        event = WriteEnded(f.AttemptId("b" * 32, 1), 0, "landed", 0)
        recorder.note(OpenRequest(1, 0, "r0", 9.0), 1.0, machine.handle(event, 1.0))
    status = type("S", (), {"cause": "timed_out", "message": "", "releasable": True})
    record = record_of(machine, recorder, 1, status, 2.0)
    assert record.header.missing == 2
    with pytest.raises(RecordError, match="2 steps fell out"):
        replay(record)


class TestBounds:
    def test_oldest_trace_is_evicted(self) -> None:
        recorder = Recorder(ME, 30.0, max_bytes=100 * 1024)
        for _ in waiting(recorder, 1000):
            assert len(recorder) == 100
            assert recorder.snapshot(1) is None
            assert recorder.snapshot(1000).request_id == "r999"

    @pytest.mark.parametrize("memory", [{"pages": bytes(40 * 1024)}, {"pages": b"", "state": (bytes(40 * 1024),)}])
    def test_ids_count_in_the_bound(self, memory: dict) -> None:
        recorder, machine = Recorder(ME, 30.0, max_bytes=100 * 1024), DecodeMachine(ME, TIMEOUTS)
        for handle in range(1, 9):
            for event in (OpenAttempt(handle, "p:1", handle, "r", 60.0), OfferPages(handle, **memory)):
                recorder.note(event, 1.0, machine.handle(event, 1.0))
        assert len(recorder) == 2

    def test_trace_evicted_by_its_own_event_stays_evicted(self) -> None:
        recorder = Recorder(ME, 30.0, max_bytes=8 * 1024)
        for round_ in range(3):
            machine = DecodeMachine(ME, TIMEOUTS)
            for handle in range(8 * round_ + 1, 8 * round_ + 9):
                event = OpenAttempt(handle, "p:1", handle, "r", 60.0 - handle)
                recorder.note(event, 1.0, machine.handle(event, 1.0))
            recorder.note(Tick(), 99.0, machine.handle(Tick(), 99.0), machine.fired)
        for handle in range(101, 106):
            event = OpenAttempt(handle, "p:1", handle, "r", 60.0)
            recorder.note(event, 200.0, machine.handle(event, 200.0))
        assert [recorder.snapshot(handle) is not None for handle in range(101, 106)] == [True] * 5

    def test_names_of_trace_are_bounded_and_live_ones_stay(self) -> None:
        recorder = Recorder(ME, 30.0)
        list(waiting(recorder, 1))
        frame = {"version": f.VERSION_MAX, "sender": "d" * 32, "room": 0, "request_id": "r", "cause": "aborted"}
        for number in range(1, 2 * RING):
            aborted = f.Abort(**frame, attempt=f.AttemptId("d" * 32, number), message="")
            recorder.note(Received(aborted), 1.0, ())
        assert len(recorder._named) == RING
        assert recorder.snapshot(1) is not None

    def test_handoffs_without_failure_leave_nothing(self) -> None:
        recorder = Recorder(ME, 30.0)
        for _ in waiting(recorder, 50):
            for handle in range(1, 51):
                recorder.ended(handle, 2.0, failed=False, releasable=True)
        assert len(recorder) == 0
        assert recorder.snapshot(1) is None


class TestFiles:
    @pytest.mark.parametrize(
        ("data", "what"),
        [
            (b"", "line 1 is no header"),
            (b'{"format":"other"}', "line 1 is no header"),
            (b"\xff\xfe", "line 1 is no header"),
            pytest.param(b'{"later":' + b"[" * 100_000, "line 1 is no header", id="lists within lists"),
        ],
    )
    def test_file_that_is_no_record_is_refused(self, data: bytes, what: str) -> None:
        with pytest.raises(RecordError, match=what):
            decode_record(data)

    @pytest.mark.parametrize(
        ("line", "what"),
        [
            (b'{"at":1,"event":["Sneeze",{}],"effects":[]}', "line 2 .*Sneeze is unknown"),
            (b'{"at":1,"event":["PeerReady",{"peer":3}],"effects":[]}', "line 2"),
            (b'{"at":1,"event":["Received",{}],"effects":[]}', "line 2"),
            (b"nonsense", "line 2"),
            pytest.param(b'{"later":' + b"[" * 100_000, "line 2", id="lists within lists"),
        ],
    )
    def test_line_that_is_no_step_is_refused(self, records: list[Record], line: bytes, what: str) -> None:
        header = encode_record(records[0]).splitlines()[0]
        with pytest.raises(RecordError, match=what):
            decode_record(header + b"\n" + line)

"""Whatever the simulated world does to the machines, the story of each hand-off replays alone, and a change is seen."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from pdpool_connector.flight.files import merged
from pdpool_connector.flight.record import Header, Record, RecordError, decode_record, encode_record
from pdpool_connector.flight.recorder import RING, Recorder
from pdpool_connector.flight.replay import MACHINES, replay
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.decode_read import DecodeReadMachine
from pdpool_connector.protocol.events import (
    Event,
    OpenAttempt,
    OpenRequest,
    Received,
    Report,
    StopWriting,
    Tick,
    WriteEnded,
)
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.prefill_read import PrefillReadMachine

from tests.simulation.ground import TIMING
from tests.simulation.kinds import MACHINES as PAIRS
from tests.simulation.kinds import Direction
from tests.simulation.player import Player

ME = "a" * 32
BOUNDS = (
    b"is older than one that is already forgotten",
    b"remembers as many ended attempts as it can",
    b"which has not ended here",
)
"""Signs of what all hand-offs of a machine share, of which no story of one can know: refusals, and the acknowledgement
of an end for which there was no room."""


def record_of(machine, recorder: Recorder, handle: int, status, now: float) -> Record | None:
    telling = recorder.tell(handle)
    if telling is None:
        return None
    header = Header(
        role="prefill" if isinstance(machine, PrefillMachine | PrefillReadMachine) else "decode",
        direction="read" if isinstance(machine, PrefillReadMachine | DecodeReadMachine) else "write",
        rank=0,
        incarnation=machine.incarnation,
        room=telling.room,
        sibling=telling.sibling,
        request_id=telling.request_id,
        handle=handle,
        cause=status.cause or "",
        message=status.message,
        releasable=status.releasable,
        missing=telling.missing,
        wall=0.0,
        at=now,
        timing=machine.timing,
    )
    return Record(header, merged(telling))


def met_a_bound(record: Record) -> bool:
    data = encode_record(record)
    return any(bound in data for bound in BOUNDS)


def recorded(base, sink: list[Record]):
    """A machine that records itself as the runtime does, and puts the story of every end into `sink`."""

    class Recorded(base):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self.recorder = Recorder(self.incarnation, self.timing.verdict_s)

        def handle(self, event: Event, now: float):
            effects = super().handle(event, now)
            self.recorder.note(event, now, effects, self.fired)
            for effect in effects:
                if isinstance(effect, Report) and effect.status.ended:
                    if (record := record_of(self, self.recorder, effect.handle, effect.status, now)) is not None:
                        sink.append(record)
                    failed = effect.status.cause is not None
                    self.recorder.ended(effect.handle, now, failed=failed, releasable=effect.status.releasable)
            return effects

    return Recorded


def stories(seed: int, direction: Direction) -> list[Record]:
    sink: list[Record] = []
    prefill, decode = PAIRS[direction]
    Player(seed, direction, {direction: (recorded(prefill, sink), recorded(decode, sink))}).run()
    return sink


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [record for seed in range(40) for direction in PAIRS for record in stories(seed, direction)]


def test_every_story_of_the_simulated_world_replays_alone_without_a_difference(records) -> None:
    assert len(records) > 1000
    for direction in PAIRS:
        causes = {record.header.cause for record in records if record.header.direction == direction}
        assert causes >= {"", "aborted", "peer_aborted", "timed_out", "peer_lost"}
    for record in records:
        if met_a_bound(record):
            continue
        result = replay(decode_record(encode_record(record)))
        assert result.difference is None, (record.header, result.difference)
        assert result.events == len(record.steps)


def test_few_stories_meet_a_bound_of_the_whole_machine(records) -> None:
    assert sum(map(met_a_bound, records)) < len(records) / 50


class WritesOn(PrefillMachine):
    """Forgets to stop the data plane when an attempt has failed."""

    def handle(self, event, now):
        return [effect for effect in super().handle(event, now) if not isinstance(effect, StopWriting)]


class LetsGoTooEarly(DecodeMachine):
    """Calls pages free as soon as an attempt has failed."""

    def _hold_if_unheard(self, attempt) -> None:
        attempt.offered = False
        super()._hold_if_unheard(attempt)


@pytest.mark.parametrize(("role", "changed"), [("prefill", WritesOn), ("decode", LetsGoTooEarly)])
def test_a_machine_that_does_otherwise_is_noticed_at_the_step_where_it_does(records, role, changed) -> None:
    machines = {**MACHINES, (role, "write"): changed}
    written = [one for one in records if (one.header.role, one.header.direction) == (role, "write")]
    results = [(record, replay(record, machines)) for record in written]
    differing = [(record, result.difference) for record, result in results if result.difference is not None]
    assert differing
    for record, difference in differing:
        assert difference.event == record.steps[difference.step - 1].event
        assert difference.recorded != difference.replayed


def test_a_recorded_effect_that_was_altered_is_a_difference(records) -> None:
    record = next(record for record in records if len(record.steps) > 3 and record.steps[-1].effects)
    last = record.steps[-1]
    altered = Record(record.header, (*record.steps[:-1], last._replace(effects=last.effects[:-1])))
    assert replay(altered).difference.step == len(record.steps)


def waiting(recorder: Recorder, rooms: int) -> Iterator[PrefillMachine]:
    machine = PrefillMachine(ME, TIMING)
    for room in range(rooms):
        event = OpenRequest(room + 1, room, 0, f"r{room}", 9.0)
        recorder.note(event, 1.0, machine.handle(event, 1.0))
    yield machine


def test_a_story_whose_beginning_fell_out_of_the_ring_is_not_replayed() -> None:
    recorder = Recorder(ME, 30.0, ring=2)
    (machine,) = waiting(recorder, 1)
    for _ in range(3):
        event = WriteEnded(f.AttemptId("b" * 32, 1), 0, "landed", 0)
        recorder.note(OpenRequest(1, 0, 0, "r0", 9.0), 1.0, machine.handle(event, 1.0))
    status = type("S", (), {"cause": "timed_out", "message": "", "releasable": True})
    record = record_of(machine, recorder, 1, status, 2.0)
    assert record.header.missing == 2
    with pytest.raises(RecordError, match="2 steps fell out"):
        replay(record)


def test_all_rings_together_are_bounded_and_the_oldest_story_gives_way() -> None:
    recorder = Recorder(ME, 30.0, max_bytes=100 * 1024)
    for _ in waiting(recorder, 1000):
        assert len(recorder) == 100
        assert recorder.tell(1) is None
        assert recorder.tell(1000).request_id == "r999"


@pytest.mark.parametrize("field", ["pages", "state"])
def test_ids_of_pages_and_of_state_count_in_that_bound(field) -> None:
    recorder, machine = Recorder(ME, 30.0, max_bytes=100 * 1024), DecodeMachine(ME, TIMING)
    for handle in range(1, 9):
        event = replace(OpenAttempt(handle, "p:1", handle, 0, "r", b"", 0, 0, 60.0), **{field: bytes(40 * 1024)})
        recorder.note(event, 1.0, machine.handle(event, 1.0))
    assert len(recorder) == 2


def test_a_story_evicted_by_the_event_that_concerns_it_is_not_added_to() -> None:
    recorder = Recorder(ME, 30.0, max_bytes=8 * 1024)
    for round_ in range(3):
        machine = DecodeMachine(ME, TIMING)
        for handle in range(8 * round_ + 1, 8 * round_ + 9):
            event = OpenAttempt(handle, "p:1", handle, 0, "r", b"", 0, 0, 60.0 - handle)
            recorder.note(event, 1.0, machine.handle(event, 1.0))
        recorder.note(Tick(), 99.0, machine.handle(Tick(), 99.0), machine.fired)
    for handle in range(101, 106):
        event = OpenAttempt(handle, "p:1", handle, 0, "r", b"", 0, 0, 60.0)
        recorder.note(event, 200.0, machine.handle(event, 200.0))
    assert [recorder.tell(handle) is not None for handle in range(101, 106)] == [True] * 5


def test_the_names_of_a_story_are_bounded_and_that_of_a_live_hand_off_stays() -> None:
    recorder = Recorder(ME, 30.0)
    list(waiting(recorder, 1))
    frame = {"version": f.VERSION_MAX, "sender": "d" * 32, "room": 0, "sibling": 0}
    for number in range(1, 2 * RING):
        aborted = f.Abort(**frame, attempt=f.AttemptId("d" * 32, number), request_id="r", cause="aborted", message="")
        recorder.note(Received(aborted), 1.0, ())
    assert len(recorder._named) == RING
    assert recorder.tell(1) is not None


def test_hand_offs_that_end_well_leave_nothing_in_the_recorder() -> None:
    recorder = Recorder(ME, 30.0)
    for _ in waiting(recorder, 50):
        for handle in range(1, 51):
            recorder.ended(handle, 2.0, failed=False, releasable=True)
    assert len(recorder) == 0
    assert recorder.tell(1) is None


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "line 1 is no header"),
        (b'{"format":"other"}', "line 1 is no header"),
        (b"\xff\xfe", "line 1 is no header"),
        pytest.param(b'{"later":' + b"[" * 100_000, "line 1 is no header", id="lists within lists"),
    ],
)
def test_a_file_that_is_no_record_is_refused_with_its_line(data, what) -> None:
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
def test_a_step_that_is_none_is_refused_with_its_line(records, line, what) -> None:
    header = encode_record(records[0]).splitlines()[0]
    with pytest.raises(RecordError, match=what):
        decode_record(header + b"\n" + line)

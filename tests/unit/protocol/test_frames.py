"""Frames: what goes out comes back, and nothing else comes in."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.status import Cause, cause_from_peer

from tests.unit.protocol.sides import abort_frame, about, open_frame

EVERY = [
    f.Hello(version=f.VERSION_MAX, oldest_version=1, sender="a" * 32, address="10.0.0.1:8999", memory=b"m", state=True),
    f.HelloOk(version=f.VERSION_MAX, sender="a" * 32, memory=b"m"),
    f.HelloRefused(
        version=f.VERSION_MAX, sender="a" * 32, reason="page_tokens is 16 here and 32 at the peer", retry=False
    ),
    f.Goodbye(version=f.VERSION_MAX, sender="a" * 32, reason="bye"),
    open_frame(),
    f.Expect(**about(), request_id="r", deadline_s=300.0, part=1, parts=2, prompt=b"p"),
    f.Accepted(**about()),
    f.Sending(**about()),
    f.Computed(**about(), sequence=0, start=2, pages=b"1234", last=True, aux_slot=-1, state=b"5678"),
    f.Fetching(**about(), taken=1),
    f.Done(**about(), bytes_moved=1),
    f.Failed(**about(), cause="timed_out", message="m"),
    f.Drained(**about(), cause="timed_out", message="m"),
    f.Ack(**about()),
    abort_frame(),
    f.Query(**about()),
    f.Batch(version=2, sender="a" * 32, frames=(f.Accepted(**about()), f.Done(**about(), bytes_moved=1))),
]


@pytest.mark.parametrize("frame", EVERY, ids=lambda frame: type(frame).__name__)
def test_every_frame_comes_back_as_it_went(frame: f.Frame) -> None:
    assert f.decode(f.encode(frame)) == frame


def test_every_frame_type_is_covered_here() -> None:
    leaves = {cls for cls in f.Frame.__subclasses__() if cls is not f.AttemptFrame} | set(
        f.AttemptFrame.__subclasses__()
    )
    assert {type(frame) for frame in EVERY} == leaves


@pytest.mark.parametrize("frame", EVERY, ids=lambda frame: type(frame).__name__)
def test_a_newer_peer_may_append_fields(frame: f.Frame) -> None:
    longer = [*msgspec.msgpack.decode(f.encode(frame)), "a field of tomorrow"]
    assert f.decode(msgspec.msgpack.encode(longer)) == frame


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    with pytest.raises(f.MalformedFrameError):
        f.decode(data)


@given(st.sampled_from(EVERY), st.data())
def test_damaged_frames_are_refused_or_are_other_frames(frame: f.Frame, data: st.DataObject) -> None:
    raw = bytearray(f.encode(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    with contextlib.suppress(f.MalformedFrameError):
        assert isinstance(f.decode(bytes(raw[:cut])), f.Frame)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": f.VERSION_MAX + 1}, "version"),
        ({"version": 0}, "version"),
        ({"room": -1}, "malformed"),
        ({"room": 2**63}, "malformed"),
        ({"sender": "a" * 31}, "malformed"),
        ({"sibling": 2**31}, "malformed"),
        ({"pages": b"123"}, "malformed"),
        ({"pages": "text"}, "malformed"),
        ({"state": b"123"}, "malformed"),
        ({"request_id": "x" * 257}, "malformed"),
        ({"deadline_s": float("nan")}, "malformed"),
        ({"deadline_s": -1.0}, "malformed"),
        ({"attempt": ["d" * 32, -1]}, "malformed"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, object], reason: str) -> None:
    frame = msgspec.structs.replace(open_frame(), **changes)
    with pytest.raises(f.MalformedFrameError) as caught:
        f.decode(msgspec.msgpack.encode(frame))
    assert caught.value.reason == reason


def test_what_is_wrong_within_a_batch_refuses_it_whole() -> None:
    odd = msgspec.structs.replace(open_frame(), pages=b"123")
    batch = f.Batch(version=2, sender="a" * 32, frames=(f.Query(**about()), odd))
    with pytest.raises(f.MalformedFrameError, match="3 bytes of pages"):
        f.decode(f.encode(batch))
    for frames in ([], [EVERY[0]], [EVERY[-1]]):
        with pytest.raises(f.MalformedFrameError, match="malformed"):
            f.decode(f.encode(msgspec.structs.replace(batch, frames=frames)))


def test_a_process_becomes_known_by_hex_alone() -> None:
    for sender in ("A" * 32, "a" * 31 + "\n", "a" * 33):
        with pytest.raises(f.MalformedFrameError, match="malformed"):
            f.decode(f.encode(msgspec.structs.replace(EVERY[0], sender=sender)))


def test_frames_travel_together_in_order_where_the_peer_knows_it_and_sizes_allow_it() -> None:
    small = [msgspec.structs.replace(f.Ack(**about()), version=2, room=room) for room in range(f.MAX_BATCH + 3)]
    large = msgspec.structs.replace(open_frame(), version=2, pages=bytes(4 * f.MAX_BATCHED_BYTES))
    old = msgspec.structs.replace(f.Ack(**about()), version=1)
    sent = [*small, large, old, old, small[0], EVERY[1], small[1], small[2]]
    messages = list(f.batches(sent))
    flat = [one for message in messages for one in (message.frames if isinstance(message, f.Batch) else [message])]
    assert flat == sent
    sizes = [len(message.frames) if isinstance(message, f.Batch) else 1 for message in messages]
    assert sizes == [f.MAX_BATCH, 3, 1, 1, 1, 1, 1, 2]
    assert all(len(f.encode(message)) < f.MAX_FRAME_BYTES for message in messages)


def test_oversized_frames_are_refused_before_they_are_read() -> None:
    with pytest.raises(f.MalformedFrameError, match="oversized"):
        f.decode(b"\xc1" * (f.MAX_FRAME_BYTES + 1))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(f.MalformedFrameError):
        f.decode(b"\x91" * 100_000)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("aborted", Cause.PEER_ABORTED),
        ("shutdown", Cause.PEER_LOST),
        ("timed_out", Cause.TIMED_OUT),
        ("new", Cause.INTERNAL),
    ],
)
def test_causes_are_told_in_the_words_of_this_side(text: str, seen: Cause) -> None:
    assert cause_from_peer(text, Cause.INTERNAL) is seen


@pytest.mark.parametrize("kind", [f.Expect, f.Abort, f.Drained])
def test_a_part_that_there_cannot_be_is_refused(kind) -> None:
    fields = {"request_id": "r", "cause": "aborted", "message": "", "deadline_s": 1.0, "part": 2, "parts": 2}
    fields = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    with pytest.raises(f.MalformedFrameError, match="part is 2 of parts 2: it must be less than parts"):
        f.decode(f.encode(kind(**about(), **fields)))


UGLY = "\x1b[2J\x07\nfake line \u2028\udc80 größer"


def test_a_message_is_one_line_that_may_be_shown_on_a_terminal() -> None:
    assert f.text(UGLY) == "\\x1b[2J\\x07\\nfake line \\u2028\\udc80 größer"
    assert len(f.text("\x00" * 2000)) == len(f.text("ö" * 2000)) == f.MAX_TEXT


def test_an_address_that_no_terminal_should_be_sent_is_refused() -> None:
    hello = msgspec.structs.replace(EVERY[0], address="10.0.0.1:1\nfake line")
    with pytest.raises(f.MalformedFrameError, match="address"):
        f.decode(f.encode(hello))

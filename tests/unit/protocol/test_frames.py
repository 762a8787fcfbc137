"""Frames: encoding and decoding, and what is refused."""

import contextlib
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.status import Cause, cause_from_peer

from tests.unit.protocol.sides import abort_frame, about, offer_frame, open_frame

EVERY = [
    f.Hello(version=1, oldest_version=1, sender="a" * 32, address="10.0.0.1:8999", memory=b"m", state=True),
    f.HelloOk(version=f.VERSION_MAX, sender="a" * 32, memory=b"m"),
    f.HelloRefused(
        version=f.VERSION_MAX, sender="a" * 32, reason="page_tokens is 16 at prefill and 32 at decode", retry=False
    ),
    f.Goodbye(version=f.VERSION_MAX, sender="a" * 32, reason="bye"),
    open_frame(),
    offer_frame(state=(b"1234", b"")),
    f.Accepted(**about(), offered=True),
    f.Ended(**about(), cause="timed_out", settled=False, message="m", bytes_moved=1, checksum=2),
    f.Ack(**about()),
    abort_frame(),
    f.Query(**about()),
    f.Batch(version=1, sender="a" * 32, frames=(f.Accepted(**about()), offer_frame())),
]


@pytest.mark.parametrize("frame", EVERY, ids=lambda frame: type(frame).__name__)
def test_frame_survives_encoding(frame: f.Frame) -> None:
    assert f.decode(f.encode(frame)) == frame


def test_every_frame_type_is_covered_here() -> None:
    assert {type(frame) for frame in EVERY} == set(get_args(f.AnyFrame))


@pytest.mark.parametrize("frame", EVERY, ids=lambda frame: type(frame).__name__)
def test_appended_fields_are_ignored(frame: f.Frame) -> None:
    longer = [*msgspec.msgpack.decode(f.encode(frame)), "a field of tomorrow"]
    assert f.decode(msgspec.msgpack.encode(longer)) == frame


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(f.MalformedFrameError):
        f.decode(data)


@given(st.sampled_from(EVERY), st.data())
def test_damaged_frame_raises_nothing_else(frame: f.Frame, data: st.DataObject) -> None:
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
        ({"rank_index": 2**31}, "malformed"),
        ({"rank_index": 1}, "malformed"),
        ({"rank_count": 0}, "malformed"),
        ({"rank_count": 2**31 - 1}, "malformed"),
        ({"prompt": b"x" * 17}, "malformed"),
        ({"request_id": "x" * 257}, "malformed"),
        ({"deadline_s": float("nan")}, "malformed"),
        ({"deadline_s": -1.0}, "malformed"),
        ({"attempt": ["d" * 32, -1]}, "malformed"),
    ],
)
def test_open_out_of_range_is_refused(changes: dict[str, object], reason: str) -> None:
    frame = msgspec.structs.replace(open_frame(), **changes)
    with pytest.raises(f.MalformedFrameError) as caught:
        f.decode(msgspec.msgpack.encode(frame))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "changes",
    [
        {"pages": b"123"},
        {"pages": "text"},
        {"state": (b"123",)},
        {"state": b"1234"},
        {"state": (b"",) * 17},
        {"aux_slot": -2},
    ],
)
def test_offer_out_of_range_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(f.MalformedFrameError):
        f.decode(msgspec.msgpack.encode(msgspec.structs.replace(offer_frame(), **changes)))


def test_rank_out_of_range_is_named() -> None:
    with pytest.raises(f.MalformedFrameError, match="rank_index is 2 of 2: it must be less than rank_count"):
        f.decode(f.encode(abort_frame(rank_index=2, rank_count=2)))


def test_one_bad_frame_refuses_whole_batch() -> None:
    odd = msgspec.structs.replace(offer_frame(), pages=b"123")
    batch = f.Batch(version=1, sender="a" * 32, frames=(f.Query(**about()), odd))
    with pytest.raises(f.MalformedFrameError, match="3 bytes of pages"):
        f.decode(f.encode(batch))
    for frames in ([], [EVERY[0]], [EVERY[-1]]):
        with pytest.raises(f.MalformedFrameError, match="malformed"):
            f.decode(f.encode(msgspec.structs.replace(batch, frames=frames)))


def test_hello_needs_hex_sender() -> None:
    for sender in ("A" * 32, "a" * 31 + "\n", "a" * 33):
        with pytest.raises(f.MalformedFrameError, match="malformed"):
            f.decode(f.encode(msgspec.structs.replace(EVERY[0], sender=sender)))


def test_small_frames_are_batched_in_order() -> None:
    small = [msgspec.structs.replace(f.Ack(**about()), room=room) for room in range(f.MAX_BATCH + 3)]
    large = offer_frame(pages=range(f.MAX_BATCHED_BYTES // 4 + 1))
    frames = [*small, large, EVERY[1], small[1], offer_frame()]
    messages = list(f.batches(frames))
    flat = [one for message in messages for one in (message.frames if isinstance(message, f.Batch) else [message])]
    assert flat == frames
    sizes = [len(message.frames) if isinstance(message, f.Batch) else 1 for message in messages]
    assert sizes == [f.MAX_BATCH, 3, 1, 1, 2]
    assert all(len(f.encode(message)) < f.MAX_FRAME_BYTES for message in messages)


def test_oversized_frame_is_refused_unread() -> None:
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
def test_cause_of_peer_is_seen_from_this_side(text: str, seen: Cause) -> None:
    assert cause_from_peer(text, Cause.INTERNAL) is seen


UGLY = "\x1b[2J\x07\nfake line \u2028\udc80 größer"


def test_message_becomes_one_printable_line() -> None:
    assert f.text(UGLY) == "\\x1b[2J\\x07\\nfake line \\u2028\\udc80 größer"
    assert len(f.text("\x00" * 2000)) == len(f.text("ö" * 2000)) == f.MAX_TEXT


def test_address_with_control_characters_is_refused() -> None:
    hello = msgspec.structs.replace(EVERY[0], address="10.0.0.1:1\nfake line")
    with pytest.raises(f.MalformedFrameError, match="address"):
        f.decode(f.encode(hello))

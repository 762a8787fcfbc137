"""What an engine gives becomes what frames can carry, or is refused by name."""

import numpy as np
import pytest
from pdpool_connector.protocol.frames import INDICES
from pdpool_connector.runtime.arguments import as_reason, as_request, as_whole

GIVEN = {"room": 1, "request_id": "r", "sibling": 0, "deadline_s": 1.0, "prompt": b""}


@pytest.mark.parametrize("number", [3, np.int64(3), np.int32(3), np.uint8(3)])
def test_an_integer_of_any_kind_becomes_a_plain_one(number) -> None:
    assert type(as_whole("slot", number)) is int
    assert as_whole("slot", number) == 3


def test_true_is_1() -> None:
    assert repr(as_whole("slot", True)) == "1"


@pytest.mark.parametrize("number", [1.5, 1.0, "1", None, np.float32(1), np.array([1, 2])])
def test_what_is_no_integer_is_refused_by_name(number) -> None:
    with pytest.raises(TypeError, match=r"slot=.*: give an integer"):
        as_whole("slot", number)


@pytest.mark.parametrize("number", [-1, INDICES, np.uint64(2**63), 2**64])
def test_an_integer_out_of_range_is_refused_by_name(number) -> None:
    with pytest.raises(ValueError, match=r"slot=-?\d+ is out of range: give 0 to 2\*\*31 - 1"):
        as_whole("slot", number)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"room": 1.5}, TypeError, "room=1.5 is of type float: give an integer"),
        ({"sibling": None}, TypeError, "sibling=None is of type NoneType: give an integer"),
        ({"request_id": b"r"}, TypeError, "request_id=b'r' is of type bytes: give a str"),
        ({"request_id": "\ud800"}, ValueError, "cannot be carried as UTF-8: surrogates not allowed"),
        ({"prompt": "digest"}, TypeError, "prompt is of type str: give bytes, a digest of it"),
        ({"prompt": b"x" * 17}, ValueError, "prompt has 17 bytes, at most 16"),
        ({"deadline_s": float("nan")}, ValueError, "deadline_s=nan is out of range"),
    ],
)
def test_a_request_that_no_frame_can_carry_is_refused(given, error, message) -> None:
    with pytest.raises(error, match=message):
        as_request(**(GIVEN | given))


def test_a_request_is_taken_as_plain_values() -> None:
    given = {"room": np.int64(7), "request_id": "größer", "sibling": np.int8(2), "deadline_s": np.float32(2)}
    taken = as_request(**(GIVEN | given))
    assert taken == (7, 2, "größer", 2.0, b"")
    assert [type(one) for one in taken] == [int, int, str, float, bytes]


def test_a_reason_is_a_text() -> None:
    with pytest.raises(TypeError, match="message=5 is of type int: give a str"):
        as_reason(5)

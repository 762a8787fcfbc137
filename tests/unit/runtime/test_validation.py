"""What an engine gives becomes what frames can carry, or is refused by name."""

import numpy as np
import pytest
from pdpool_connector import KVMemory, Region
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.frames import INDICES, MAX_IDS
from pdpool_connector.runtime.validation import as_reason, as_request, as_whole, pack_pages, pack_state

from tests.unit.protocol.sides import open_frame

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


LARGE = KVMemory(
    kv=(Region(2**30, 16, 2 * MAX_IDS),),
    state=(Region(2**40, 16, 2 * MAX_IDS),),
    aux=Region(2**20, 16, 4),
    page_tokens=1,
    layers=1,
    kv_heads=1,
    head_dim=8,
    dtype="float16",
    model="m",
)


@pytest.mark.parametrize(("pack", "field"), [(pack_pages, "pages"), (pack_state, "state")])
def test_more_ids_than_an_offer_carries_are_refused_by_name(pack, field) -> None:
    with pytest.raises(ValueError, match=f"{field} has 524289 ids, one hand-off offers at most 524288"):
        pack(np.arange(MAX_IDS + 1, dtype=np.int32), LARGE, target=True)
    assert len(pack(np.arange(MAX_IDS + 1, dtype=np.int32), LARGE)) > 4 * MAX_IDS, "what is sent may be more"


def test_as_many_as_it_carries_reach_the_other_side() -> None:
    ids = np.arange(MAX_IDS, dtype=np.int32)
    pages, state = pack_pages(ids, LARGE, target=True), pack_state(ids, LARGE, target=True)
    request_id = "\N{GRINNING FACE}" * f.MAX_REQUEST_ID
    offer = open_frame(pages=pages, state=state, request_id=request_id, prompt=bytes(f.PROMPT_BYTES))
    assert f.decode(f.encode(offer)) == offer

"""Arguments of an engine become what frames carry, or are refused by name."""

import numpy as np
import pytest
from pdpool_connector import KVMemory, Region, StatePool
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.frames import INDICES, MAX_IDS
from pdpool_connector.runtime.validation import as_request, as_whole, pack_pages, pack_state, unpacked

GIVEN = {"room": 1, "request_id": "r", "deadline_s": 1.0, "prompt": b""}


@pytest.mark.parametrize("number", [3, np.int64(3), np.int32(3), np.uint8(3)])
def test_integer_of_any_type_becomes_int(number) -> None:
    assert type(as_whole("slot", number)) is int
    assert as_whole("slot", number) == 3


@pytest.mark.parametrize("number", [1.5, 1.0, "1", None, np.float32(1), np.array([1, 2])])
def test_other_than_integer_is_refused_by_name(number) -> None:
    with pytest.raises(TypeError, match=r"slot=.*: give an integer"):
        as_whole("slot", number)


@pytest.mark.parametrize("number", [-1, INDICES, np.uint64(2**63), 2**64])
def test_integer_out_of_range_is_refused_by_name(number) -> None:
    with pytest.raises(ValueError, match=r"slot=-?\d+ is out of range: give 0 to 2\*\*31 - 1"):
        as_whole("slot", number)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"room": 1.5}, TypeError, "room=1.5 is of type float: give an integer"),
        ({"request_id": b"r"}, TypeError, "request_id=b'r' is of type bytes: give a str"),
        ({"request_id": "\ud800"}, ValueError, "cannot be carried as UTF-8: surrogates not allowed"),
        ({"prompt": "digest"}, TypeError, "prompt is of type str: give bytes, a digest of it"),
        ({"prompt": b"x" * 17}, ValueError, "prompt has 17 bytes: give a digest of it, at most 16"),
        ({"deadline_s": float("nan")}, ValueError, "deadline_s=nan is out of range"),
    ],
)
def test_wrong_request_is_refused_by_name(given, error, message) -> None:
    with pytest.raises(error, match=message):
        as_request(**(GIVEN | given))


def test_request_becomes_plain_values() -> None:
    given = {"room": np.int64(7), "request_id": "größer", "deadline_s": np.float32(2)}
    taken = as_request(**(GIVEN | given))
    assert taken == (7, "größer", 2.0, b"")
    assert [type(one) for one in taken] == [int, str, float, bytes]


LARGE = KVMemory(
    kv=(Region(2**30, 16, 2 * MAX_IDS),),
    state=(StatePool("mamba", (Region(2**40, 16, 2 * MAX_IDS),)), StatePool("swa", (Region(2**41, 16, 4),))),
    aux=(Region(2**20, 16, 4),),
    page_tokens=1,
    layers=1,
    kv_heads=1,
    head_dim=8,
    dtype="float16",
    model="m",
)


class Tensor:
    """Has the methods of a tensor on a device, which gives no array itself."""

    def __init__(self, ids) -> None:
        self._ids = np.array(ids)

    def cpu(self):
        return OnHost(self._ids)

    def __array__(self, *_: object, **__: object):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class OnHost:
    """Has the method of a tensor of the host that gives an array."""

    def __init__(self, ids) -> None:
        self._ids = ids

    def __array__(self, dtype=None, copy=None):
        return self._ids if dtype is None else self._ids.astype(dtype)


class Listed:
    """Has `tolist` alone."""

    def tolist(self):
        return [3, 1, 2]


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 2],
        (3, 1, 2),
        [np.int64(3), np.int64(1), np.int64(2)],
        np.array([3, 1, 2], np.int32),
        np.array([3, 1, 2], ">i8"),
        np.array([3, 1, 2], np.uint64),
        np.array([3, 0, 1, 0, 2, 0], np.int32)[::2],
        Tensor([3, 1, 2]),
        Listed(),
    ],
    ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')}",
)
def test_ids_of_any_array_type_are_packed(ids) -> None:
    assert unpacked(pack_pages(ids, LARGE, "prefill")) == [3, 1, 2]


@pytest.mark.parametrize("ids", [[], (), np.zeros(0), np.zeros(0, np.int32)])
def test_no_ids_are_packed_as_nothing(ids) -> None:
    assert pack_pages(ids, LARGE, "decode", target=True) == b""


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1.0], TypeError, "pages holds float64: give integers"),
        ([1, True], TypeError, "pages holds int64: give integers"),
        (np.array([True]), TypeError, "pages holds bool: give integers"),
        ("12", TypeError, "pages is of type str: give a list, tuple, array or tensor"),
        (None, TypeError, "pages is of type NoneType"),
        ([[1], [2, 3]], ValueError, "pages is no list of integers"),
        ([2**64], TypeError, "pages holds object: give integers"),
        (np.array([2**40]), ValueError, "pages holds 1099511627776: decode's memory has pages 0..1048575"),
        (np.array(5), ValueError, "pages has 0 dimensions: give one"),
    ],
)
def test_wrong_ids_are_refused_by_name(ids, error, message) -> None:
    with pytest.raises(error, match=message):
        pack_pages(ids, LARGE, "decode")


def test_state_is_packed_in_order_of_the_pools() -> None:
    packed = pack_state({"swa": [3], "mamba": np.array([1, 2])}, LARGE, "decode", target=True)
    assert [unpacked(ids) for ids in packed] == [[1, 2], [3]]
    assert pack_state({"swa": [3]}, LARGE, "prefill")[0] == b""
    assert pack_state(None, LARGE, "prefill") == (b"", b"")


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ([1], TypeError, "state is of type list: give a mapping from names of state pools"),
        ({"kda": [1]}, ValueError, r"state\['kda'\]: decode's memory has the state pools mamba, swa"),
        ({"swa": [4]}, ValueError, r"state\['swa'\] holds 4: decode's memory has items 0\.\.3"),
        ({"swa": [1, 1]}, ValueError, r"state\['swa'\] holds 1 twice"),
    ],
)
def test_wrong_state_is_refused_by_name(state, error, message) -> None:
    with pytest.raises(error, match=message):
        pack_state(state, LARGE, "decode", target=True)


def test_more_ids_than_an_offer_carries_are_refused() -> None:
    ids = np.arange(MAX_IDS + 1, dtype=np.int32)
    with pytest.raises(ValueError, match="pages has 524289 ids: one hand-off offers at most 524288"):
        pack_pages(ids, LARGE, "decode", target=True)
    with pytest.raises(ValueError, match=r"state\['mamba'\] has 524289 ids: one hand-off offers at most 524288"):
        pack_state({"mamba": ids}, LARGE, "decode", target=True)
    assert len(pack_pages(ids, LARGE, "prefill")) > 4 * MAX_IDS, "what is sent may be more"


def test_largest_offer_reaches_the_other_side() -> None:
    ids = np.arange(MAX_IDS, dtype=np.int32)
    offer = f.Offer(
        version=f.VERSION_MAX,
        sender="d" * 32,
        attempt=f.AttemptId("d" * 32, 1),
        room=1,
        pages=pack_pages(ids, LARGE, "decode", target=True),
        prefix_pages=0,
        aux_slot=0,
        state=pack_state({"mamba": ids}, LARGE, "decode", target=True),
    )
    assert f.decode(f.encode(offer)) == offer

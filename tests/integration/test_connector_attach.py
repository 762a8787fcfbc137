"""What goes with the rooms of one connector, staging or a prefetch: the end of one room's leaves the others' alone."""

import numpy as np
import pytest
from pdpool_connector import Cause, DecodeConnector, Phase, PrefillConnector

from tests.integration.small_side import Side, until


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


@pytest.fixture(params=["nixl", "mooncake"])
def pair(request):
    prefill = Side(PrefillConnector, pages=16, backend=request.param)
    decode = Side(DecodeConnector, pages=16, backend=request.param)
    yield prefill.connector, decode.connector
    decode.close()
    prefill.close()


@pytest.mark.parametrize("aborter", ["prefill", "decode"])
def test_a_room_that_is_aborted_or_fails_gives_back_what_goes_with_it_and_no_other_rooms(pair, aborter: str) -> None:
    prefill, decode = pair
    released: list[tuple[int, str, str]] = []
    halves = {}
    for room in (1, 2, 3):
        sent = prefill.open(room, f"{room}")
        got = decode.open(prefill.bootstrap_address, room, f"{room}", pages=ids(2 * room, 2 * room + 1), aux_slot=room)
        halves[room] = {"prefill": sent, "decode": got}
        for role, half in halves[room].items():
            for what in ("staging", "prefetch"):
                half.attach(lambda mark=(room, role, what): released.append(mark))
        sent.send(ids(room), start=0)
        until(lambda got=got: got.status.phase is Phase.TRANSFERRING)

    def of(*rooms: int) -> list[tuple[int, str, str]]:
        return [(room, role, what) for room in rooms for role in halves[room] for what in ("staging", "prefetch")]

    assert not released
    halves[1][aborter].abort("the client left")
    until(lambda: len(released) == 4)
    assert sorted(released) == sorted(of(1))
    halves[2]["prefill"].send(ids(8, 9), start=1, last=True)  # more than decode has pages for
    until(lambda: len(released) == 8)
    assert sorted(released) == sorted(of(1, 2))
    assert {half.status.cause for half in halves[2].values()} == {Cause.INVALID}
    assert not any(half.status.ended for half in halves[3].values())
    halves[3]["prefill"].send(ids(4), start=1, last=True)
    until(lambda: len(released) == 12)
    assert sorted(released) == sorted(of(1, 2, 3)), "each once"
    assert {half.status.phase for half in halves[3].values()} == {Phase.DONE}

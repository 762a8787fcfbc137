"""What an engine attaches to a hand-off, as staging or a prefetch, is released with that hand-off alone."""

import pytest
from pdpool_connector import Cause, DecodeConnector, Phase, PrefillConnector

from tests.integration.small_side import Side, offer, until


@pytest.fixture(params=["nixl", "mooncake"])
def pair(request):
    prefill = Side(PrefillConnector, pages=16, backend=request.param)
    decode = Side(DecodeConnector, pages=16, backend=request.param)
    yield prefill, decode
    decode.close()
    prefill.close()


@pytest.mark.parametrize("aborter", ["prefill", "decode"])
def test_end_of_one_room_releases_only_its_attachments(pair, aborter: str) -> None:
    prefill, decode = pair
    released: list[tuple[int, str, str]] = []
    halves = {}
    for room in (1, 2, 3):
        sent = prefill.connector.open(room, "r")
        got = offer(decode, prefill, room, [2 * room, 2 * room + 1], aux_slot=room)
        halves[room] = {"prefill": sent, "decode": got}
        for role, half in halves[room].items():
            for what in ("staging", "prefetch"):
                half.attach(lambda mark=(room, role, what): released.append(mark))
        sent.send([room], start=0)
        until(lambda sent=sent: sent.status.phase is Phase.TRANSFERRING)

    def of(*rooms: int) -> list[tuple[int, str, str]]:
        return [(room, role, what) for room in rooms for role in halves[room] for what in ("staging", "prefetch")]

    assert not released
    halves[1][aborter].abort("the client left")
    until(lambda: len(released) == 4)
    assert sorted(released) == sorted(of(1))
    halves[2]["prefill"].send([8, 9], start=1, last=True)  # more than decode has pages for
    until(lambda: len(released) == 8)
    assert sorted(released) == sorted(of(1, 2))
    assert {half.status.cause for half in halves[2].values()} == {Cause.INVALID}
    assert not any(half.status.ended for half in halves[3].values())
    halves[3]["prefill"].send([4], start=1, last=True)
    until(lambda: len(released) == 12)
    assert sorted(released) == sorted(of(1, 2, 3)), "each once"
    assert {half.status.phase for half in halves[3].values()} == {Phase.DONE}

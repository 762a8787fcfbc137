"""The data connections end while both processes and the control channel live: the pair works again."""

import time

import pytest

from tests.integration.connector_peer import Side
from tests.integration.handoffs import end_data_connections, fill, open_both

BACK_WITHIN_S = 20.0
"""From the cut to the first hand-off that goes through; several connections may have to be found broken first."""


@pytest.fixture(params=["nixl", "mooncake"])
def pair(request, sides, monkeypatch) -> tuple[Side, Side]:
    monkeypatch.setenv("UCX_TLS", "tcp")  # over CMA, NIXL does without the connections that are ended
    prefill, decode = (sides(role, request.param) for role in ("prefill", "decode"))
    fill(prefill, 1)
    return prefill, decode


def hand_off(prefill: Side, decode: Side, room: int) -> bool:
    """Whether it was done, with the right bytes. Each uses pages of its own: those of a failed one are held."""
    name, pages = f"r{room}", [2 * room, 2 * room + 1]
    open_both(prefill, decode, room, name=name, pages=pages)
    prefill.until(name, "ready")
    prefill.send(name, [1, 2])
    if decode.until(name, "ended")["phase"] == "failed":
        assert decode.status(name)["cause"] == "transfer_failed"
        return False
    assert (decode.pages[:, pages] == prefill.pages[:, [1, 2]]).all()
    return True


def test_pair_recovers_after_data_connections_end(pair) -> None:
    assert hand_off(*pair, room=1)
    assert sum(end_data_connections(side, *pair) for side in pair)
    cut_at, room = time.monotonic(), 2
    while not hand_off(*pair, room=room):
        assert time.monotonic() - cut_at < BACK_WITHIN_S, "the pair moves nothing"
        time.sleep(0.5)  # an engine's next request comes no sooner, and there are pages for 30 of them
        room += 1
    assert all(hand_off(*pair, room=later) for later in (room + 1, room + 2, room + 3))

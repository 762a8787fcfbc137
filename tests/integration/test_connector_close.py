"""`close` while frames to the peer get lost: they are repeated, and the answer is waited for."""

import signal

import pytest

from tests.integration.connector_peer import Side
from tests.integration.handoffs import TIMEOUTS, fill, open_both

AGREED_S = 15.0
"""Within this the two sides agree, though the first frame was lost."""
CLOSE_S = 4 * AGREED_S
"""Half of it is for hand-offs; so it does not end because it gives up."""
PATIENT = {**TIMEOUTS, "quiesce_s": CLOSE_S}


@pytest.fixture
def pair(sides) -> tuple[Side, Side]:
    """A hand-off "r" whose memory decode has offered."""
    prefill, decode = (sides(role, timeouts=PATIENT) for role in ("prefill", "decode"))
    fill(prefill, 1)
    open_both(prefill, decode, 7)
    prefill.until("r", "ready")
    return prefill, decode


def close_and_lose(side: Side, kind: str) -> None:
    """Let it close; its first frame of a kind is lost. Take its `answer` later."""
    side.call("faults", delays={kind: None}, count=1)
    side.post("close", timeout_s=CLOSE_S)


def ends_as_lost(side: Side, closing: str) -> dict:
    """The half of `side` ends by the result of the other one, not by its goodbye."""
    status = side.until("r", "ended", within_s=AGREED_S)
    assert (status["cause"], status["message"]) == ("peer_lost", f"{closing} is shutting down")
    return status


def check_closed(side: Side, kind: str) -> None:
    """It waited for the answer, which gave its pages back."""
    closed = side.answer()
    assert closed["lost"] == {kind: 1}
    assert closed["seconds"] < AGREED_S
    half = closed["halves"]["r"]
    assert (half["cause"], half["releasable"]) == ("shutdown", True)


def test_decode_closes_after_repeating_lost_abort(pair) -> None:
    prefill, decode = pair
    close_and_lose(decode, "Abort")
    ends_as_lost(prefill, "decode")
    check_closed(decode, "Abort")


def test_prefill_closes_after_its_write_has_ended(pair) -> None:
    """Only the settled result gives decode's pages back."""
    prefill, decode = pair
    prefill.call("hold_writes")
    prefill.send("r", [1], last=False)
    prefill.settle(lambda stats: stats["held_writes"] == 1)
    close_and_lose(prefill, "Ended")
    try:
        assert not ends_as_lost(decode, "prefill")["releasable"]
    finally:
        prefill.signal(signal.SIGUSR1)  # the write goes on
    assert decode.until("r", "releasable", within_s=AGREED_S)
    check_closed(prefill, "Ended")


def test_prefill_closes_after_repeating_lost_result(pair) -> None:
    prefill, decode = pair
    close_and_lose(prefill, "Ended")
    assert decode.until("r", "releasable", within_s=AGREED_S)
    ends_as_lost(decode, "prefill")
    check_closed(prefill, "Ended")

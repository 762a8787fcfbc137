"""`close` while the peer does not hear at first: it is told again, and what it answers is waited for."""

import signal

import pytest

from tests.integration.connector_peer import Side
from tests.integration.handoffs import TIMING, fill

AGREED_S = 15.0
"""Within this a side that is closed has been heard and answered, though its first word was lost."""
CLOSE_S = 4 * AGREED_S
"""Half of it is for hand-offs; so it does not end because it gives up."""
PATIENT = {**TIMING, "drain_s": CLOSE_S}


def met(sides, direction: str) -> tuple[Side, Side]:
    """A hand-off "r" to which prefill has a page to give, and another that it has not computed."""
    prefill, decode = (sides(role, direction=direction, timing=PATIENT) for role in ("prefill", "decode"))
    fill(prefill, 1)
    prefill.open("r", 7)
    decode.open("r", 7, prefill=prefill.bootstrap, pages=[8, 3], aux_slot=5)
    prefill.until("r", "ready")
    return prefill, decode


def close_unheard(side: Side, word: str) -> None:
    """Let it close; the first frame `word` that it says is lost. Its `answer` is still to be taken."""
    side.call("lose", kind=word, count=1)
    side.post("close", timeout_s=CLOSE_S)


def is_told(side: Side, role: str) -> dict:
    """The half of `side` ends by what the other one said of it, not by its goodbye."""
    status = side.until("r", "ended", within_s=AGREED_S)
    assert (status["cause"], status["message"]) == ("peer_lost", f"{role} is shutting down")
    return status


def has_closed(side: Side, word: str) -> None:
    """It waited for the answer, and with it no page of its is left back."""
    closed = side.answer()
    assert closed["lost"] == {word: 1}
    assert closed["seconds"] < AGREED_S
    half = closed["halves"]["r"]
    assert (half["cause"], half["releasable"]) == ("shutdown", True)


@pytest.mark.parametrize(
    ("direction", "role", "word"),
    [("write", "decode", "Abort"), ("read", "prefill", "Abort")],
    ids=["decode", "prefill that is read from"],
)
def test_who_closes_repeats_what_was_lost_until_the_other_has_answered(sides, direction, role, word) -> None:
    """Only the answer gives the pages of the one that closes back."""
    prefill, decode = met(sides, direction)
    if direction == "read":
        prefill.send("r", [1], last=False)
        decode.until("r", "transferring")
    closing, other = (decode, prefill) if role == "decode" else (prefill, decode)
    close_unheard(closing, word)
    assert other.until("r", "releasable", within_s=AGREED_S)
    is_told(other, role)
    has_closed(closing, word)


@pytest.mark.parametrize(
    ("direction", "role"), [("write", "prefill"), ("read", "decode")], ids=["prefill", "decode that reads"]
)
def test_who_closes_while_it_moves_bytes_says_so_again_and_stays_until_they_have_ended(sides, direction, role) -> None:
    """Only its last word gives the pages of the other back."""
    prefill, decode = met(sides, direction)
    closing, other = (decode, prefill) if role == "decode" else (prefill, decode)
    closing.call("heed_release")
    closing.call("hold_writes")
    prefill.send("r", [1], last=False)
    closing.settle(lambda stats: stats["held_writes"] == 1)
    close_unheard(closing, "Failed")
    try:
        assert not is_told(other, role)["releasable"]
    finally:
        closing.signal(signal.SIGUSR1)
    assert other.until("r", "releasable", within_s=AGREED_S)
    is_told(other, role)
    has_closed(closing, "Failed")


@pytest.mark.parametrize(
    ("direction", "role"), [("write", "prefill"), ("read", "decode")], ids=["prefill", "decode that reads"]
)
def test_who_closes_with_nothing_under_way_repeats_its_only_word_until_it_is_heard(sides, direction, role) -> None:
    prefill, decode = met(sides, direction)
    closing, other = (decode, prefill) if role == "decode" else (prefill, decode)
    close_unheard(closing, "Drained")
    assert other.until("r", "releasable", within_s=AGREED_S)
    is_told(other, role)
    has_closed(closing, "Drained")

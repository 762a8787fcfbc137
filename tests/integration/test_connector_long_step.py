"""Decode aborts while the thread of prefill's scheduler is in a long step: nothing waits for that thread."""

import signal

import numpy as np
import pytest

from tests.integration.cable import ask
from tests.integration.connector_peer import Side
from tests.integration.handoffs import fill, open_both, settle_empty
from tests.waiting import until

FIRST, SECOND = 8, 3
CHUNK_BYTES = 4 * 512
"""The chunk that was sent before the abort: a page of each region."""


@pytest.fixture(params=["nixl", "mooncake"])
def pair(sides, request):
    prefill, decode = sides("prefill", request.param), sides("decode", request.param)
    fill(prefill, 1)
    return prefill, decode


def begin_a_step(prefill: Side) -> None:
    """From now on its only scheduler's thread computes, and looks at nothing until its next order."""
    assert prefill.call("step", within_s=60.0) == {"stepping": True}


def send_the_next_chunk(prefill: Side) -> dict:
    """End the step by what an engine does next that has not looked yet; how the step ended."""
    prefill.post("send", name="r", pages=[2], start=1, last=True, aux_slot=4)
    step = prefill.answer()
    assert prefill.answer() == {}
    assert step["ended"]
    return step


def check_nothing_moves(prefill: Side, decode: Side) -> None:
    """What decode gave back stays as it is, though a later hand-off in the same room is done."""
    prefill.until("r", "releasable")  # decode may learn of it first
    status = prefill.status("r")
    assert (status["phase"], status["cause"]) == ("failed", "peer_aborted")
    open_both(prefill, decode, 7, name="next", pages=[20, 21])
    prefill.send("next", [5, 6], aux_slot=3)
    moved = decode.until("next", "done")["bytes_moved"]
    prefill.until("next", "done")
    assert (decode.pages[:, [20, 21]] == prefill.pages[:, [5, 6]]).all()
    assert not np.delete(decode.pages, [20, 21], axis=1).any(), "pages were written after their release"
    assert not np.delete(decode.aux, 20, axis=0).any()
    prefill.settle(lambda stats: stats["bytes_moved_total"] == CHUNK_BYTES + moved)
    settle_empty(prefill, decode)
    assert prefill.status("r") == status


def test_abort_during_long_step_frees_pages_at_once(pair) -> None:
    prefill, decode = pair
    open_both(prefill, decode, 7, pages=(FIRST, SECOND))
    prefill.send("r", [1], last=False)
    prefill.settle(lambda stats: stats["bytes_moved_total"] == CHUNK_BYTES)
    begin_a_step(prefill)
    decode.abort("r")
    free = decode.until("r", "releasable")
    assert free["cause"] == "aborted"
    until(lambda: ask(prefill.admin, "/v1/state")["causes"] == {"peer_aborted": 1})
    assert ask(prefill.admin, "/v1/state")["holds"] == 0
    decode.pages[:] = decode.aux[:] = 0
    assert send_the_next_chunk(prefill)["at"] > free["at"]
    check_nothing_moves(prefill, decode)


def test_abort_during_long_step_waits_for_its_chunk(pair) -> None:
    prefill, decode = pair
    open_both(prefill, decode, 7, pages=(FIRST, SECOND))
    prefill.until("r", "ready")
    prefill.call("hold_writes")
    prefill.send("r", [1], last=False)
    prefill.settle(lambda stats: stats["held_writes"] == 1)
    begin_a_step(prefill)
    decode.abort("r")
    decode.until("r", "ended")
    decode.settle(lambda stats: stats["holds"] == 1)
    assert not decode.status("r")["releasable"]
    assert not decode.pages.any()
    prefill.signal(signal.SIGUSR1)  # the chunk goes on; the step does not end by it
    free = decode.until("r", "releasable")
    assert free["cause"] == "aborted"
    assert (decode.pages[:, FIRST] == prefill.pages[:, 1]).all(), "acknowledged before it had landed"
    decode.pages[:] = decode.aux[:] = 0
    assert send_the_next_chunk(prefill)["at"] > free["at"]
    check_nothing_moves(prefill, decode)

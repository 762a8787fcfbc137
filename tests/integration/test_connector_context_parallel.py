"""Context parallel ranks of prefill, all with the cache of all tokens: replicas, each of which every hand-off needs."""

import numpy as np
import pytest
from pdpool_connector import Phase

from tests.integration.handoffs import TIMING
from tests.integration.instances import (
    AUX_FROM,
    SOURCE,
    TARGET,
    Instance,
    check_bytes,
    hand_over,
    meet,
    shape,
)

PREFILL = shape([2, 1], tp=2, cp=2)
"""Ranks 0..3 are stage 0 with heads 0..1 and 2..3, stage 1 with these; ranks 4..7 are the same once more."""
DECODE = {"TP 1": shape([3]), "TP 4": shape([3], tp=4), "PP 2 x TP 2": shape([1, 2], tp=2)}
WRITERS = {
    "TP 1": [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3]],
    "TP 4": [[0, 4, 1, 5], [0, 4, 1, 5], [2, 6, 3, 7]],
    "PP 2 x TP 2": [[0, 0, 1, 1], [4, 4, 5, 5], [2, 2, 3, 3]],
}
"""By layer and head: which rank of prefill writes them."""
LATE = 4
LATE_FOR = {"TP 1": 0, "TP 4": 1}
"""The decode rank that rank `LATE` serves: one with nothing to write, the other with layers 0 and 1 of its head."""
WITH_LATE = 6
"""It serves the same decode rank of TP 4 as `LATE`, from the other stage."""
PATIENT = TIMING | {"verdict_s": 120.0}
"""An end that nobody acknowledges is not forgotten within any wait of these tests."""


@pytest.fixture(params=LATE_FOR)
def late(request, instances) -> tuple[Instance, Instance, int]:
    """Prefill, whose rank `LATE` comes last, decode, and the rank of decode that waits for it."""
    prefill = instances("prefill", "local", PREFILL, timing=PATIENT)
    return prefill, instances("decode", "local", DECODE[request.param]), LATE_FOR[request.param]


def others_are_heard(prefill: Instance) -> None:
    """Every rank but the late one has ended its hand-off, and decode has acknowledged it."""
    for rank, side in enumerate(prefill.ranks):
        if rank != LATE:
            side.until("r", "releasable")
            side.settle(lambda stats: stats["rows"] == 0)


def filtered(side) -> int:
    return side.stats()["drops"].get("filtered", 0)


@pytest.mark.parametrize(
    ("ours", "backend", "direction"),
    [*((ours, "local", "write") for ours in DECODE), ("TP 4", "local", "read"), ("TP 4", "nixl", "write")],
)
def test_of_replicas_one_is_taken_for_each_decode_rank_and_every_byte_is_right(
    instances, ours: str, backend: str, direction: str
) -> None:
    prefill = instances("prefill", backend, PREFILL, direction=direction)
    decode = instances("decode", backend, DECODE[ours], direction=direction)
    check_bytes(prefill, decode, hand_over(prefill, decode, 7, "r"))
    for rank, side in enumerate(prefill.ranks):
        side.cells[:] = rank + 1
    meet(prefill, decode, 8, "who")
    prefill.send("who", SOURCE, aux_slot=AUX_FROM)
    decode.until("who", "done")
    prefill.until("who", "done")
    wrote = np.array(WRITERS[ours])
    for side, part in zip(decode.ranks, decode.parts, strict=True):
        found = side.cells[:, :, TARGET].swapaxes(1, 4)  # layer, head, page, token, K or V, byte
        expected = wrote[part.first_layer : part.layer_end, part.first_head : part.head_end] + 1
        assert (found == expected[:, :, None, None, None, None]).all()
    for instance in (prefill, decode):
        instance.settle_empty()


@pytest.mark.parametrize("why", ["its engine has sent no page", "its word is lost"])
def test_nothing_is_done_before_the_last_context_parallel_rank_has_said_so(late, why: str) -> None:
    prefill, decode, waiting = late
    whole = prefill.fill(1)
    slow = prefill.ranks[LATE]
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    slow.call("faults", delays={"Done": None})
    for rank, side in enumerate(prefill.ranks):
        if rank != LATE or why == "its word is lost":
            side.send("r", SOURCE, aux_slot=AUX_FROM)
    if why == "its word is lost":
        slow.until("r", "done")
        slow.settle(lambda _: filtered(slow) > 2)
    others_are_heard(prefill)
    for rank, side in enumerate(decode.ranks):
        if rank != waiting:
            side.until("r", "done")
    status = decode.ranks[waiting].status("r")
    assert status["phase"] in ("waiting", "transferring")
    assert not status["releasable"]
    assert decode.verdict("r", 7).phase is not Phase.DONE

    slow.call("faults", delays={})
    if why != "its word is lost":
        slow.send("r", SOURCE, aux_slot=AUX_FROM)
    decode.until("r", "done")
    prefill.until("r", "done")
    check_bytes(prefill, decode, whole)
    for instance in (prefill, decode):
        instance.settle_empty()


@pytest.mark.parametrize("backend", ["local", "nixl"])
def test_an_abort_gives_no_page_back_while_one_context_parallel_rank_still_writes(instances, backend: str) -> None:
    prefill = instances("prefill", backend, PREFILL, timing=PATIENT)
    decode = instances("decode", backend, DECODE["TP 4"])
    prefill.fill(1)
    quick, slow, target = prefill.ranks[WITH_LATE], prefill.ranks[LATE], decode.ranks[LATE_FOR["TP 4"]]
    for side in (quick, slow):
        side.call("hold_writes")
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.send("r", SOURCE, aux_slot=AUX_FROM)
    for side in (quick, slow):
        side.settle(lambda stats: stats["held_writes"] == 1)
    for side in decode.ranks:
        if side is not target:
            side.until("r", "done")
    decode.abort("r")
    for side in (quick, slow):
        told = side.until("r", "ended")
        assert (told["cause"], told["releasable"]) == ("peer_aborted", False)
    quick.call("release_writes")
    others_are_heard(prefill)
    target.settle(lambda stats: stats["holds"] == 1)
    assert not target.status("r")["releasable"]
    verdict = decode.verdict("r", 7)
    assert (verdict.phase, verdict.rank, verdict.releasable) == (Phase.FAILED, LATE_FOR["TP 4"], False)
    assert not target.cells[:2, :, TARGET].any(), "the late rank has yet to write"

    slow.call("release_writes")
    assert target.until("r", "releasable")["cause"] == "aborted"
    assert slow.until("r", "releasable")["cause"] == "peer_aborted"
    assert np.array_equal(target.cells[:2, :, TARGET], slow.cells[:, :, SOURCE][..., 1:, :]), (
        "late, and before the word"
    )
    assert decode.verdict("r", 7).releasable
    for instance in (prefill, decode):
        instance.settle_empty()


@pytest.mark.parametrize("lost", ["Abort", "Drained"])
def test_a_lost_abort_or_answer_is_repeated_until_every_context_parallel_rank_has_answered(late, lost: str) -> None:
    prefill, decode, waiting = late
    slow, target = prefill.ranks[LATE], decode.ranks[waiting]
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    mute = target if lost == "Abort" else slow
    mute.call("faults", delays={lost: None})
    for side in decode.ranks:
        side.abort("r")
    if lost == "Drained":
        others_are_heard(prefill)
    mute.settle(lambda _: filtered(mute) > 2)
    assert slow.status("r")["phase"] == ("ready" if lost == "Abort" else "failed")
    status = target.status("r")
    assert (status["cause"], status["releasable"]) == ("aborted", False)
    mute.call("faults", delays={})
    assert target.until("r", "releasable")["cause"] == "aborted"
    for rank, side in enumerate(prefill.ranks):
        assert side.until("r", "releasable")["cause"] == "peer_aborted", rank
    meet(prefill, decode, 7, "again")
    prefill.send("again", SOURCE, aux_slot=AUX_FROM)
    decode.until("again", "done")
    prefill.until("again", "done")
    for instance in (prefill, decode):
        instance.settle_empty()

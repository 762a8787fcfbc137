"""Context parallel ranks of prefill that all hold the cache of all tokens: every hand-off needs each of them."""

import numpy as np
import pytest
from pdpool_connector import Phase

from tests.integration.handoffs import TIMEOUTS
from tests.integration.instances import (
    AUX_FROM,
    SOURCE,
    TARGET,
    Instance,
    check_bytes,
    hand_over,
    open_both,
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
PATIENT = TIMEOUTS | {"result_s": 120.0}
"""A result that decode does not acknowledge outlives these tests."""


@pytest.fixture(params=LATE_FOR)
def late(request, instances) -> tuple[Instance, Instance, int]:
    """Prefill, whose rank `LATE` comes last, decode, and the rank of decode that waits for it."""
    prefill = instances("prefill", "local", PREFILL, timeouts=PATIENT)
    return prefill, instances("decode", "local", DECODE[request.param]), LATE_FOR[request.param]


def until_others_end(prefill: Instance) -> None:
    """Every rank but the late one has ended its hand-off, and decode has acknowledged it."""
    for rank, side in enumerate(prefill.ranks):
        if rank != LATE:
            side.until("r", "releasable")
            side.settle(lambda stats: stats["rows"] == 0)


@pytest.mark.parametrize(("ours", "backend"), [("TP 1", "local"), ("PP 2 x TP 2", "local"), ("TP 4", "nixl")])
def test_one_replica_writes_to_each_decode_rank(instances, ours: str, backend: str) -> None:
    prefill = instances("prefill", backend, PREFILL)
    decode = instances("decode", backend, DECODE[ours])
    check_bytes(prefill, decode, hand_over(prefill, decode, 7, "r"))
    for rank, side in enumerate(prefill.ranks):
        side.cells[:] = rank + 1
    open_both(prefill, decode, 8, "who")
    prefill.send("who", SOURCE, aux_slot=AUX_FROM)
    decode.until("who", "done")
    prefill.until("who", "done")
    wrote = np.array(WRITERS[ours])
    for side, shard in zip(decode.ranks, decode.shards, strict=True):
        found = side.cells[:, :, TARGET].swapaxes(1, 4)  # layer, head, page, token, K or V, byte
        expected = wrote[shard.first_layer : shard.layer_end, shard.first_head : shard.head_end] + 1
        assert (found == expected[:, :, None, None, None, None]).all()
    for instance in (prefill, decode):
        instance.settle_empty()


@pytest.mark.parametrize("why", ["its engine has sent no page", "its result is lost"])
def test_decode_waits_for_the_last_context_rank(late, why: str) -> None:
    prefill, decode, waiting = late
    whole = prefill.fill(1)
    slow = prefill.ranks[LATE]
    open_both(prefill, decode, 7)
    prefill.until("r", "ready")
    slow.lose("Ended")
    for rank, side in enumerate(prefill.ranks):
        if rank != LATE or why == "its result is lost":
            side.send("r", SOURCE, aux_slot=AUX_FROM)
    if why == "its result is lost":
        slow.until("r", "done")
        slow.settle(lambda stats: stats["lost"].get("Ended", 0) > 2)
    until_others_end(prefill)
    for rank, side in enumerate(decode.ranks):
        if rank != waiting:
            side.until("r", "done")
    status = decode.ranks[waiting].status("r")
    assert (status["phase"], status["releasable"]) == ("transferring", False)
    assert decode.agreed("r", 7).phase is not Phase.DONE

    slow.lose()
    if why != "its result is lost":
        slow.send("r", SOURCE, aux_slot=AUX_FROM)
    decode.until("r", "done")
    prefill.until("r", "done")
    check_bytes(prefill, decode, whole)
    for instance in (prefill, decode):
        instance.settle_empty()


@pytest.mark.parametrize("backend", ["local", "nixl"])
def test_abort_holds_pages_while_one_replica_writes(instances, backend: str) -> None:
    prefill = instances("prefill", backend, PREFILL, timeouts=PATIENT)
    decode = instances("decode", backend, DECODE["TP 4"])
    prefill.fill(1)
    quick, slow, target = prefill.ranks[WITH_LATE], prefill.ranks[LATE], decode.ranks[LATE_FOR["TP 4"]]
    for side in (quick, slow):
        side.call("hold_writes")
    open_both(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.send("r", SOURCE, aux_slot=AUX_FROM)
    for side in (quick, slow):
        side.settle(lambda stats: stats["held_writes"] == 1)
    for side in decode.ranks:
        if side is not target:
            side.until("r", "done")
    decode.abort("r")
    for side in (quick, slow):
        status = side.until("r", "ended")
        assert (status["cause"], status["releasable"]) == ("peer_aborted", False)
    quick.call("release_writes")
    until_others_end(prefill)
    target.settle(lambda stats: stats["holds"] == 1)
    assert not target.status("r")["releasable"]
    agreed = decode.agreed("r", 7)
    assert (agreed.phase, agreed.rank, agreed.releasable) == (Phase.FAILED, LATE_FOR["TP 4"], False)
    assert not target.cells[:2, :, TARGET].any(), "the late rank has yet to write"

    slow.call("release_writes")
    assert target.until("r", "releasable")["cause"] == "aborted"
    assert slow.until("r", "releasable")["cause"] == "peer_aborted"
    written = slow.cells[:, :, SOURCE][..., 1:, :]
    assert np.array_equal(target.cells[:2, :, TARGET], written), "released before the late write had landed"
    assert decode.agreed("r", 7).releasable
    for instance in (prefill, decode):
        instance.settle_empty()


@pytest.mark.parametrize("lost", ["Abort", "Ended"])
def test_lost_frame_of_abort_is_repeated_to_replicas(late, lost: str) -> None:
    prefill, decode, waiting = late
    slow, target = prefill.ranks[LATE], decode.ranks[waiting]
    open_both(prefill, decode, 7)
    prefill.until("r", "ready")
    losing = target if lost == "Abort" else slow
    losing.lose(lost)
    for side in decode.ranks:
        side.abort("r")
    if lost == "Ended":
        until_others_end(prefill)
    losing.settle(lambda stats: stats["lost"].get(lost, 0) > 2)
    assert slow.status("r")["phase"] == ("ready" if lost == "Abort" else "failed")
    status = target.status("r")
    assert (status["cause"], status["releasable"]) == ("aborted", False)
    losing.lose()
    assert target.until("r", "releasable")["cause"] == "aborted"
    for rank, side in enumerate(prefill.ranks):
        assert side.until("r", "releasable")["cause"] == "peer_aborted", rank
    open_both(prefill, decode, 7, "again")
    prefill.send("again", SOURCE, aux_slot=AUX_FROM)
    decode.until("again", "done")
    prefill.until("again", "done")
    for instance in (prefill, decode):
        instance.settle_empty()

"""H1-H6, H8-H11: silent corruption of the cache, or output that is wrong and looks right."""

import signal
import time
from typing import Any

import numpy as np
from pdpool_connector.protocol import frames as f
from pdpool_connector.runtime.worker import IN_FLIGHT

from proof.hazards.raw import RawDecode, refused_by_api
from proof.hazards.stage import CANARY, QUIESCE_S, NotApplicableError, Stage, hazard
from tests.integration.cable import Cable
from tests.integration.handoffs import offer, open_both


@hazard(1, "an abort counts as settled too early when its room is used again")
def room_reuse_while_draining(stage: Stage) -> str:
    prefill, decode = stage.prefill, stage.decode
    first, room = stage.write_on_its_way(pages=[8, 3])
    decode.abort(first)
    prefill.until(first, "ended")
    second, _ = stage.open_both(room=room, pages=[20, 21])
    prefill.until(second, "ready")
    prefill.send(second, [4, 5], aux_slot=1)
    stage.held(2)
    decode.abort(second)
    prefill.until(second, "ended")
    stage.stays_held(decode, first, second, for_s=2 * QUIESCE_S)
    assert stage.blank([8, 3, 20, 21])
    prefill.call("release_writes", number=1)
    decode.until(first, "releasable")
    assert stage.same([1, 2], [8, 3])
    stage.stays_held(decode, second, for_s=0.5)  # the end of the first write is none of the second's
    assert stage.blank([20, 21])
    prefill.call("release_writes")
    decode.until(second, "releasable")
    assert stage.same([4, 5], [20, 21])
    return "two attempts of one room drained apart; each was released after its own bytes had landed"


@hazard(2, "a queued chunk of an old request is written into the pages of a new one")
def stale_chunk(stage: Stage) -> str:
    prefill, decode = stage.prefill, stage.decode
    prefill.call("hold_writes")
    before = [stage.open_both(pages=[page])[0] for page in range(30, 30 + IN_FLIGHT)]
    for count, name in enumerate(before, start=1):
        prefill.send(name, [7])
        stage.held(count)  # one by one, for small writes that wait together go out as one
    first, room = stage.open_both(pages=[8, 3])
    prefill.until(first, "ready")
    prefill.send(first, [1, 2])
    decode.abort(first)
    prefill.until(first, "ended")
    second, _ = stage.open_both(room=room, pages=[20, 21])
    prefill.until(second, "ready")
    prefill.send(second, [4, 5], aux_slot=1)
    assert prefill.stats()["held_writes"] == IN_FLIGHT, "the first one's chunk did not wait in the queue"
    prefill.call("release_writes")
    for name in (*before, second):
        decode.until(name, "done")
    decode.until(first, "releasable")
    assert stage.same([4, 5], [20, 21]), "the new attempt got foreign bytes"
    decode.pages[:, [8, 3]] = CANARY
    time.sleep(0.5)  # the interval in which stale writes would come
    assert stage.blank([8, 3]), "pages were written after their release"
    return "the new attempt holds its own bytes; nothing came into the old pages after their release"


@hazard(3, "the end of an old write makes a request done that has sent nothing")
def false_success(stage: Stage) -> str:
    prefill, decode = stage.prefill, stage.decode
    first, room = stage.write_on_its_way(pages=[8, 3])
    decode.abort(first)
    prefill.until(first, "ended")
    second, _ = stage.open_both(room=room, pages=[20, 21])
    prefill.until(second, "ready")
    prefill.call("release_writes")
    decode.until(first, "releasable")
    for side in (prefill, decode):
        assert side.status(second)["phase"] != "done", "done before anything was sent"
    assert stage.blank([20, 21])
    prefill.send(second, [4, 5], aux_slot=1)
    decode.until(second, "done")
    assert stage.same([4, 5], [20, 21])
    return "the new attempt stayed open until its own pages had come"


@hazard(4, "pages are released on a timeout, without proof")
def release_by_timeout(stage: Stage) -> str:
    prefill, decode = stage.prefill, stage.decode
    name, _ = stage.write_on_its_way(deadline_s=4.0)
    assert decode.until(name, "ended")["cause"] == "timed_out"
    stats = decode.settle(lambda stats: stats["holds"] == 1)
    assert stats["held_bytes"] > 0
    stage.stays_held(decode, name, for_s=2 * QUIESCE_S)
    assert stage.blank([8, 3])
    prefill.call("release_writes")
    decode.until(name, "releasable")
    assert stage.same([1, 2], [8, 3]), "released before the late bytes had landed"
    large = {"layers": [32], "heads": 64}  # 80 MiB a hand-off, so that most stops meet a write under way
    prefill, decode = stage.extra("prefill", shape=large), stage.extra("decode", shape=large)
    prefill.pages[:] = np.random.default_rng(1).integers(1, 100, prefill.pages.shape, np.uint8)
    ends = [_stopped_at_a_random_point(stage, prefill, decode) for _ in range(8)]
    assert "held" in ends, "prefill was never stopped before its writes had ended: this shows nothing"
    return (
        "held through deadline and quiesce_s; released when the late write had landed; of 8 hand-offs whose prefill "
        f"was stopped at some point, {ends.count('held')} were held until it went on, {ends.count('over')} were over"
    )


def _stopped_at_a_random_point(stage: Stage, prefill: Any, decode: Any) -> str:  # noqa: ANN401 - the driver is not typed
    """Decode aborts while prefill is stopped at a random point of its work; then prefill goes on."""
    pages = list(range(40))
    decode.pages[:] = CANARY
    name, room = stage.name(), stage.room()
    open_both(prefill, decode, room, name=name, pages=pages, deadline_s=30.0)
    prefill.until(name, "ready")
    prefill.post("send", name=name, pages=pages, start=0, last=True, aux_slot=0)
    time.sleep(stage.random.uniform(0, 0.03))
    prefill.signal(signal.SIGSTOP)
    decode.abort(name)
    decode.until(name, "ended")
    time.sleep(1.2 * QUIESCE_S)
    status = decode.status(name)
    if status["releasable"]:
        if status["phase"] == "done":
            assert (decode.pages[:, pages] == prefill.pages[:, pages]).all(), "false success"
        decode.pages[:] = CANARY
    prefill.signal(signal.SIGCONT)
    prefill.answer()
    if not status["releasable"]:
        decode.until(name, "releasable")
        decode.pages[:] = CANARY
    prefill.until(name, "releasable")
    time.sleep(0.2)  # the interval in which stale writes would come
    assert (decode.pages == CANARY).all(), "pages were written after their release"
    return "over" if status["releasable"] else "held"


@hazard(5, "prefill's pages are released while they are still read")
def source_freed_early(stage: Stage) -> str:
    prefill, decode = stage.prefill, stage.decode
    name, _ = stage.write_on_its_way()
    prefill.abort(name)
    assert prefill.until(name, "ended")["cause"] == "aborted"
    prefill.settle(lambda stats: stats["holds"] == 1)
    assert not prefill.status(name)["releasable"]
    prefill.call("release_writes")
    prefill.until(name, "releasable")
    decode.until(name, "releasable")
    return "source pages were held until the transfer backend had let go of them"


@hazard(6, "a request is done before its first chunk is sent, when a peer joins meanwhile")
def success_before_first_chunk(stage: Stage) -> str:
    prefill, decode = stage.prefill, stage.decode
    prefill.call("hold_writes")
    name, _ = stage.open_both(pages=[8, 3, 9])
    prefill.send(name, [1], last=False)
    stage.held()
    joining = stage.extra("decode")
    other = stage.name()
    room = stage.room()
    open_both(prefill, joining, room, name=other, pages=[1])
    prefill.until(other, "ready")
    prefill.send(name, [2, 4], start=1)
    stage.held(2)
    prefill.call("release_writes", number=2)  # the last one lands first, if its worker lets it
    time.sleep(0.5)  # the interval in which a false success would come
    for side in (prefill, decode):
        assert side.status(name)["phase"] != "done"
    prefill.call("release_writes")
    decode.until(name, "done")
    assert stage.same([1, 2, 4], [8, 3, 9])
    prefill.send(other, [7])
    joining.until(other, "done")
    return "done came after every chunk had landed"


@hazard(8, "indices from a peer are used as addresses unchecked")
def indices_unchecked(stage: Stage) -> str:
    refused = refused_by_api(stage)
    with RawDecode(stage) as raw:
        before = stage.prefill.stats()["faults"]
        for pages, aux_slot in (([10**6], 0), ([-1], 0), ([1], 10**6), ([5, 5], 0)):
            name, room = stage.name(), stage.room()
            stage.prefill.open(name, room)
            stage.prefill.send(name, list(range(len(pages))), aux_slot=0)
            end = raw.open(name, room, pages, aux_slot)
            assert end.cause == "invalid", f"pages {pages}, aux slot {aux_slot}: {end}"
            stage.prefill.until(name, "releasable")
        assert stage.prefill.stats()["faults"] == before
        assert raw.intact(), "bytes were written outside the pages that were offered"
    return f"{refused} calls refused by the API; 4 offers outside the memory ended as failed, nothing was written"


@hazard(9, "pages are released because their writer is unreachable, and it writes on")
def partition(stage: Stage) -> str:
    prefill, decode = stage.prefill, stage.decode
    wire = Cable(prefill)
    try:
        name, room = stage.name(), stage.room()
        prefill.call("hold_writes")
        prefill.open(name, room)
        fresh = stage.extra("decode")
        offer(fresh, wire.bootstrap, room, name=name)
        prefill.until(name, "ready")
        prefill.send(name, [1, 2])
        stage.held()
        wire.plugged = False
        wire.cut()
        assert fresh.until(name, "ended")["cause"] == "peer_lost"
        fresh.settle(lambda stats: stats["holds"] == 1)
        stage.stays_held(fresh, name, for_s=2 * QUIESCE_S)
        prefill.call("release_writes")
        prefill.until(name, "releasable")
        assert (fresh.pages[:, [8, 3]] == prefill.pages[:, [1, 2]]).all(), "the writer did not go on"
        assert not fresh.status(name)["releasable"], "released although the writer was only cut off"
        wire.plugged = True
        fresh.until(name, "releasable")
    finally:
        wire.close()
    del decode
    return "the writer went on behind the cut; its pages were held until it could be asked again"


@hazard(10, "compaction of memory moves pages that are held")
def compaction(stage: Stage) -> str:
    del stage
    raise NotApplicableError("the connector moves no pages; an engine that compacts asks `releasable` of each")


@hazard(11, "messages count whichever process has sent them")
def no_sender_identity(stage: Stage) -> str:
    prefill, decode = stage.prefill, stage.extra("decode")  # a new one: this is its attempt 1
    name, room = stage.name(), stage.room()
    open_both(prefill, decode, room, name=name)
    prefill.until(name, "ready")
    before = prefill.stats()["drops"].get("unpaired", 0)
    with RawDecode(stage) as raw:
        raw.send(
            f.Abort, decode.incarnation, room, sender=decode.incarnation, request_id=name, cause="aborted", message="I"
        )
        prefill.settle(lambda stats: stats["drops"].get("unpaired", 0) > before)
        stranger = prefill.stats()["drops"].get("stranger", 0)
        raw.send(f.Abort, decode.incarnation, room, request_id=name, cause="aborted", message="for another")
        prefill.settle(lambda stats: stats["drops"].get("stranger", 0) > stranger)
    assert prefill.status(name)["phase"] == "ready"
    prefill.send(name, [1, 2])
    decode.until(name, "done")
    assert (decode.pages[:, [8, 3]] == prefill.pages[:, [1, 2]]).all()
    return "aborts in another's name, and for another's attempt, were dropped and counted"

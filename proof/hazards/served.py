"""H7: two destinations, of which one is complete while the other is not."""

from typing import Any

import numpy as np

from proof.hazards.stage import CANARY, Stage, hazard
from tests.integration.handoffs import offer
from tests.integration.instances import Instance, shape

REPEATS = 3
"""How often a frame is seen again before anything is concluded from that."""


@hazard(7, "a destination that is complete is written again")
def written_twice(stage: Stage) -> str:
    _asked_again(stage)
    _beside_another(stage)
    return (
        "repeated frames caused no second write; PP 2 to TP 2: repeated results of one writer counted for no other "
        "writer; a decode rank that was complete counted for no other rank, and was not written again"
    )


def _asked_again(stage: Stage) -> None:
    """One destination; the answers of prefill are lost."""
    prefill, decode = stage.prefill, stage.decode
    prefill.lose("Accepted", "Ended")
    name, _ = stage.open_both()
    prefill.send(name, [1, 2])
    prefill.settle(lambda stats: stats["lost"].get("Ended", 0) >= REPEATS)
    assert stage.same([1, 2], [8, 3])
    decode.pages[:, [8, 3]] = CANARY
    lost = prefill.stats()["lost"]["Ended"]
    prefill.settle(lambda stats: stats["lost"]["Ended"] >= lost + REPEATS)
    prefill.lose()
    status = decode.until(name, "done")
    assert stage.blank([8, 3]), "a repeated frame made prefill write again"
    assert status["bytes_moved"] == 2 * decode.pages.shape[0] * decode.pages.shape[2] + decode.aux.shape[1]


def _beside_another(stage: Stage) -> None:
    """Two stages write to each of two tensor ranks, of which the second one comes late."""
    prefill = stage.instance("prefill", shape([2, 1]))
    decode = stage.instance("decode", shape([3], tp=2))
    whole = prefill.fill(1)
    for side in decode.ranks:
        side.pages[:] = CANARY
    name, room = stage.name(), stage.room()
    _count_writers(prefill, decode, name, room)
    _check(decode, 0, whole)
    decode.ranks[0].pages[:] = CANARY
    _count_destinations(prefill, decode, name, room)
    _check(decode, 1, whole)
    assert (decode.ranks[0].pages == CANARY).all(), "a complete rank was written again"
    for instance in (prefill, decode):
        instance.settle_empty()


def _count_writers(prefill: Instance, decode: Instance, name: str, room: int) -> None:
    """The first rank gets the first stage's pages and repeated results of it; then the second stage's."""
    served = decode.ranks[0]
    served.lose("Ack")
    prefill.ranks[1].call("hold_writes")
    prefill.open(name, room)
    offer(served, prefill.bootstrap, room, name=name, pages=[8])
    prefill.send(name, [1])
    prefill.ranks[1].settle(lambda stats: stats["held_writes"] >= 1)
    served.settle(lambda stats: stats["lost"].get("Ack", 0) >= REPEATS)
    _open_still(served, name, "with the pages of one of its two writers")
    prefill.ranks[1].call("release_writes")
    served.until(name, "done")


def _count_destinations(prefill: Instance, decode: Instance, name: str, room: int) -> None:
    """The first rank is complete and does not acknowledge it; then the second one opens, and one stage is late."""
    served, late = decode.ranks
    lost = served.stats()["lost"]["Ack"]
    served.settle(lambda stats: stats["lost"]["Ack"] >= lost + REPEATS)
    for side in prefill.ranks:
        _open_still(side, name, "before its second destination was there")
    prefill.ranks[0].call("hold_writes")
    offer(late, prefill.bootstrap, room, name=name, pages=[8])
    prefill.ranks[0].settle(lambda stats: stats["held_writes"] >= 1)
    prefill.ranks[1].until(name, "done")
    for side in (prefill.ranks[0], late):
        _open_still(side, name, "with a write to the second destination on its way")
    for instance in (prefill, decode):
        agreed = instance.agreed(name, room)
        assert not agreed.releasable, f"the ranks of {instance.role} agree: {agreed}"
    prefill.ranks[0].call("release_writes")
    served.lose()
    for instance in (prefill, decode):
        instance.until(name, "done")


def _open_still(side: Any, name: str, when: str) -> None:  # noqa: ANN401 - the tests' driver is not typed
    status = side.status(name)
    assert status["cause"] is None, status
    assert status["phase"] != "done", f"done {when}"
    assert not status["releasable"], f"released {when}"


def _check(decode: Instance, rank: int, whole: np.ndarray) -> None:
    side, shard = decode.ranks[rank], decode.shards[rank]
    wanted = whole[shard.first_layer : shard.layer_end, :, 1, :, shard.first_head : shard.head_end]
    assert np.array_equal(side.cells[:, :, 8], wanted), f"rank {rank} is done with other bytes"

"""Pages that are gathered on their way to two decode ranks: what arrives, and what becomes of the slots."""

from collections.abc import Iterator

import numpy as np
import pytest
from pdpool_connector import Cause, ConnectorConfig, DecodeConnector, HostArena, KVMemory, Phase, PrefillConnector
from pdpool_connector.backends.base import Poll
from pdpool_connector.backends.local import LocalBackend
from pdpool_connector.layout.pairing import shard_model
from pdpool_connector.layout.staging import SLOT_BYTES
from pdpool_connector.protocol.fence import ProcessExited

from tests.waiting import until

TOKENS, HEAD, POOL = 16, 32, 8
PAGES = np.array([5, 1, 2], np.int32)
OTHERS = np.array([0, 3, 4], np.int32)


class Unsure(LocalBackend):
    """Moves everything. If `unsettled` is set, it reports that bytes may still be under way."""

    unsettled = False
    staged = told = 0
    awaited = 2

    def submit(self, peer, chunk, *args):
        self.staged += chunk.staged is not None
        return super().submit(peer, chunk, *args)

    def poll(self, handle):
        if not self.unsettled:
            return super().poll(handle)
        # Not before the writes to all ranks are under way: the failure of one stops another that has not begun.
        if self.staged < self.awaited:
            return Poll.PENDING
        self.told += 1
        return Poll.FAILED_UNSETTLED


class Side:
    """An arena with `heads` of two heads, from `first` on, in one layer."""

    def __init__(self, heads: int, first: int = 0) -> None:
        item = TOKENS * HEAD * heads
        self.arena = HostArena(2 * POOL * item + 4 * 64)
        self.cache = self.arena.array(0, (2, POOL, TOKENS, heads, HEAD), np.uint8)
        self.memory = KVMemory(
            kv=tuple(self.arena.region(index * POOL * item, item, POOL) for index in (0, 1)),
            aux=(self.arena.region(2 * POOL * item, 64, 4),),
            page_tokens=TOKENS,
            layers=1,
            kv_heads=heads,
            first_head=first,
            total_heads=2,
            head_dim=HEAD,
            dtype="uint8",
            model="m",
        )


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    made = [Side(2), Side(1, 0), Side(1, 1)]
    made[0].cache[:] = np.random.default_rng(0).integers(1, 256, made[0].cache.shape, np.uint8)
    yield made
    for side in made:
        side.arena.close()


@pytest.fixture
def decodes(sides: list[Side]) -> Iterator[list[DecodeConnector]]:
    parts = shard_model([1], 2, tp=2)
    made = [
        DecodeConnector(ConnectorConfig("127.0.0.1", instance=parts, rank=rank), side.memory, lambda: None)
        for rank, side in enumerate(sides[1:])
    ]
    for one in made:
        one.start()
    yield made
    for one in made:
        one.close()


@pytest.fixture
def unsure() -> Unsure:
    return Unsure()


@pytest.fixture
def prefill(sides: list[Side], unsure, request) -> Iterator[PrefillConnector]:
    slots = getattr(request, "param", 2)
    config = ConnectorConfig("127.0.0.1", staging_bytes=slots * SLOT_BYTES)
    with PrefillConnector(config, sides[0].memory, backend=unsure) as connector:
        yield connector


def hand_over(prefill, decodes, room, pages=PAGES[::-1], slots=(0, 1)):
    """The request at prefill and at both ranks of decode, sent and ended."""
    receiving = [decode.open(prefill.bootstrap_address, room, "r") for decode in decodes]
    for rank, one in enumerate(receiving):
        one.offer(pages.copy(), aux_slot=slots[rank])
    sending = prefill.open(room, "r")
    until(lambda: sending.status.phase is Phase.READY)  # both ranks have come
    sending.send(PAGES, start=0, last=True, aux_slot=0)
    until(lambda: sending.status.ended and all(one.status.ended for one in receiving))
    return sending, receiving


@pytest.mark.parametrize("prefill", [2, 0], indirect=True)
def test_each_rank_gets_its_head(prefill, unsure, decodes, sides) -> None:
    sending, receiving = hand_over(prefill, decodes, 1)
    assert [one.status.phase for one in (sending, *receiving)] == [Phase.DONE] * 3
    for head, side in enumerate(sides[1:]):
        assert np.array_equal(side.cache[:, PAGES[::-1], :, 0], sides[0].cache[:, PAGES, :, head])
        assert not side.cache[:, [0, 3, 4, 6, 7]].any()
    assert (unsure.staged > 0) is (prefill._staging is not None)
    assert prefill._staging is None or prefill._staging.reserved == 0


def test_unsettled_slot_is_held_until_the_fence(prefill, unsure, decodes) -> None:
    unsure.unsettled = True
    sending, receiving = hand_over(prefill, decodes, 1)
    assert sending.status.cause is Cause.TRANSFER_FAILED
    assert not sending.status.releasable
    until(lambda: prefill._staging.reserved)  # 1 or 2: the other part may have failed before it wrote
    unsure.unsettled = False
    other, _ = hand_over(prefill, decodes, 2, OTHERS, slots=[2, 3])
    assert other.status.phase is Phase.DONE
    assert prefill._staging.reserved in (1, 2)
    del receiving
    for decode in decodes:
        prefill.fence(decode.incarnation, ProcessExited(pid=1, seen_by="the test"))
    until(lambda: sending.status.releasable)
    until(lambda: prefill._staging.reserved == 0)


def test_slot_is_held_before_other_rank_opens(prefill, unsure, decodes) -> None:
    unsure.unsettled, unsure.awaited = True, 1
    receiving = decodes[0].open(prefill.bootstrap_address, 1, "r")
    receiving.offer(PAGES, aux_slot=0)
    sending = prefill.open(1, "r")
    sending.send(PAGES, start=0, last=True, aux_slot=0)
    until(lambda: sending.status.ended and receiving.status.ended)
    assert not sending.status.releasable
    assert prefill._staging.reserved == 1
    prefill.fence(decodes[0].incarnation, ProcessExited(pid=1, seen_by="the test"))
    until(lambda: prefill._staging.reserved == 0)


def test_fence_ends_the_pairing_for_good(prefill, decodes, caplog) -> None:
    hand_over(prefill, decodes, 1)
    until(lambda: len(prefill.stats().peers) == 2)
    decodes[0].fence(prefill.incarnation, ProcessExited(pid=1, seen_by="the test"))
    late = decodes[0].open(prefill.bootstrap_address, 2, "r")
    until(lambda: late.status.ended)
    assert (late.status.cause, late.status.releasable) == (Cause.PEER_LOST, True)
    assert "was fenced" in late.status.message
    prefill.fence(decodes[1].incarnation, ProcessExited(pid=1, seen_by="the test"))
    until(lambda: not prefill.stats().peers)
    later = decodes[1].open(prefill.bootstrap_address, 3, "r", deadline_s=20.0)
    until(lambda: later.status.ended)
    assert (later.status.cause, later.status.releasable) == (Cause.INVALID, True)
    assert "was fenced and is not paired again" in later.status.message
    logged = [record for record in caplog.records if record.message.startswith("fence of ")]
    proof = "ProcessExited(pid=1, seen_by='the test')"
    assert [(record.levelname, record.message) for record in logged] == [
        ("WARNING", f"fence of {fenced}: {proof}") for fenced in (prefill.incarnation, decodes[1].incarnation)
    ]

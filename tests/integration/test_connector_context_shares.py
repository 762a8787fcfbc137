"""Context parallel ranks that each hold the cache of some tokens: of whole pages, or of some tokens of every page."""

import numpy as np
import pytest
from msgspec import convert
from pdpool_connector import Cause, Key, Phase, TransferStatus, agree

from tests.integration.connector_peer import HEAD_BYTES, TOKENS
from tests.integration.connector_peer import PAGES as ALL_PAGES
from tests.integration.instances import AUX_FROM, HEADS, SOURCE, TARGET, Instance, open_both, shape

TWO = shape([3], tp=2)
PAGES = [8, 3, 60, 21]
SHARES = [[0, 3], [1, 2]]
"""Which logical pages each of the two has: ring attention gives out chunks from both ends."""
SOURCES = [[1, 2], [33, 4]]


@pytest.fixture
def ring(instances) -> list[Instance]:
    return [instances("prefill", "local", TWO) for _ in SHARES]


def open_shares(ring: list[Instance], decode: Instance) -> None:
    """One request: each share is a hand-off of its own, to that rank's instance and into the pages of its tokens."""
    for number, (prefill, share) in enumerate(zip(ring, SHARES, strict=True)):
        prefill.open("r", 7)
        into = [PAGES[at] for at in share]
        decode.open(f"share {number}", 7, rid="r", prefill=prefill.bootstrap, pages=into, aux_slot=into[0])


def send(ring: list[Instance], number: int) -> None:
    """The aux row goes with the share that has the prompt's last token."""
    ring[number].send("r", SOURCES[number], aux_slot=AUX_FROM if number == 0 else None)


def agreed(decode: Instance):
    """What all ranks of decode agree on over all shares."""
    names = [f"share {number}" for number in range(len(SHARES))]
    shown = [convert(side.status(name), TransferStatus) for side in decode.ranks for name in names]
    return agree([{Key(7, "r"): status} for status in shown])[Key(7, "r")]


@pytest.mark.parametrize("ours", [shape([3]), shape([1, 2], tp=2)], ids=["TP 1", "PP 2 x TP 2"])
def test_request_is_done_with_its_last_share(instances, ring, ours) -> None:
    decode = instances("decode", "local", ours)
    wholes = [prefill.fill(seed) for seed, prefill in enumerate(ring)]
    open_shares(ring, decode)
    send(ring, 0)
    decode.until("share 0", "done")
    ring[0].until("r", "done")
    assert agreed(decode).phase in (Phase.WAITING, Phase.TRANSFERRING)
    send(ring, 1)
    decode.until("share 1", "done")
    assert (agreed(decode).phase, agreed(decode).releasable) == (Phase.DONE, True)
    for side, shard in zip(decode.ranks, decode.shards, strict=True):
        expected = np.zeros_like(side.cells)
        for share, sources, whole in zip(SHARES, SOURCES, wholes, strict=True):
            held = whole[shard.first_layer : shard.layer_end, :, :, :, shard.first_head : shard.head_end]
            expected[:, :, [PAGES[at] for at in share]] = held[:, :, sources]
        assert np.array_equal(side.cells, expected)
    for instance in (*ring, decode):
        instance.settle_empty()


def test_failed_share_fails_the_whole_request(instances, ring) -> None:
    decode = instances("decode", "local", shape([3], tp=2))
    open_shares(ring, decode)
    ring[0].until("r", "ready")
    for side in ring[0].ranks:
        side.call("hold_writes")
    send(ring, 0)
    ring[0].settle(lambda stats: stats["held_writes"] == 1)
    ring[1].abort("r")
    decode.until("share 1", "releasable")
    assert (agreed(decode).phase, agreed(decode).cause) == (Phase.FAILED, Cause.PEER_ABORTED)
    decode.abort("share 0")
    ring[0].until("r", "ended")
    assert not agreed(decode).releasable
    for side in ring[0].ranks:
        side.call("release_writes")
    decode.until("share 0", "releasable")
    assert agreed(decode).releasable
    for instance in (*ring, decode):
        instance.settle_empty()


@pytest.mark.parametrize(
    ("share", "why"),
    [("front", "the last send of prefill has pages 0 to 1"), ("back", "the first send of prefill has pages 2 to")],
)
def test_replica_that_sends_too_little_fails_hand_off(instances, share: str, why: str) -> None:
    prefill = instances("prefill", "local", shape([3], cp=2))
    decode = instances("decode", "local", shape([3], tp=2))
    open_both(prefill, decode, 7, pages=PAGES)
    prefill.until("r", "ready")
    whole, part = prefill.ranks if share == "back" else reversed(prefill.ranks)
    part.send("r", [1, 2], start=2 if share == "back" else 0, aux_slot=AUX_FROM)
    assert part.until("r", "releasable")["cause"] == "invalid"
    whole.send("r", [1, 2, 3, 4], aux_slot=AUX_FROM)
    decode.ranks[prefill.ranks.index(part)].until("r", "releasable")
    failed = decode.agreed("r", 7)
    assert (failed.phase, failed.cause) == (Phase.FAILED, Cause.INVALID)
    assert why in failed.message
    decode.abort("r")
    for instance in (prefill, decode):
        instance.until("r", "releasable")
        instance.settle_empty()


@pytest.mark.parametrize("backend", ["local", "nixl"])
@pytest.mark.parametrize(("heads", "replicas"), [(HEADS, 1), (1, 2)], ids=["heads to TP 1", "a latent to TP 2"])
def test_interleaved_tokens_declared_as_heads_arrive(instances, heads: int, replicas: int, backend: str) -> None:
    cp, tp = 2, 2
    prefill = instances("prefill", backend, shape([3], cp * heads, tp=cp * tp))
    decode = instances("decode", backend, shape([3], cp * heads, cp=replicas))
    tokens = (3, 2, ALL_PAGES, cp * TOKENS, heads, HEAD_BYTES)  # of a page of decode's
    whole = np.random.default_rng(1).integers(1, 256, tokens, dtype=np.uint8)
    for rank, (side, shard) in enumerate(zip(prefill.ranks, prefill.shards, strict=True)):
        turn = rank // tp
        first = shard.first_head - turn * heads
        side.cells[:] = whole[:, :, :, turn::cp, first : first + shard.kv_heads]
    open_both(prefill, decode, 7)
    prefill.send("r", SOURCE, aux_slot=AUX_FROM)
    decode.until("r", "done")
    prefill.until("r", "done")
    expected = np.zeros_like(whole)
    expected[:, :, TARGET] = whole[:, :, SOURCE]
    for side in decode.ranks:
        assert np.array_equal(side.cells.reshape(tokens), expected)
    for instance in (prefill, decode):
        instance.settle_empty()

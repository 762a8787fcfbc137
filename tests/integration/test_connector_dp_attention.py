"""Ranks of DP attention are instances of their own: they share no request and no end, even in rooms of one number."""

import numpy as np
import pytest

from tests.integration.handoffs import TIMEOUTS
from tests.integration.instances import AUX_FROM, Instance, shape

TWO = shape([3], tp=2)
PATIENT = TIMEOUTS | {"result_s": 120.0}
"""A result that decode does not acknowledge outlives these tests."""
FORGETFUL = TIMEOUTS | {"result_s": 1.0}
"""It is forgotten soon where no decode is left to acknowledge it."""
NAMES = ["zero", "one"]
FROM = [1, 2, 33]
INTO = [[8, 3, 60], [20, 21, 22]]


def dp_ranks(instances, role: str, backend: str = "local", timeouts=PATIENT, **options) -> list[Instance]:
    return [instances(role, backend, TWO, timeouts=timeouts, **options) for _ in NAMES]


def open_both(prefill: list[Instance], decode: Instance) -> None:
    """One room number and one request id at both DP ranks: only the instance distinguishes them."""
    for number, name in enumerate(NAMES):
        prefill[number].open("r", 7)
        there = prefill[number].bootstrap
        decode.open(name, 7, rid="r", prefill=there, pages=INTO[number], aux_slot=number)


def until_forgotten(instance: Instance) -> None:
    """Its hand-offs have ended, and decode has acknowledged that."""
    instance.settle(lambda stats: stats["rows"] == 0)


def untouched(decode: Instance, number: int) -> bool:
    return not any(side.cells[:, :, INTO[number]].any() or side.aux[number].any() for side in decode.ranks)


def landed(decode: Instance, number: int, whole: np.ndarray) -> bool:
    held = [whole[:, :, FROM, :, shard.first_head : shard.head_end] for shard in decode.shards]
    return all(
        np.array_equal(side.cells[:, :, INTO[number]], there) for side, there in zip(decode.ranks, held, strict=True)
    )


@pytest.mark.parametrize("backend", ["local", "nixl"])
def test_dp_ranks_serve_one_room_number_apart(instances, backend: str) -> None:
    prefill = dp_ranks(instances, "prefill", backend)
    decode = instances("decode", backend, shape([3]))
    wholes = [one.fill(seed) for seed, one in enumerate(prefill)]
    open_both(prefill, decode)
    for one in prefill:
        one.until("r", "ready")
    prefill[1].send("r", FROM, aux_slot=AUX_FROM)
    decode.until("one", "done")
    prefill[1].until("r", "done")
    until_forgotten(prefill[1])
    (waiting,) = decode.until("zero", "transferring")
    assert not waiting["releasable"]
    assert untouched(decode, 0)
    assert [side.status("r")["phase"] for side in prefill[0].ranks] == ["ready", "ready"]
    prefill[0].send("r", FROM, aux_slot=AUX_FROM)
    decode.until("zero", "done")
    prefill[0].until("r", "done")
    assert all(landed(decode, number, whole) for number, whole in enumerate(wholes))
    for instance in (*prefill, decode):
        instance.settle_empty()


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_abort_at_one_dp_rank_leaves_the_other(instances, by: str) -> None:
    prefill, decode = dp_ranks(instances, "prefill"), instances("decode", "local", TWO)
    whole = prefill[0].fill(1)
    open_both(prefill, decode)
    for one in prefill:
        one.until("r", "ready")
    if by == "prefill":
        prefill[1].abort("r")
    else:
        decode.abort("one")
    prefill[1].until("r", "releasable")
    decode.until("one", "releasable")
    until_forgotten(prefill[1])
    assert [side.status("r")["phase"] for side in prefill[0].ranks] == ["ready", "ready"]
    assert {side.status("zero")["phase"] for side in decode.ranks} == {"transferring"}
    prefill[0].send("r", FROM, aux_slot=AUX_FROM)
    decode.until("zero", "done")
    prefill[0].until("r", "done")
    assert landed(decode, 0, whole)
    assert untouched(decode, 1)
    for instance in (*prefill, decode):
        instance.settle_empty()


@pytest.mark.parametrize("end", ["done", "aborted"])
def test_end_of_one_dp_rank_releases_its_pages(instances, end: str) -> None:
    prefill, decode = dp_ranks(instances, "prefill"), instances("decode", "local", TWO)
    whole = prefill[0].fill(1)
    for side in prefill[0].ranks:
        side.call("hold_writes")
    open_both(prefill, decode)
    for one in prefill:
        one.until("r", "ready")
    prefill[0].send("r", FROM, aux_slot=AUX_FROM)
    prefill[0].settle(lambda stats: stats["held_writes"] == 1)
    decode.abort("zero")
    prefill[0].until("r", "ended")
    if end == "done":
        prefill[1].send("r", FROM, aux_slot=AUX_FROM)
    else:
        prefill[1].abort("r")
    decode.until("one", "releasable")
    until_forgotten(prefill[1])
    for side in (*decode.ranks, *prefill[0].ranks):
        side.settle(lambda stats: stats["holds"] == 1)
    assert not any(side.status("zero")["releasable"] for side in decode.ranks)
    assert not any(side.status("r")["releasable"] for side in prefill[0].ranks)
    assert untouched(decode, 0), "the writes are still to come"
    for side in prefill[0].ranks:
        side.call("release_writes")
    decode.until("zero", "releasable")
    prefill[0].until("r", "releasable")
    assert landed(decode, 0, whole), "released before the late write had landed"
    for instance in (*prefill, decode):
        instance.settle_empty()


def test_dp_ranks_serve_rooms_side_by_side(instances) -> None:
    prefill, decode = dp_ranks(instances, "prefill"), dp_ranks(instances, "decode")
    wholes = [one.fill(seed) for seed, one in enumerate(prefill)]
    rooms = {room: (room % 2, room // 2 % 2) for room in range(8)}
    for room, (there, here) in rooms.items():
        prefill[there].open(f"r{room}", room)
        decode[here].open(f"r{room}", room, prefill=prefill[there].bootstrap, pages=[2 * room], aux_slot=room)
    for room, (there, _) in reversed(rooms.items()):
        prefill[there].send(f"r{room}", [room + 1], aux_slot=AUX_FROM)
    for room, (there, here) in rooms.items():
        prefill[there].until(f"r{room}", "done")
        decode[here].until(f"r{room}", "done")
    for number, one in enumerate(decode):
        for side, shard in zip(one.ranks, one.shards, strict=True):
            expected = np.zeros_like(side.cells)
            for room, (there, here) in rooms.items():
                if here == number:
                    held = wholes[there][:, :, room + 1, :, shard.first_head : shard.head_end]
                    expected[:, :, 2 * room] = held
            assert np.array_equal(side.cells, expected)
    for instance in (*prefill, *decode):
        instance.settle_empty()


@pytest.mark.parametrize("how", ["killed", "closed"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_end_of_dp_rank_fails_only_its_requests(instances, role: str, how: str) -> None:
    prefill, decode = (dp_ranks(instances, side, timeouts=FORGETFUL) for side in ("prefill", "decode"))
    whole = prefill[0].fill(1)
    pairs = {"kept": (0, 0), "cross": (0, 1) if role == "prefill" else (1, 0), "lost": (1, 1)}
    for room, (name, (there, here)) in enumerate(pairs.items()):
        prefill[there].open(name, room)
        decode[here].open(name, room, prefill=prefill[there].bootstrap, pages=INTO[room % 2], aux_slot=room)
        prefill[there].until(name, "ready")
    gone, left = (prefill[1], decode[1]) if role == "prefill" else (decode[1], prefill[1])
    for side in gone.ranks:
        if how == "killed":
            side.kill()
        else:
            side.call("close")
    for status in left.until("lost", "ended"):
        assert status["cause"] == "peer_lost"
    for name, (there, here) in pairs.items():
        if name != "lost":
            prefill[there].send(name, FROM, aux_slot=AUX_FROM)
            decode[here].until(name, "done")
            prefill[there].until(name, "done")
    assert landed(decode[0], 0, whole)
    if how == "killed":
        for side, killed in zip(left.ranks, gone.ranks, strict=True):
            side.call("fence", incarnation=killed.incarnation)
    left.until("lost", "releasable")
    for instance in (*prefill, *decode):
        if instance is not gone:
            instance.settle_empty()


def test_request_at_wrong_dp_rank_times_out(instances) -> None:
    prefill = dp_ranks(instances, "prefill", timeouts=FORGETFUL | {"match_s": 2.0})
    decode = instances("decode", "local", TWO)
    prefill[0].fill(1)
    prefill[0].open("r", 7)
    prefill[0].send("r", FROM, aux_slot=AUX_FROM)
    decode.open("r", 7, prefill=prefill[1].bootstrap, pages=INTO[0], aux_slot=0, deadline_s=120.0)
    for status in (*decode.until("r", "releasable"), *prefill[0].until("r", "releasable")):
        assert (status["cause"], status["bytes_moved"]) == ("timed_out", 0)
    assert untouched(decode, 0)
    assert not any(stats["bytes_moved_total"] for one in prefill for stats in one.settle(lambda _: True))
    for instance in (*prefill, decode):
        instance.settle_empty()

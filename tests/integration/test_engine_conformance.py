"""What every engine must do, shown on two real processes; the bytes are looked at by a third, this one."""

import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest

from tests.integration.engine_peer import Peer

SMALL = {"layers": 3, "pages": 48, "page_bytes": 4096}
LARGE = {"layers": 2, "pages": 32, "page_bytes": 1 << 20}
CANARY = 0xA5

PLANES = {
    "local": ("local", {}),
    "nixl": ("nixl", {"UCX_NET_DEVICES": "lo"}),
    "nixl-tcp": ("nixl", {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}),
}
# What a lost peer means: only an engine that copies with its own hands can say that nothing is under way.
FAILED = {"local": "failed_settled", "nixl": "failed_unsettled", "nixl-tcp": "failed_unsettled"}


@pytest.fixture(params=PLANES, scope="module")
def plane(request):
    return request.param


@contextmanager
def peers(plane, geometry, *roles):
    """Processes with an open engine: an upper-case role is a target. A process the test killed may be killed."""
    engine, env = PLANES[plane]
    opened = [Peer(env) for _ in roles]
    try:
        for role, peer in zip(roles, opened, strict=True):
            peer.post_open(engine, f"{role}-{time.monotonic_ns():x}", target=role.isupper(), **geometry)
        for peer in opened:
            peer.opened()
        yield opened
    finally:
        for peer in opened:
            if peer.process.poll() is None:
                peer.signal(signal.SIGCONT)
        codes = [peer.end() for peer in opened]
    assert set(codes) <= {0, -signal.SIGKILL}, f"exit codes {codes}: a process crashed"


@pytest.fixture(scope="module")
def pair(plane):
    with peers(plane, SMALL, "i", "T") as (initiator, target):
        assert initiator.connect(target) == {}
        yield initiator, target


def fill(initiator, target, seed=0):
    """Random bytes in the whole source arena, canaries in the whole target arena."""
    generator = np.random.default_rng(seed)
    initiator.arena.view[:] = generator.integers(0, 256, initiator.arena.nbytes, np.uint8)
    target.arena.view[:] = CANARY


def item(peer, region, index):
    """The bytes of one item in the peer's own arena."""
    start = region.address - peer.arena.address + index * region.item_bytes
    return peer.arena.view[start : start + region.item_bytes]


def expected(initiator, target, before, local, remote, aux=None):
    """What the target's arena must hold, by the slow obvious way."""
    image = before.copy()
    mine, theirs = initiator.remote.memory, target.remote.memory
    for source, sink in zip(mine.kv, theirs.kv, strict=True):
        for page, to in zip(local, remote, strict=True):
            start = sink.address - target.arena.address + to * sink.item_bytes
            image[start : start + sink.item_bytes] = item(initiator, source, page)
    if aux is not None:
        start = theirs.aux.address - target.arena.address + aux[1] * theirs.aux.item_bytes
        image[start : start + theirs.aux.item_bytes] = item(initiator, mine.aux, aux[0])
    return image


def write(initiator, target, local, remote, aux=None):
    handle = initiator.call("submit", peer=target.name, local=list(local), remote=list(remote), aux=aux)
    assert "error" not in handle, handle
    return initiator.call("poll", handle=handle["handle"], wait_s=15.0)


def until(condition, timeout_s, what):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.002)


SHAPES = {
    "one page": ([7], [11], None),
    "one run": (range(4, 20), range(30, 46), None),
    "all pages": (range(48), range(48), (7, 7)),
    "scattered": ([3, 17, 9, 44, 0], [40, 2, 47, 0, 21], (1, 6)),
    "runs that merge on one side only": (range(10), [5, 6, 7, 20, 21, 22, 30, 31, 40, 41], None),
    "both reversed": (range(15, -1, -1), range(47, 31, -1), None),
    "one reversed": (range(16), range(31, 15, -1), (0, 0)),
    "one source page to two targets": ([5, 5], [6, 7], None),
    "aux only": ([], [], (3, 4)),
    "empty": ([], [], None),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_land_exactly_where_they_should(pair, shape):
    initiator, target = pair
    local, remote, aux = SHAPES[shape]
    fill(initiator, target)
    wanted = expected(initiator, target, target.arena.view, local, remote, aux)
    assert write(initiator, target, local, remote, aux)["outcome"] == "done"
    assert np.array_equal(target.arena.view, wanted)


BAD = {
    "local page too high": ([0, 48], [0, 1], None, "local_pages[1] is 48, must be 0..47"),
    "local page negative": ([-1], [0], None, "local_pages[0] is -1, must be 0..47"),
    "remote page too high": ([0], [2**31 - 1], None, "remote_pages[0] is 2147483647, must be 0..47"),
    "remote page negative": ([0, 1], [3, -(2**31)], None, "remote_pages[1] is -2147483648, must be 0..47"),
    "lists differ": ([0, 1], [0], None, "local_pages has 2 ids and remote_pages 1"),
    "target page twice": ([0, 1], [4, 4], None, "remote_pages has page 4 twice"),
    "local aux slot": ([0], [0], (8, 0), "local aux slot is 8, must be 0..7"),
    "remote aux slot": ([0], [0], (0, -1), "remote aux slot is -1, must be 0..7"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_indices_are_refused_before_anything_is_written(pair, case):
    initiator, target = pair
    local, remote, aux, message = BAD[case]
    fill(initiator, target)
    answer = initiator.call("submit", peer=target.name, local=local, remote=remote, aux=aux)
    assert answer["error"] == "InvalidChunkError"
    assert message in answer["message"]
    assert write(initiator, target, [0], [0])["outcome"] == "done"
    assert np.array_equal(
        target.arena.view, expected(initiator, target, np.full_like(target.arena.view, CANARY), [0], [0])
    )


def test_an_unknown_peer_is_refused(pair):
    initiator, _ = pair
    assert initiator.call("submit", peer="nobody", local=[0], remote=[0])["error"] == "UnknownPeerError"
    assert initiator.call("disconnect", peer="nobody") == {}


def test_a_second_connect_is_refused_and_leaves_the_first_working(pair):
    initiator, target = pair
    assert initiator.connect(target)["error"] == "EngineError"
    assert write(initiator, target, [1], [1])["outcome"] == "done"


def test_a_peer_of_another_shape_is_refused_with_every_field_named(plane, pair):
    initiator, target = pair
    with peers(plane, {"layers": 3, "pages": 48, "page_bytes": 8192, "model": "other"}, "T") as (stranger,):
        answer = initiator.connect(stranger)
        assert answer["error"] == "IncompatiblePeerError"
        assert "model is 'm' here and 'other' at the peer" in answer["message"]
        assert "item_bytes of kv region 5 is 4096 here and 8192 at the peer" in answer["message"]
        assert initiator.call("submit", peer=stranger.name, local=[0], remote=[0])["error"] == "UnknownPeerError"
    assert write(initiator, target, [2], [2])["outcome"] == "done"


def test_two_peers_are_served_at_the_same_time(plane):
    with peers(plane, SMALL, "i", "A", "B") as (initiator, first, second):
        fill(initiator, first)
        second.arena.view[:] = CANARY
        jobs = []
        for target, remote in ((first, range(20)), (second, range(40, 20, -1))):
            assert initiator.connect(target) == {}
            jobs.append({"peer": target.name, "local": list(range(20)), "remote": list(remote), "times": 200})
        blank = np.full_like(first.arena.view, CANARY)
        assert [outcome for outcome, _ in initiator.call("together", jobs=jobs)] == ["done", "done"]
        for target, job in zip((first, second), jobs, strict=True):
            assert np.array_equal(target.arena.view, expected(initiator, target, blank, job["local"], job["remote"]))


def test_a_killed_target_is_a_failure_within_two_seconds_and_only_its_own(plane):
    with peers(plane, LARGE, "i", "A", "B") as (initiator, doomed, other):
        for target in (doomed, other):
            assert initiator.connect(target) == {}
        fill(initiator, doomed)
        region = doomed.remote.memory.kv[0]
        initiator.post("stream", peer=doomed.name, local=list(range(32)), remote=list(range(32)), wait_s=20.0)
        until(lambda: (item(doomed, region, 0) != CANARY).any(), 10, "the first byte")
        killed_at = time.monotonic()
        doomed.signal(signal.SIGKILL)
        answer = initiator.answer()
        assert answer["outcome"] == FAILED[plane], answer
        assert answer["failure"]
        assert answer["at"] - killed_at < 2.0
        assert write(initiator, other, [1], [2])["outcome"] == "done"
        assert initiator.call("disconnect", peer=doomed.name) == {}


def test_a_stopped_target_never_gives_a_false_done(plane):
    with peers(plane, LARGE, "i", "T") as (initiator, target):
        assert initiator.connect(target) == {}
        fill(initiator, target)
        pages = list(range(32))
        wanted = expected(initiator, target, target.arena.view, pages, pages)
        target.signal(signal.SIGSTOP)
        handle = initiator.call("submit", peer=target.name, local=pages, remote=pages)["handle"]
        outcome = initiator.call("poll", handle=handle, wait_s=1.5)["outcome"]
        if outcome == "done":  # where the target's CPU is not needed this is true, and must be
            assert np.array_equal(target.arena.view, wanted)
        else:
            assert outcome == "pending"
        target.signal(signal.SIGCONT)
        assert initiator.call("poll", handle=handle, wait_s=15.0)["outcome"] == "done"
        assert np.array_equal(target.arena.view, wanted)


def test_over_tcp_a_stopped_target_stays_pending():
    with peers("nixl-tcp", LARGE, "i", "T") as (initiator, target):
        assert initiator.connect(target) == {}
        target.signal(signal.SIGSTOP)
        handle = initiator.call("submit", peer=target.name, local=[0], remote=[0])["handle"]
        before = initiator.call("usage")["cpu_s"]
        assert initiator.call("poll", handle=handle, wait_s=2.0)["outcome"] == "pending"
        assert initiator.call("usage")["cpu_s"] - before < 0.5, "waiting for a stopped peer must not spin"


def test_over_tcp_a_stopped_peer_delays_no_other():
    with peers("nixl-tcp", SMALL, "i", "A", "B") as (initiator, frozen, other):
        for target in (frozen, other):
            assert initiator.connect(target) == {}
        job = {"local": list(range(8)), "remote": list(range(8))}
        alone = initiator.call("together", jobs=[{**job, "peer": other.name, "times": 300}])
        frozen.signal(signal.SIGSTOP)
        jobs = [{**job, "peer": frozen.name, "times": 1}, {**job, "peer": other.name, "times": 300}]
        beside = initiator.call("together", jobs=jobs, wait_s=5.0)
        assert [outcome for outcome, _ in beside] == ["pending", "done"]
        assert beside[1][1] < 3 * alone[0][1] + 0.5


def test_over_tcp_connecting_a_stopped_peer_ends_by_its_deadline():
    with peers("nixl-tcp", {**SMALL, "connect_timeout_s": 1.0}, "i", "A", "B") as (initiator, frozen, other):
        frozen.signal(signal.SIGSTOP)
        started = time.monotonic()
        answer = initiator.connect(frozen)
        assert answer["error"] == "PeerUnreachableError"
        assert "did not answer within 1.0 s" in answer["message"]
        assert time.monotonic() - started < 3.0
        assert initiator.connect(other) == {}
        assert write(initiator, other, [1], [2])["outcome"] == "done"
        frozen.signal(signal.SIGCONT)
        assert initiator.connect(frozen) == {}
        assert write(initiator, frozen, [1], [2])["outcome"] == "done"


def test_a_killed_initiator_leaves_the_target_serving_others(plane):
    with peers(plane, LARGE, "i", "j", "T") as (doomed, other, target):
        assert doomed.connect(target) == {}
        fill(other, target)
        doomed.arena.view[:] = 1
        region = target.remote.memory.kv[0]
        doomed.post("stream", peer=target.name, local=list(range(32)), remote=list(range(32)), wait_s=20.0)
        until(lambda: (item(target, region, 0) == 1).any(), 10, "the first byte")
        doomed.process.kill()
        doomed.process.wait(10)
        assert other.connect(target) == {}
        assert write(other, target, [3], [31])["outcome"] == "done"
        assert np.array_equal(item(target, region, 31), item(other, other.remote.memory.kv[0], 3))
        assert target.call("usage")["threads"] >= 1


def test_a_restarted_peer_is_served_as_a_new_incarnation_and_the_former_is_lost(plane):
    with peers(plane, SMALL, "i", "T", "T") as (initiator, former, latter):
        assert initiator.connect(former) == {}
        assert write(initiator, former, [1], [1])["outcome"] == "done"
        former.process.kill()
        former.process.wait(10)
        assert write(initiator, former, [2], [2])["outcome"] == FAILED[plane]
        assert initiator.call("disconnect", peer=former.name) == {}
        assert initiator.connect(latter) == {}
        for _ in range(2):
            assert initiator.connect(former)["error"] == "PeerUnreachableError"
        assert initiator.call("submit", peer=former.name, local=[0], remote=[0])["error"] == "UnknownPeerError"
        fill(initiator, latter)
        wanted = expected(initiator, latter, latter.arena.view, [4], [5])
        assert write(initiator, latter, [4], [5])["outcome"] == "done"
        assert np.array_equal(latter.arena.view, wanted)


def test_a_peer_can_be_disconnected_and_connected_again(pair):
    initiator, target = pair
    for page in range(3):
        assert initiator.call("disconnect", peer=target.name) == {}
        assert initiator.call("submit", peer=target.name, local=[0], remote=[0])["error"] == "UnknownPeerError"
        assert initiator.connect(target) == {}
        assert write(initiator, target, [page], [page])["outcome"] == "done"


def test_a_transfer_open_at_disconnect_is_unsettled():
    with peers("nixl-tcp", LARGE, "i", "T") as (initiator, target):
        assert initiator.connect(target) == {}
        target.signal(signal.SIGSTOP)
        handle = initiator.call("submit", peer=target.name, local=[0], remote=[0])["handle"]
        assert initiator.call("poll", handle=handle)["outcome"] == "pending"
        assert initiator.call("disconnect", peer=target.name) == {}
        assert initiator.call("poll", handle=handle)["outcome"] == "failed_unsettled"
        target.signal(signal.SIGCONT)
        assert initiator.connect(target) == {}
        assert write(initiator, target, [1], [1])["outcome"] == "done"


def test_two_thousand_transfers_leave_memory_and_descriptors_flat(pair):
    initiator, target = pair
    scattered = {"peer": target.name, "local": [9, 3, 27], "remote": [1, 40, 22]}
    initiator.call("repeat", **scattered, times=200)
    before = [peer.call("usage") for peer in pair]
    assert initiator.call("repeat", **scattered, times=2000, timeout_s=60)["failed"] == []
    after = [peer.call("usage") for peer in pair]
    for old, new in zip(before, after, strict=True):
        assert new["fds"] == old["fds"]
        assert new["threads"] == old["threads"]
        assert new["rss_anon_kib"] - old["rss_anon_kib"] < 1024


def test_close_leaves_no_descriptor_and_no_thread(plane):
    engine, env = PLANES[plane]
    with peers(plane, SMALL, "T") as (target,):
        initiator = Peer(env)
        threads = initiator.call("usage")["threads"]
        used = []
        for attempt in range(4):
            initiator.post_open(engine, f"i{attempt}-{time.monotonic_ns():x}", target=True, **SMALL)
            initiator.opened()
            assert initiator.connect(target) == {}
            assert write(initiator, target, [1], [1])["outcome"] == "done"
            assert initiator.call("close") == {}
            initiator.arena.close()
            used.append(initiator.call("usage"))
        assert initiator.end() == 0
        # What libraries open once on first use stays; what an engine opened does not.
        assert used[1]["fds"] == used[3]["fds"]
        assert {entry["threads"] for entry in used} == {threads}


def test_an_idle_pair_uses_no_cpu(pair):
    initiator, target = pair
    write(initiator, target, [0], [0])
    before = [peer.call("usage")["cpu_s"] for peer in pair]
    time.sleep(2.0)  # the measured interval, not a wait for something
    spent = [peer.call("usage")["cpu_s"] - old for peer, old in zip(pair, before, strict=True)]
    assert max(spent) < 0.1, f"CPU seconds of initiator and target in 2 s of idleness: {spent}"

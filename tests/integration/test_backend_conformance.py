"""Every backend with healthy peers, on two real processes; a third, this one, compares the bytes."""

import time

import numpy as np
import pytest

from tests.integration.backend_cases import (
    BAD,
    OVER_IPV6,
    PLANES,
    RECORDED,
    SHAPES,
    SMALL,
    carried,
    cross,
    expected,
    fill,
    move,
    peers,
    until,
)
from tests.integration.backend_peer import Peer


def pytest_generate_tests(metafunc):
    cross(metafunc, "plane", PLANES | OVER_IPV6 | RECORDED)


@pytest.fixture(scope="module")
def pair(plane):
    with peers(plane, SMALL, "i", "T") as (initiator, target):
        assert initiator.connect(target) == {}
        if plane in OVER_IPV6.values():
            counts = carried(initiator.pid)
            assert counts[6] > 0
            assert counts[4] == 0
        yield initiator, target


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_land_exactly_where_they_should(pair, shape):
    source, sink = pair
    fill(source, sink)
    untouched = source.arena.view.copy()
    wanted = expected(source, sink, *SHAPES[shape])
    assert move(*pair, *SHAPES[shape])["outcome"] == "done"
    assert np.array_equal(sink.arena.view, wanted)
    assert np.array_equal(source.arena.view, untouched)


@pytest.mark.parametrize("case", BAD)
def test_bad_indices_are_refused_before_anything_is_moved(pair, case):
    initiator, target = pair
    source, sink = initiator, target
    local, remote, aux, message = BAD[case]
    fill(source, sink)
    answer = initiator.call("submit", peer=target.name, local=local, remote=remote, aux=aux)
    assert answer["error"] == "InvalidChunkError"
    assert message in answer["message"]
    wanted = expected(source, sink, [0], [0])
    assert move(initiator, target, [0], [0])["outcome"] == "done"
    assert np.array_equal(sink.arena.view, wanted)


def test_an_unknown_peer_is_refused(pair):
    initiator, _ = pair
    assert initiator.call("submit", peer="nobody", local=[0], remote=[0])["error"] == "UnknownPeerError"
    assert initiator.call("disconnect", peer="nobody") == {}


def test_a_second_connect_is_refused_and_leaves_the_first_working(pair):
    initiator, target = pair
    assert initiator.connect(target)["error"] == "BackendError"
    assert move(initiator, target, [1], [1])["outcome"] == "done"


def test_a_peer_that_is_not_who_it_should_be_is_refused(plane, pair):
    initiator, target = pair
    if plane.backend == "local":
        pytest.skip("an arena is found by its own random token, whoever its owner says to be")
    answer = initiator.call("connect", peer="somebody else", remote=target.encoded())
    assert answer["error"] in ("IncompatiblePeerError", "PeerUnreachableError")
    assert "somebody else" in answer["message"]
    assert move(initiator, target, [2], [2])["outcome"] == "done"


def test_a_peer_of_another_shape_is_refused_with_every_field_named(plane, pair):
    initiator, target = pair
    with peers(plane, {"layers": 3, "pages": 48, "page_bytes": 8192, "model": "other"}, "T") as (stranger,):
        answer = initiator.connect(stranger)
        assert answer["error"] == "IncompatiblePeerError"
        assert "model is 'm' at prefill and 'other' at decode" in answer["message"]
        assert "head_dim is 64 at prefill and 128 at decode" in answer["message"]
        regions = "item_bytes of kv region 0 (layer 0) is 4096 at prefill for 1 heads and 8192 at decode for 1 heads"
        assert regions in answer["message"]
        assert initiator.call("submit", peer=stranger.name, local=[0], remote=[0])["error"] == "UnknownPeerError"
    assert move(initiator, target, [2], [2])["outcome"] == "done"


def test_two_peers_are_served_at_the_same_time(plane):
    with peers(plane, SMALL, "i", "A", "B") as (initiator, first, second):
        halves = (range(20), range(20, 40))  # of the initiator's pages: the two transfers share none
        wanted, jobs = [], []
        for target, mine, theirs in zip((first, second), halves, (range(20), range(40, 20, -1)), strict=True):
            assert initiator.connect(target) == {}
            target.arena.view[:] = np.random.default_rng(len(jobs)).integers(0, 256, target.arena.nbytes, np.uint8)
            jobs.append({"peer": target.name, "times": 200, "local": [*mine], "remote": [*theirs]})
        fill(initiator, second)
        for target, job in zip((first, second), jobs, strict=True):
            wanted.append(expected(initiator, target, job["local"], job["remote"]))
        assert [outcome for outcome, _ in initiator.call("together", jobs=jobs)] == ["done", "done"]
        for target, image in zip((first, second), wanted, strict=True):
            assert np.array_equal(target.arena.view, image)


def test_a_backend_names_the_transport_of_a_connected_peer(plane, pair):
    initiator, target = pair
    assert initiator.call("transport", peer=target.name) == {"transport": plane.transport}
    assert initiator.call("transport", peer="nobody") == {"transport": ""}


def test_a_peer_can_be_disconnected_and_connected_again(pair):
    initiator, target = pair
    for page in range(3):
        assert initiator.call("disconnect", peer=target.name) == {}
        assert initiator.call("submit", peer=target.name, local=[0], remote=[0])["error"] == "UnknownPeerError"
        assert initiator.connect(target) == {}
        assert move(initiator, target, [page], [page])["outcome"] == "done"


SPARE = 4
"""Connections that Mooncake opens to a peer when it needs them, and then keeps (MC_TCP_LANES_PER_PEER)."""


def test_forty_reconnections_leave_descriptors_and_threads_flat(pair):
    initiator, target = pair
    before = [holdings(peer) for peer in pair]
    for _ in range(40):
        assert initiator.call("disconnect", peer=target.name) == {}
        assert initiator.connect(target) == {}
    for peer, used in zip(pair, before, strict=True):
        comes_down(peer, used + SPARE)


def holdings(peer):
    """Descriptors and threads of a process; the other side of what was closed, and libraries' threads, end later."""
    used = peer.call("usage")
    return np.array([used["fds"], used["threads"]])


def comes_down(peer, limit):
    """Wait until the process has no more descriptors and threads than `limit`."""
    until(lambda: (holdings(peer) <= limit).all(), f"descriptors and threads down to {limit}, from {holdings(peer)},")


def test_two_thousand_transfers_leave_memory_and_descriptors_flat(pair):
    initiator, target = pair
    scattered = {"peer": target.name, "local": [9, 3, 27], "remote": [1, 40, 22]}
    initiator.call("repeat", **scattered, times=200)
    before = [(holdings(peer), peer.call("usage")["rss_anon_kib"]) for peer in pair]
    assert initiator.call("repeat", **scattered, times=2000, timeout_s=250)["failed"] == []
    for peer, (held, rss_kib) in zip(pair, before, strict=True):
        comes_down(peer, held + SPARE)
        assert peer.call("usage")["rss_anon_kib"] - rss_kib < 1024


def test_close_leaves_no_descriptor_and_no_thread(plane):
    with peers(plane, SMALL, "T") as (target,):
        initiator = Peer(plane.env)
        used = []
        for attempt in range(4):
            name = f"i{attempt}-{time.monotonic_ns():x}"
            initiator.post_open(plane.backend, name, host=plane.host, target=True, **SMALL)
            initiator.opened()
            assert initiator.connect(target) == {}
            assert move(initiator, target, [1], [1])["outcome"] == "done"
            assert initiator.call("close") == {}
            initiator.arena.close()
            used.append(holdings(initiator))
            # What libraries open once on first use stays; what a backend opened does not.
            comes_down(initiator, (used[min(attempt, 1)][0], used[0][1]))
        assert initiator.end() == 0


def test_an_idle_pair_uses_no_cpu(pair):
    initiator, target = pair
    move(initiator, target, [0], [0])

    def spent():
        before = [peer.call("usage")["cpu_s"] for peer in pair]
        time.sleep(2.0)  # the measured interval, not a wait for something
        return [peer.call("usage")["cpu_s"] - old for peer, old in zip(pair, before, strict=True)]

    tries = [spent()]
    while max(tries[-1]) >= 0.1 and len(tries) < 4:  # on a busy machine what the transfer began may end later
        tries.append(spent())
    assert max(tries[-1]) < 0.1, f"CPU seconds of initiator and target in 2 s of idleness, again and again: {tries}"

"""Two real processes, real zmq, real transfer backends: what arrives, and what an abort leaves behind.

That each lost frame is repeated is tested as hazard 24, and that a stranger ends nothing as hazard 11.
"""

import socket
import time
import urllib.request

import numpy as np
import pytest
import zmq
from pdpool_connector.protocol import frames as f
from pdpool_connector.runtime.worker import IN_FLIGHT

from tests.integration.cable import ask
from tests.integration.connector_peer import PAGES, Side
from tests.integration.handoffs import TIMEOUTS, fill, hold_a_write, offer, open_both, settle_empty


@pytest.fixture(scope="module")
def standing():
    """One pair for each backend, shared by the tests that leave it as they found it: a start takes seconds."""
    pairs: dict[str, tuple[Side, Side]] = {}

    def get(backend: str) -> tuple[Side, Side]:
        if backend not in pairs:
            options = {"timeouts": TIMEOUTS, "request_deadline_s": 60.0}
            pairs[backend] = (Side("prefill", backend, **options), Side("decode", backend, **options))
        return pairs[backend]

    yield get
    codes = [side.end() for pair in pairs.values() for side in reversed(pair)]
    assert set(codes) <= {0}, codes


@pytest.fixture
def pair(standing, backend):
    yield from _clean(*standing(backend))


@pytest.fixture
def local_pair(standing):
    yield from _clean(*standing("local"))


def _clean(prefill: Side, decode: Side):
    """Hand the pair over with known bytes, and see that the test has left no row behind."""
    decode.pages[:] = decode.aux[:] = 0
    fill(prefill, 1)
    yield prefill, decode
    settle_empty(prefill, decode)


def test_pages_and_aux_row_arrive_nowhere_else(pair) -> None:
    prefill, decode = pair
    open_both(prefill, decode, 7, pages=(8, 3, 60), aux_slot=5)
    prefill.send("r", [1, 2], last=False)
    prefill.send("r", [33], start=2, aux_slot=4)
    assert decode.until("r", "done")["bytes_moved"] == 3 * 4 * 512 + 64
    assert prefill.until("r", "done")["releasable"]
    assert (decode.pages[:, [8, 3, 60]] == prefill.pages[:, [1, 2, 33]]).all()
    assert (decode.aux[5] == prefill.aux[4]).all()
    others = np.setdiff1d(np.arange(PAGES), [8, 3, 60])
    assert not decode.pages[:, others].any()
    assert not np.delete(decode.aux, 5, axis=0).any()


def test_either_half_may_come_first(pair) -> None:
    prefill, decode = pair
    offer(decode, prefill, 1, name="early", pages=[1], aux_slot=1)
    prefill.settle(lambda stats: stats["attempts"]["parked"]["reqs"] == 1)
    prefill.open("early", 1)
    prefill.send("early", [10])
    decode.until("early", "done")
    prefill.open("late", 2)
    prefill.send("late", [11], aux_slot=2)
    offer(decode, prefill, 2, name="late", pages=[2], aux_slot=2)
    decode.until("late", "done")
    assert (decode.pages[:, [1, 2]] == prefill.pages[:, [10, 11]]).all()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_abort_releases_pages_once_writes_have_ended(pair, who: str) -> None:
    prefill, decode = pair
    aborter, other = (prefill, decode) if who == "prefill" else (decode, prefill)
    hold_a_write(prefill, decode)
    aborter.abort("r")
    assert aborter.until("r", "ended")["cause"] == "aborted"
    assert other.until("r", "ended")["cause"] == "peer_aborted"
    for side in (prefill, decode):
        side.settle(lambda stats: stats["holds"] == 1)
        assert not side.status("r")["releasable"]
    assert not decode.pages.any()
    prefill.call("release_writes")
    for side in (prefill, decode):
        side.until("r", "releasable")


def test_abort_stops_the_writer_between_chunks(sides, backend) -> None:
    prefill, decode = sides("prefill", backend, chunk_bytes=4 * 512), sides("decode", backend)
    fill(prefill, 1)
    open_both(prefill, decode, 7, pages=range(40))
    prefill.until("r", "ready")
    prefill.call("hold_writes")
    prefill.send("r", range(40), aux_slot=None)
    prefill.settle(lambda stats: stats["held_writes"] == IN_FLIGHT)
    decode.abort("r")
    prefill.until("r", "ended")
    prefill.call("release_writes")
    decode.until("r", "releasable")
    assert 0 < np.count_nonzero(decode.pages.any(axis=(0, 2))) < 40, "chunks went on after the abort"


def test_attempt_without_request_ends_at_deadline(local_pair) -> None:
    prefill, decode = local_pair
    offer(decode, prefill, 7, deadline_s=0.5)
    assert decode.until("r", "ended", within_s=10)["cause"] == "timed_out"
    decode.until("r", "releasable", within_s=10)


def test_bootstrap_host_outside_allowed_networks_is_refused(sides) -> None:
    decode = sides("decode", networks=["127.0.0.2/32"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        offer(decode, f"127.0.0.1:{listener.getsockname()[1]}", 7)
        status = decode.until("r", "ended")
        assert (status["cause"], "allowed networks" in status["message"]) == ("refused", True)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_unlike_models_are_refused_with_both_values(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode", model="another")
    offer(decode, prefill, 7)
    status = decode.until("r", "ended")
    assert status["cause"] == "invalid"
    assert "model is 'm' at prefill and 'another' at decode" in status["message"]


@pytest.mark.parametrize("newer", ["prefill", "decode"])
def test_unlike_versions_end_both_halves_at_once(sides, newer) -> None:
    versions = {"prefill": [1, 1], "decode": [1, 1], newer: [7, 8]}
    prefill, decode = (sides(role, versions=versions[role], timeouts=TIMEOUTS) for role in versions)
    prefill.open("r", 7)
    offer(decode, prefill, 7)
    named = {"prefill": "7..8 at prefill and 1..1 at decode", "decode": "1..1 at prefill and 7..8 at decode"}[newer]
    for side in (decode, prefill):
        status = side.until("r", "ended", within_s=5.0)  # a third of `match_s`
        assert status["cause"] == "invalid"
        assert f"protocol version is {named}" in status["message"]


def test_late_frames_change_nothing(local_pair) -> None:
    prefill, decode = local_pair
    decode.call("faults", delays={"Open": 0.7, "Offer": 0.7, "Ack": 0.7})
    open_both(prefill, decode, 7, name="old", pages=[8])
    prefill.send("old", [1])
    decode.until("old", "done")
    decode.lose()
    open_both(prefill, decode, 7, name="new", pages=[9])
    prefill.until("new", "ready")
    time.sleep(1.0)
    assert prefill.status("new")["phase"] == "ready"
    prefill.send("new", [2])
    decode.until("new", "done")
    assert (decode.pages[:, [8, 9]] == prefill.pages[:, [1, 2]]).all()


def test_garbage_on_control_port_is_counted(local_pair) -> None:
    prefill, decode = local_pair
    open_both(prefill, decode, 7)
    prefill.until("r", "ready")
    before = prefill.stats()["drops"]
    noise = np.random.default_rng(9)
    header = {"sender": "0" * 32, "attempt": f.AttemptId("0" * 32, 1), "room": 7}
    valid, future = (f.encode(f.Query(version=version, **header)) for version in (1, 99))
    messages = [[noise.bytes(100)], [b""], [valid], [future], [valid, valid], [b"\0" * (f.MAX_FRAME_BYTES + 1)]]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(f"tcp://{prefill.control}")
        for _ in range(20):
            for message in messages:
                dealer.send_multipart(message)
        raw = socket.create_connection(tuple(prefill.control.rsplit(":", 1)))
        raw.sendall(noise.bytes(4096))
        raw.close()
        with socket.create_connection(tuple(prefill.control.rsplit(":", 1))) as ancient:  # ZMTP 1.0: no greeting
            ancient.sendall(b"\x01\x00" + b"\x05\x00junk" * 20)
        wanted = {"malformed": 80, "version": 20, "unpaired": 20, "oversized": 20}
        prefill.settle(lambda stats: all(stats["drops"].get(r, 0) - before.get(r, 0) >= n for r, n in wanted.items()))
    prefill.send("r", [1, 2])
    decode.until("r", "done")


def test_close_under_load_ends_the_peers_halves(sides, backend) -> None:
    prefill, decode = sides("prefill", backend), sides("decode", backend)
    where = {"prefill": prefill.bootstrap}
    decode.call("many", calls=[("open", {"name": f"load{room}", "room": room, **where}) for room in range(500)])
    prefill.settle(lambda stats: stats["attempts"]["parked"]["reqs"] == 500)
    closed = prefill.call("close")
    assert closed["seconds"] < 5.0
    assert closed["threads"] == 1
    for room in (0, 250, 499):
        status = decode.until(f"load{room}", "ended")
        assert (status["cause"], status["releasable"]) == ("peer_lost", True)
    closed = decode.call("close")
    assert closed["seconds"] < 5.0
    assert closed["threads"] == 1


def test_http_serves_state_and_metrics(local_pair) -> None:
    prefill, decode = local_pair
    open_both(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.settle(lambda stats: stats["attempts"]["ready"]["reqs"] == 1)
    decode.settle(lambda stats: stats["attempts"]["offered"]["reqs"] == 1)
    state = ask(prefill.admin, "/v1/state")
    assert state["role"] == "prefill"
    assert state["incarnation"] == prefill.incarnation
    assert state["queues"]["prefill_bootstrap"]["reqs"] == 1
    assert state["queues"]["prefill_bootstrap"]["oldest_s"] > 0
    assert state["peers"][0]["incarnation"] == decode.incarnation
    assert state["peers"][0]["attempts"] == 1
    (peer,) = ask(decode.admin, "/v1/state")["peers"]
    assert (peer["attempts"], peer["waiting"]) == (1, 1)
    with urllib.request.urlopen(f"http://{decode.admin}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'pdpool_connector_attempts{rank="0",state="offered"} 1.0' in text
    decode.abort("r")


def test_hand_off_works_over_ipv6(sides, backend) -> None:
    prefill, decode = sides("prefill", backend, host="::1"), sides("decode", backend, host="::1")
    fill(prefill, 1)
    assert prefill.bootstrap.startswith("[::1]:")
    open_both(prefill, decode, 7)
    prefill.send("r", [1, 2])
    decode.until("r", "done")

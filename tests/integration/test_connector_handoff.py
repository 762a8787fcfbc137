"""Two real processes, real zmq, real data planes: what arrives, and what an abort leaves behind."""

import socket
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import zmq
from pdpool_connector.protocol import frames as f
from pdpool_connector.runtime.worker import IN_FLIGHT
from pdpool_reference.demo.launch import free_port

from tests.integration.cable import ask
from tests.integration.connector_peer import PAGES, Side
from tests.integration.handoffs import TIMING, fill, meet


@pytest.fixture(scope="module")
def standing():
    """One pair for each backend that tests share which leave it as they found it; starting a process takes seconds."""
    pairs: dict[str, tuple[Side, Side]] = {}

    def get(backend: str) -> tuple[Side, Side]:
        if backend not in pairs:
            options = {"timing": TIMING, "request_deadline_s": 60.0}
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
    for side in (prefill, decode):
        side.settle(lambda stats: stats["rows"] == stats["kept"] == stats["holds"] == 0)
        assert side.stats()["faults"] == 0


def test_pages_and_aux_row_arrive_where_they_belong_and_nowhere_else(pair) -> None:
    prefill, decode = pair
    meet(prefill, decode, 7, pages=(8, 3, 60))
    prefill.send("r", [1, 2], last=False)
    prefill.send("r", [33], start=2, aux_slot=4)
    assert decode.until("r", "done")["bytes_moved"] == 3 * 4 * 512 + 64
    assert prefill.until("r", "done")["releasable"]
    assert (decode.pages[:, [8, 3, 60]] == prefill.pages[:, [1, 2, 33]]).all()
    assert (decode.aux[5] == prefill.aux[4]).all()
    others = np.setdiff1d(np.arange(PAGES), [8, 3, 60])
    assert not decode.pages[:, others].any()
    assert not np.delete(decode.aux, 5, axis=0).any()


def test_decode_may_come_long_before_or_after_the_request(pair) -> None:
    prefill, decode = pair
    decode.open("early", 1, prefill=prefill.bootstrap, pages=[1], aux_slot=1)
    decode.settle(lambda stats: stats["attempts"]["accepted"]["reqs"] == 1)
    prefill.open("early", 1)
    prefill.send("early", [10])
    decode.until("early", "done")
    prefill.open("late", 2)
    prefill.send("late", [11], aux_slot=2)
    decode.open("late", 2, prefill=prefill.bootstrap, pages=[2], aux_slot=2)
    decode.until("late", "done")
    assert (decode.pages[:, [1, 2]] == prefill.pages[:, [10, 11]]).all()


def test_siblings_that_share_a_room_get_their_own_data(pair) -> None:
    prefill, decode = pair
    for sibling in range(4):
        prefill.open(f"s{sibling}", 9, sibling=sibling)
        prefill.send(f"s{sibling}", [20 + sibling], aux_slot=sibling)
    for sibling in (2, 0, 3, 1):
        arguments = {"pages": [40 + sibling], "aux_slot": sibling, "sibling": sibling}
        decode.open(f"s{sibling}", 9, prefill=prefill.bootstrap, **arguments)
    for sibling in range(4):
        decode.until(f"s{sibling}", "done")
    assert (decode.pages[:, 40:44] == prefill.pages[:, 20:24]).all()


def test_a_room_that_is_used_again_gets_its_own_data(pair) -> None:
    prefill, decode = pair
    for turn in range(5):
        name, target = f"t{turn}", 10 + turn
        meet(prefill, decode, 7, name=name, pages=[target])
        prefill.send(name, [30 + turn])
        decode.until(name, "done")
        prefill.until(name, "done")
    assert (decode.pages[:, 10:15] == prefill.pages[:, 30:35]).all()


def test_a_prefix_that_decode_holds_is_not_sent(pair) -> None:
    prefill, decode = pair
    meet(prefill, decode, 7, pages=[6], prefix_pages=2)
    assert prefill.until("r", "ready")["prefix_pages"] == 2
    prefill.send("r", [1, 2, 3])
    decode.until("r", "done")
    assert (decode.pages[:, 6] == prefill.pages[:, 3]).all()
    assert np.count_nonzero(decode.pages.any(axis=(0, 2))) == 1


@pytest.mark.parametrize("moment", ["before", "ready", "writing", "after"])
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_an_abort_ends_both_sides_and_releases_pages_only_when_quiet(pair, who: str, moment: str) -> None:
    prefill, decode = pair
    aborter, other = (prefill, decode) if who == "prefill" else (decode, prefill)
    if moment == "before":
        first = {"prefill": lambda: prefill.open("r", 7), "decode": lambda: _offer(decode, prefill)}
        second = {"prefill": lambda: _offer(decode, prefill), "decode": lambda: prefill.open("r", 7)}
        first[who]()
        aborter.abort("r")
        second[who]()
    else:
        meet(prefill, decode, 7)
        prefill.until("r", "ready")
        if moment != "ready":
            if moment == "writing":
                prefill.call("hold_writes")
            prefill.send("r", [1, 2])
        if moment == "after":
            decode.until("r", "done")
            prefill.until("r", "done")
        if moment == "writing":
            prefill.settle(lambda stats: stats["held_writes"] == 1)
        aborter.abort("r")
    if moment == "after":
        assert prefill.status("r")["phase"] == decode.status("r")["phase"] == "done"
        return
    assert aborter.until("r", "ended")["cause"] == "aborted"
    assert other.until("r", "ended")["cause"] == "peer_aborted"
    if moment == "writing":
        for side in (prefill, decode):
            side.settle(lambda stats: stats["holds"] == 1)
            assert not side.status("r")["releasable"]
        assert not decode.pages.any()
        prefill.call("release_writes")
    for side in (prefill, decode):
        side.until("r", "releasable")
        side.settle(lambda stats: stats["rows"] == stats["holds"] == stats["kept"] == 0)


def filtered(side: Side) -> int:
    return side.stats()["drops"].get("filtered", 0)


def _offer(decode: Side, prefill: Side) -> None:
    decode.open("r", 7, prefill=prefill.bootstrap, pages=[8, 3], aux_slot=5)


def test_a_write_that_lands_after_an_abort_finds_its_pages_still_held(local_pair) -> None:
    prefill, decode = local_pair
    meet(prefill, decode, 7)
    prefill.call("hold_writes")
    prefill.send("r", [1, 2])
    prefill.settle(lambda stats: stats["held_writes"] == 1)
    decode.abort("r")
    decode.until("r", "ended")
    deadline = time.monotonic() + 30
    prefill.call("release_writes")
    while not decode.pages[:, 8].any() and time.monotonic() < deadline:
        if decode.status("r")["releasable"]:
            break
    assert decode.pages[:, 8].any(), "the late bytes came after the pages were called releasable"
    decode.until("r", "releasable")


def test_an_abort_stops_the_writer_between_chunks(sides, backend) -> None:
    prefill, decode = sides("prefill", backend, chunk_bytes=4 * 512), sides("decode", backend)
    fill(prefill, 1)
    meet(prefill, decode, 7, pages=range(40))
    prefill.until("r", "ready")
    prefill.call("hold_writes")
    prefill.send("r", range(40), aux_slot=None)
    prefill.settle(lambda stats: stats["held_writes"] == IN_FLIGHT)
    decode.abort("r")
    prefill.until("r", "ended")
    prefill.call("release_writes")
    decode.until("r", "releasable")
    assert 0 < np.count_nonzero(decode.pages.any(axis=(0, 2))) < 40, "chunks went on after the abort"


def test_without_a_decode_a_request_ends_at_its_deadline(local_pair) -> None:
    prefill, _ = local_pair
    prefill.open("r", 7, deadline_s=0.5)
    prefill.send("r", [1])
    assert prefill.until("r", "ended", within_s=10)["cause"] == "timed_out"
    assert prefill.status("r")["releasable"]


def test_without_a_request_an_attempt_ends_at_its_deadline(local_pair) -> None:
    prefill, decode = local_pair
    decode.open("r", 7, prefill=prefill.bootstrap, pages=[1], aux_slot=0, deadline_s=0.5)
    assert decode.until("r", "ended", within_s=10)["cause"] == "timed_out"
    decode.until("r", "releasable", within_s=10)


def test_an_unreachable_prefill_fails_what_waits_for_it(sides) -> None:
    decode = sides("decode", connect_deadline_s=1.0)
    decode.open("r", 7, prefill=f"127.0.0.1:{free_port()}", pages=[1], aux_slot=0)
    status = decode.until("r", "ended")
    assert (status["cause"], status["releasable"]) == ("peer_lost", True)
    assert "cannot be reached" in status["message"]


def test_a_bootstrap_host_outside_the_allowed_networks_is_not_contacted(sides) -> None:
    decode = sides("decode", networks=["127.0.0.2/32"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        decode.open("r", 7, prefill=f"127.0.0.1:{listener.getsockname()[1]}", pages=[1], aux_slot=0)
        status = decode.until("r", "ended")
        assert (status["cause"], "allowed networks" in status["message"]) == ("refused", True)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_memories_that_do_not_fit_are_refused_with_field_and_values(sides, backend) -> None:
    prefill, decode = sides("prefill", backend), sides("decode", backend, model="another")
    decode.open("r", 7, prefill=prefill.bootstrap, pages=[1], aux_slot=0)
    status = decode.until("r", "ended")
    assert status["cause"] == "invalid"
    assert "model is 'm' here and 'another' at the peer" in status["message"]


@pytest.mark.parametrize("lost", ["Open", "Accepted", "Done", "Ack"])
def test_a_lost_frame_costs_time_and_nothing_else(local_pair, lost: str) -> None:
    prefill, decode = local_pair
    side = decode if lost in ("Open", "Ack") else prefill
    before = filtered(side)
    side.call("faults", delays={lost: None})
    meet(prefill, decode, 7)
    prefill.send("r", [1, 2])
    side.settle(lambda _: filtered(side) > before)
    side.call("faults", delays={})
    decode.until("r", "done")
    prefill.until("r", "done")
    assert (decode.pages[:, [8, 3]] == prefill.pages[:, [1, 2]]).all()
    for one in (prefill, decode):
        one.settle(lambda stats: stats["rows"] == 0)


@pytest.mark.parametrize("lost", ["Hello", "HelloOk"])
def test_a_lost_greeting_is_repeated(sides, lost: str) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    side = decode if lost == "Hello" else prefill
    side.call("faults", delays={lost: None})
    fill(prefill, 1)
    meet(prefill, decode, 7)
    prefill.send("r", [1, 2])
    side.settle(lambda stats: stats["drops"].get("filtered", 0) >= 1)
    side.call("faults", delays={})
    decode.until("r", "done")


@pytest.mark.parametrize("lost", ["Abort", "Drained"])
def test_a_lost_abort_or_answer_is_repeated(local_pair, lost: str) -> None:
    prefill, decode = local_pair
    side = decode if lost == "Abort" else prefill
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    before = filtered(side)
    side.call("faults", delays={lost: None})
    decode.abort("r")
    side.settle(lambda _: filtered(side) > before + 2)
    assert not decode.status("r")["releasable"]
    side.call("faults", delays={})
    decode.until("r", "releasable")
    assert prefill.until("r", "ended")["cause"] == "peer_aborted"


def test_frames_that_come_late_change_nothing(local_pair) -> None:
    prefill, decode = local_pair
    decode.call("faults", delays={"Open": 0.7, "Ack": 0.7})
    meet(prefill, decode, 7, name="old", pages=[8])
    prefill.send("old", [1])
    decode.until("old", "done")
    decode.call("faults", delays={})
    meet(prefill, decode, 7, name="new", pages=[9])
    prefill.until("new", "ready")
    time.sleep(1.0)
    assert prefill.status("new")["phase"] == "ready"
    prefill.send("new", [2])
    decode.until("new", "done")
    assert (decode.pages[:, [8, 9]] == prefill.pages[:, [1, 2]]).all()


def test_garbage_on_the_control_port_is_counted_and_stops_nobody(local_pair) -> None:
    prefill, decode = local_pair
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    before = prefill.stats()["drops"]
    noise = np.random.default_rng(9)
    valid = f.encode(f.Query(version=1, sender="0" * 32, attempt=f.AttemptId("0" * 32, 1), room=7, sibling=0))
    future = f.encode(f.Query(version=99, sender="0" * 32, attempt=f.AttemptId("0" * 32, 1), room=7, sibling=0))
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


def test_an_impostor_who_knows_every_name_ends_nothing(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    fill(prefill, 1)
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    header = {"version": 1, "sender": decode.incarnation, "attempt": f.AttemptId(decode.incarnation, 1), "room": 7}
    abort = f.Abort(**header, sibling=0, request_id="r", cause="aborted", message="I am decode")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(f"tcp://{prefill.control}")
        dealer.send(f.encode(abort))
        prefill.settle(lambda stats: stats["drops"].get("unpaired", 0) == 1)
    prefill.send("r", [1, 2])
    decode.until("r", "done")


def test_close_under_load_returns_and_tells_the_peer(sides, backend) -> None:
    prefill, decode = sides("prefill", backend), sides("decode", backend)
    decode.call("load", prefill=prefill.bootstrap, rooms=500)
    decode.settle(lambda stats: stats["attempts"]["accepted"]["reqs"] == 500)
    closed = prefill.call("close")
    assert closed["seconds"] < 5.0
    assert closed["threads"] == 1
    for room in (0, 250, 499):
        status = decode.until(f"load{room}", "ended")
        assert (status["cause"], status["releasable"]) == ("peer_lost", True)
    closed = decode.call("close")
    assert closed["seconds"] < 5.0
    assert closed["threads"] == 1


def test_a_draining_side_finishes_what_it_has_and_refuses_the_rest(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    fill(prefill, 1)
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.call("drain")
    prefill.open("new", 8)
    assert prefill.until("new", "ended")["cause"] == "refused"
    assert not prefill.settle(lambda stats: stats["draining"])["drained"]
    prefill.send("r", [1, 2])
    decode.until("r", "done")
    prefill.settle(lambda stats: stats["drained"])


def test_state_and_metrics_are_served_over_http(local_pair) -> None:
    prefill, decode = local_pair
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.settle(lambda stats: stats["attempts"]["ready"]["reqs"] == 1)
    decode.settle(lambda stats: stats["attempts"]["accepted"]["reqs"] == 1)
    state = ask(prefill.admin, "/v1/state")
    assert state["role"] == "prefill"
    assert state["incarnation"] == prefill.incarnation
    assert state["queues"]["prefill_bootstrap"]["reqs"] == 1
    assert state["queues"]["prefill_bootstrap"]["oldest_s"] > 0
    assert state["peers"][0]["incarnation"] == decode.incarnation
    assert (state["peers"][0]["attempts"], state["peers"][0]["waiting"]) == (1, 1)
    with urllib.request.urlopen(f"http://{decode.admin}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'pdpool_connector_attempts{rank="0",state="accepted"} 1.0' in text
    decode.abort("r")


def test_it_works_over_ipv6(sides, backend) -> None:
    prefill, decode = sides("prefill", backend, host="::1"), sides("decode", backend, host="::1")
    fill(prefill, 1)
    assert prefill.bootstrap.startswith("[::1]:")
    meet(prefill, decode, 7)
    prefill.send("r", [1, 2])
    decode.until("r", "done")

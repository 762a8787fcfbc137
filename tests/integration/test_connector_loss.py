"""Two real processes, of which one is killed, stopped or cut off: what fails, what is held, and what frees it."""

import contextlib
import re
import signal
import time
from dataclasses import astuple

import pytest

from tests.integration.cable import Cable
from tests.integration.connector_peer import AUX_BYTES, LAYERS, Side
from tests.integration.handoffs import TIMEOUTS, fill, hold_a_write, offer, open_both, settle_empty
from tests.integration.ports import KeptPort
from tests.state_kinds import WHOLE_BYTES, Kind


@pytest.fixture
def cable(sides):
    """Sides with a connection between them that can be cut."""
    with contextlib.ExitStack() as stack:

        def make(**options) -> tuple[Side, Side, Cable]:
            prefill, decode = sides("prefill", **options), sides("decode", **options)
            fill(prefill, 1)
            return prefill, decode, stack.enter_context(contextlib.closing(Cable(prefill)))

        yield make


def test_broken_connection_that_returns_costs_nothing(cable) -> None:
    # Each process that has a part in the return may be late.
    prefill, decode, wire = cable(timeouts={**TIMEOUTS, "lost_grace_s": 20.0})
    prefill.open("r", 7)
    offer(decode, wire.bootstrap, 7)
    prefill.send("r", [1], last=False)
    prefill.settle(lambda stats: stats["bytes_moved_total"] > 0)
    for _ in range(3):
        wire.cut()
    prefill.send("r", [2], start=1)
    decode.until("r", "done")
    prefill.until("r", "done")
    assert (decode.pages[:, [8, 3]] == prefill.pages[:, [1, 2]]).all()
    decode.settle(lambda stats: stats["outcomes"] == {"done": 1, "failed": 0, "aborted": 0})


def test_hold_after_partition_ends_on_reconnect(cable) -> None:
    prefill, decode, wire = cable()
    prefill.open("r", 7)
    offer(decode, wire.bootstrap, 7)
    prefill.until("r", "ready")
    wire.plugged = False
    wire.cut()
    assert decode.until("r", "ended")["cause"] == "peer_lost"
    assert prefill.until("r", "ended")["cause"] == "peer_lost"
    assert prefill.status("r")["releasable"]
    decode.settle(lambda stats: stats["holds"] == 1)
    wire.plugged = True
    prefill.open("again", 8)
    offer(decode, wire.bootstrap, 8, name="again", pages=[20])
    prefill.send("again", [5])
    decode.until("again", "done")
    assert decode.until("r", "releasable")["cause"] == "peer_lost"


def test_prefill_that_was_silent_costs_later_requests_little(cable) -> None:
    prefill, decode, wire = cable(
        timeouts={**TIMEOUTS, "connect_s": 1.5, "connect_again_s": 0.1, "silent_retry_s": 0.3}
    )
    wire.plugged = False
    offer(decode, wire.bootstrap, 7, name="first")
    first = decode.until("first", "ended")
    offer(decode, wire.bootstrap, 8, name="second")
    second = decode.until("second", "ended")
    assert (first["cause"], second["cause"]) == ("peer_lost", "peer_lost")
    assert "given up" not in first["message"]
    assert "given up" in second["message"]
    decode.settle(lambda stats: [link["state"] for link in stats["links"]] == ["silent"])
    wire.plugged = True
    decode.settle(lambda stats: [link["state"] for link in stats["links"]] == ["linked"])
    prefill.open("third", 9)
    offer(decode, wire.bootstrap, 9, name="third")
    prefill.send("third", [1, 2])
    decode.until("third", "done")


@pytest.mark.parametrize("deaf", ["prefill", "decode"])
def test_side_cut_one_way_is_not_lost(cable, sides, deaf: str) -> None:
    prefill, decode, wire = cable()
    other, life_s = sides("prefill"), 4.0
    fill(other, 2)

    def hand_off(name: str, room: int, pages: list[int], **more) -> None:
        prefill.open(name, room, **more)
        offer(decode, wire.bootstrap, room, name=name, pages=pages, **more)

    hand_off("sent", 2, [3, 4])
    open_both(other, decode, 3, name="kept", pages=[10, 11])
    prefill.until("sent", "ready")
    other.until("kept", "ready")
    opened = time.monotonic()
    hand_off("met", 1, [1, 2], deadline_s=life_s)
    prefill.until("met", "ready")
    wire.deafen(deaf)
    prefill.send("sent", [1, 2])
    hand_off("late", 4, [5], deadline_s=life_s)
    other.send("kept", [4, 5])
    decode.until("kept", "done")
    for side in (prefill, decode):
        for name in ("met", "late"):
            ended = side.until(name, "ended")
            assert ended["cause"] == "timed_out", "silence is no loss"
            assert ended["at"] - opened >= life_s
    prefill.until("sent", "done")
    # Prefill's settled result does not arrive, or prefill may have the memory of "late" as far as decode knows.
    held = {"prefill": {"late"}, "decode": {"met", "late"}}[deaf]
    decode.settle(lambda stats: stats["holds"] == len(held))
    assert {name for name in ("met", "late") if not decode.status(name)["releasable"]} == held
    if deaf == "prefill":
        decode.until("sent", "done")
    else:
        assert decode.status("sent")["phase"] == "transferring", "all bytes are there, and the result is not"
    assert prefill.incarnation in [peer["incarnation"] for peer in decode.stats()["peers"]]
    assert decode.incarnation in [peer["incarnation"] for peer in prefill.stats()["peers"]]

    wire.heal()
    decode.until("sent", "done")
    for name in held:
        decode.until(name, "releasable")
    hand_off("again", 5, [30, 31])
    prefill.send("again", [8, 9])
    decode.until("again", "done")
    assert (decode.pages[:, [3, 4, 30, 31]] == prefill.pages[:, [1, 2, 8, 9]]).all()
    assert (decode.pages[:, [10, 11]] == other.pages[:, [4, 5]]).all()
    assert not decode.pages[:, [1, 2, 5]].any()
    settle_empty(prefill, decode, other)
    assert decode.stats()["outcomes"] == {"done": 3, "failed": 2, "aborted": 0}


@pytest.fixture
def ports():
    """Ports that a prefill and its successor listen on."""
    with contextlib.closing(KeptPort()) as control, contextlib.closing(KeptPort()) as bootstrap:
        yield {"control_port": control.number, "bootstrap_port": bootstrap.number}


def test_killed_prefill_fails_hand_offs_and_holds_pages(sides, backend, ports) -> None:
    prefill, other = sides("prefill", backend, **ports), sides("prefill", backend)
    decode = sides("decode", backend)
    for side, name, page in ((prefill, "lost", 1), (other, "kept", 2)):
        fill(side, page)
        open_both(side, decode, 7, name=name, pages=[page, 10 + page])
        side.send(name, [4], last=False)
        side.settle(lambda stats: stats["bytes_moved_total"] > 0)
    prefill.kill()
    killed = time.monotonic()
    status = decode.until("lost", "ended")
    assert status["at"] - killed < 2.0
    assert (status["cause"], status["releasable"]) == ("peer_lost", False)
    assert decode.status("kept")["phase"] == "transferring"

    again = sides("prefill", backend, **ports)
    fill(again, 3)
    open_both(again, decode, 7, name="again", pages=[20])
    again.send("again", [5])
    decode.until("again", "done")
    assert (decode.pages[:, 20] == again.pages[:, 5]).all()

    other.send("kept", [5], start=1)
    decode.until("kept", "done")
    stats = decode.settle(lambda stats: stats["holds"] == 1)
    assert stats["held_bytes"] == 2 * 4 * 512 + AUX_BYTES
    assert not decode.status("lost")["releasable"]
    decode.call("fence", incarnation=prefill.incarnation, connections=False)
    if backend != "local":
        # All share an address: a connection to `other` may be the killed one's, one to its successor is not.
        open_both(again, decode, 8, name="more", pages=[21])
        again.send("more", [6])
        decode.until("more", "done")
        time.sleep(1.0)
        assert not decode.status("lost")["releasable"]
        assert other.end() == 0
    assert decode.until("lost", "releasable")["cause"] == "peer_lost"


@pytest.mark.parametrize("survives", ["prefill", "decode"])
def test_held_bytes_include_state_and_aux_row(sides, survives) -> None:
    kinds = {"state": {"window": [astuple(Kind())]}}
    prefill, decode = sides("prefill", **kinds), sides("decode", **kinds)
    open_both(prefill, decode, 7, pages=[], state={"window": [2, 5, 6]})
    prefill.until("r", "ready")
    prefill.call("hold_writes")
    prefill.send("r", [], state={"window": [1, 3, 4]})
    prefill.settle(lambda stats: stats["held_writes"] == 1)
    lost, survivor = (decode, prefill) if survives == "prefill" else (prefill, decode)
    lost.kill()
    stats = survivor.settle(lambda stats: stats["holds"] == 1)
    item_bytes = sum(region.shape[1] for region in survivor.state["window"])
    assert item_bytes == LAYERS * WHOLE_BYTES
    assert stats["held_bytes"] == 3 * item_bytes + AUX_BYTES


@pytest.mark.parametrize("survives", ["prefill", "decode"])
def test_each_fence_releases_the_holds_of_its_peer(sides, backend, survives) -> None:
    survivor = sides(survives, backend)
    peers = [sides("decode" if survives == "prefill" else "prefill", backend) for _ in range(3)]
    for number, peer in enumerate(peers):
        prefill, decode = (survivor, peer) if survives == "prefill" else (peer, survivor)
        pages = range(4 * number, 5 * number + 1)  # one more of each
        open_both(prefill, decode, number, name=f"{number}", pages=pages)
        prefill.until(f"{number}", "ready")
        if number < 2:
            prefill.call("hold_writes")
            prefill.send(f"{number}", pages)
            prefill.settle(lambda stats: stats["held_writes"] == 1)
    for peer in peers[:2]:
        peer.kill()

    def is_held(*numbers: int) -> None:
        """The holds are for these peers: pages of each region, and an aux row."""
        wanted = {peers[number].incarnation: 1 for number in numbers}
        held_bytes = sum((number + 1) * 4 * 512 + AUX_BYTES for number in numbers)
        stats = survivor.settle(lambda stats: stats["holds"] == len(numbers))
        assert {row["incarnation"]: row["holds"] for row in stats["held_for"]} == wanted
        assert stats["held_bytes"] == held_bytes

    is_held(0, 1)
    survivor.call("fence", incarnation=peers[0].incarnation)
    is_held(1)
    survivor.call("fence", incarnation=peers[1].incarnation)
    is_held()
    if survives == "prefill":
        survivor.call("release_writes")
    (survivor if survives == "prefill" else peers[2]).send("2", [1, 2, 3])
    assert survivor.until("2", "ended")["phase"] == "done"


def test_fence_waits_for_connections_of_a_running_peer(sides) -> None:
    prefill, decode = sides("prefill", "nixl"), sides("decode", "nixl")
    hold_a_write(prefill, decode)
    prefill.signal(signal.SIGSTOP)
    decode.abort("r")
    decode.settle(lambda stats: stats["holds"] == 1)
    decode.call("fence", incarnation=prefill.incarnation, connections=False)
    time.sleep(1.0)
    assert not decode.status("r")["releasable"]
    prefill.kill()
    decode.until("r", "releasable")


def test_hand_off_to_lost_peer_holds_nothing(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    open_both(prefill, decode, 7)
    prefill.send("r", [1, 2])
    decode.until("r", "done")
    decode.settle(lambda stats: stats["peers"])  # stats may be older than the pairing
    prefill.kill()
    decode.settle(lambda stats: not stats["peers"])
    offer(decode, prefill, 8, name="late", pages=[12])
    decode.abort("late")
    decode.until("late", "releasable")
    assert decode.stats()["holds"] == 0


def test_fence_of_unknown_peer_needs_its_connections_ended(sides) -> None:
    decode = sides("decode", "nixl")
    with pytest.raises(AssertionError, match="ContainerTerminated is no proof for backend 'nixl'"):
        decode.call("fence", incarnation="0" * 32, connections=False)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_exit_on_this_host_fences_without_a_call(sides, backend, victim: str, capfd) -> None:
    prefill, decode = sides("prefill", backend, elsewhere=False), sides("decode", backend, elsewhere=False)
    hold_a_write(prefill, decode)
    killed, survivor = (prefill, decode) if victim == "prefill" else (decode, prefill)
    killed.kill()
    began = time.monotonic()
    status = survivor.until("r", "releasable")
    assert status["cause"] == "peer_lost"
    assert status["at"] - began < 5.0
    logged = re.search(rf"fence of {killed.incarnation}: (.*)", capfd.readouterr().err)
    assert logged, "the log does not name the proof"
    who = f"{'decode' if survivor is decode else 'prefill'} {survivor.incarnation}"
    assert logged[1].startswith(f"ProcessExited(pid={killed.process.pid}, seen_by='{who}')")
    prefill.call("release_writes") if victim == "decode" else None
    survivor.settle(lambda stats: stats["holds"] == stats["kept"] == 0)


def test_stopped_process_of_this_host_is_not_fenced(sides, backend) -> None:
    prefill, decode = sides("prefill", backend, elsewhere=False), sides("decode", backend, elsewhere=False)
    open_both(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.signal(signal.SIGSTOP)
    decode.abort("r")
    decode.settle(lambda stats: stats["holds"] == 1)
    assert not decode.status("r")["releasable"]
    prefill.signal(signal.SIGCONT)
    decode.until("r", "releasable")


def test_killed_decode_fails_hand_offs_at_once(sides, backend) -> None:
    prefill, decode = sides("prefill", backend), sides("decode", backend)
    fill(prefill, 1)
    open_both(prefill, decode, 7)
    prefill.until("r", "ready")
    decode.kill()
    killed = time.monotonic()
    status = prefill.until("r", "ended")
    assert status["at"] - killed < 2.0
    assert (status["cause"], status["releasable"]) == ("peer_lost", True)
    again = sides("decode", backend)
    open_both(prefill, again, 7, name="again")
    prefill.send("again", [1, 2])
    again.until("again", "done")


def test_frozen_prefill_is_not_lost(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    fill(prefill, 1)
    open_both(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.signal(signal.SIGSTOP)
    time.sleep(3)
    assert decode.status("r")["phase"] == "transferring"
    prefill.signal(signal.SIGCONT)
    prefill.send("r", [1, 2])
    decode.until("r", "done")

"""Two real processes, of which one is killed, stopped or cut off: what fails, what is held, and what frees it."""

import contextlib
import re
import signal
import time
from dataclasses import astuple

import pytest
from pdpool_reference.demo.launch import free_port

from tests.integration.cable import Cable
from tests.integration.connector_peer import AUX_BYTES, LAYERS, Side
from tests.integration.handoffs import fill, meet
from tests.state_kinds import WHOLE_BYTES, Kind


def hold_a_write(prefill: Side, decode: Side) -> None:
    """Leave a hand-off in the middle: its only write is submitted, and lands when the data plane is let go on."""
    fill(prefill, 1)
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.call("hold_writes")
    prefill.send("r", [1, 2])
    prefill.settle(lambda stats: stats["held_writes"] == 1)


@pytest.fixture
def cable(sides):
    """Sides with a connection between them that can be cut."""
    with contextlib.ExitStack() as stack:

        def make(**options) -> tuple[Side, Side, Cable]:
            prefill, decode = sides("prefill", **options), sides("decode", **options)
            fill(prefill, 1)
            return prefill, decode, stack.enter_context(contextlib.closing(Cable(prefill)))

        yield make


def test_a_connection_that_breaks_and_comes_back_costs_nothing(cable) -> None:
    # All processes that are needed for it to come back may be late.
    prefill, decode, wire = cable(grace_s=20.0)
    prefill.open("r", 7)
    decode.open("r", 7, prefill=wire.bootstrap, pages=[8, 3], aux_slot=5)
    prefill.send("r", [1], last=False)
    decode.until("r", "transferring")
    for _ in range(3):
        wire.cut()
    prefill.send("r", [2], start=1)
    decode.until("r", "done")
    prefill.until("r", "done")
    assert (decode.pages[:, [8, 3]] == prefill.pages[:, [1, 2]]).all()
    decode.settle(lambda stats: stats["outcomes"] == {"done": 1, "failed": 0, "aborted": 0})


def test_a_hold_after_a_partition_ends_when_both_sides_meet_again(cable) -> None:
    prefill, decode, wire = cable()
    prefill.open("r", 7)
    decode.open("r", 7, prefill=wire.bootstrap, pages=[8, 3], aux_slot=5)
    prefill.until("r", "ready")
    wire.plugged = False
    wire.cut()
    assert decode.until("r", "ended")["cause"] == "peer_lost"
    assert prefill.until("r", "ended")["cause"] == "peer_lost"
    assert prefill.status("r")["releasable"]
    decode.settle(lambda stats: stats["holds"] == 1)
    wire.plugged = True
    prefill.open("again", 8)
    decode.open("again", 8, prefill=wire.bootstrap, pages=[20], aux_slot=6)
    prefill.send("again", [5])
    decode.until("again", "done")
    assert decode.until("r", "releasable")["cause"] == "peer_lost"


@pytest.mark.parametrize("deaf", ["prefill", "decode"])
def test_a_side_that_hears_nothing_is_not_lost_and_goes_on_where_it_stood_when_it_hears_again(
    cable, sides, deaf: str
) -> None:
    prefill, decode, wire = cable()
    other, life_s = sides("prefill"), 4.0
    fill(other, 2)

    def offer(name: str, room: int, pages: list[int], **more) -> None:
        prefill.open(name, room, **more)
        decode.open(name, room, prefill=wire.bootstrap, pages=pages, aux_slot=room, **more)

    offer("sent", 2, [3, 4])
    meet(other, decode, 3, name="kept", pages=[10, 11])
    prefill.until("sent", "ready")
    other.until("kept", "ready")
    opened = time.monotonic()
    offer("met", 1, [1, 2], deadline_s=life_s)
    prefill.until("met", "ready")
    wire.deafen(deaf)
    prefill.send("sent", [1, 2])
    offer("late", 4, [5], deadline_s=life_s)
    other.send("kept", [4, 5])
    decode.until("kept", "done")
    for side in (prefill, decode):
        for name in ("met", "late"):
            ended = side.until(name, "ended")
            assert ended["cause"] == "timed_out", "silence is no loss"
            assert ended["at"] - opened >= life_s
    prefill.until("sent", "done")
    # What prefill has said of its quiet is not heard, or it was never told of the pages as far as decode knows.
    held = {"prefill": {"late"}, "decode": {"met", "late"}}[deaf]
    decode.settle(lambda stats: stats["holds"] == len(held))
    assert {name for name in ("met", "late") if not decode.status(name)["releasable"]} == held
    if deaf == "prefill":
        decode.until("sent", "done")
    else:
        assert decode.status("sent")["phase"] == "waiting", "all bytes are there, and nobody has said so"
    assert prefill.incarnation in [peer["incarnation"] for peer in decode.stats()["peers"]]
    assert decode.incarnation in [peer["incarnation"] for peer in prefill.stats()["peers"]]

    wire.heal()
    decode.until("sent", "done")
    for name in held:
        decode.until(name, "releasable")
    offer("again", 5, [30, 31])
    prefill.send("again", [8, 9])
    decode.until("again", "done")
    assert (decode.pages[:, [3, 4, 30, 31]] == prefill.pages[:, [1, 2, 8, 9]]).all()
    assert (decode.pages[:, [10, 11]] == other.pages[:, [4, 5]]).all()
    assert not decode.pages[:, [1, 2, 5]].any()
    for side in (prefill, decode, other):
        stats = side.settle(lambda stats: stats["rows"] == stats["kept"] == stats["holds"] == 0)
        assert stats["faults"] == 0
    assert decode.stats()["outcomes"] == {"done": 3, "failed": 2, "aborted": 0}


def test_a_killed_prefill_fails_its_attempts_at_once_holds_their_pages_and_is_served_when_it_is_back(
    sides, backend
) -> None:
    ports = {"control_port": free_port(), "bootstrap_port": free_port()}
    prefill, other = sides("prefill", backend, **ports), sides("prefill", backend)
    decode = sides("decode", backend)
    for side, name, page in ((prefill, "lost", 1), (other, "kept", 2)):
        fill(side, page)
        side.open(name, 7)
        decode.open(name, 7, prefill=side.bootstrap, pages=[page, 10 + page], aux_slot=page)
        side.send(name, [4], last=False)
        decode.until(name, "transferring")
    prefill.kill()
    killed = time.monotonic()
    status = decode.until("lost", "ended")
    assert status["at"] - killed < 2.0
    assert (status["cause"], status["releasable"]) == ("peer_lost", False)
    assert decode.status("kept")["phase"] == "transferring"

    again = sides("prefill", backend, **ports)
    fill(again, 3)
    meet(again, decode, 7, name="again", pages=[20])
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
        # All share an address here: what leads to `other` may be the killed one's; what leads to its successor is not.
        again.open("more", 8)
        decode.open("more", 8, prefill=again.bootstrap, pages=[21], aux_slot=0)
        again.send("more", [6])
        decode.until("more", "done")
        time.sleep(1.0)
        assert not decode.status("lost")["releasable"]
        assert other.end() == 0
    assert decode.until("lost", "releasable")["cause"] == "peer_lost"


@pytest.mark.parametrize("survives", ["prefill", "decode"])
def test_state_and_an_aux_row_count_among_the_bytes_that_are_held(sides, survives) -> None:
    kinds = {"state": [astuple(Kind())]}
    prefill, decode = sides("prefill", **kinds), sides("decode", **kinds)
    meet(prefill, decode, 7, pages=[], state=[2, 5, 6])
    prefill.until("r", "ready")
    prefill.call("hold_writes")
    prefill.send("r", [], state=[1, 3, 4])
    prefill.settle(lambda stats: stats["held_writes"] == 1)
    lost, survivor = (decode, prefill) if survives == "prefill" else (prefill, decode)
    lost.kill()
    stats = survivor.settle(lambda stats: stats["holds"] == 1)
    item_bytes = sum(region.shape[1] for region in survivor.state)
    assert item_bytes == LAYERS * WHOLE_BYTES
    assert stats["held_bytes"] == 3 * item_bytes + AUX_BYTES


@pytest.mark.parametrize("survives", ["prefill", "decode"])
def test_memory_is_held_for_exactly_the_peers_that_were_lost_until_each_is_fenced(sides, backend, survives) -> None:
    survivor = sides(survives, backend)
    peers = [sides("decode" if survives == "prefill" else "prefill", backend) for _ in range(3)]
    for number, peer in enumerate(peers):
        prefill, decode = (survivor, peer) if survives == "prefill" else (peer, survivor)
        pages = range(4 * number, 5 * number + 1)  # one more of each
        meet(prefill, decode, number, name=f"{number}", pages=pages, aux_slot=number)
        prefill.until(f"{number}", "ready")
        if number < 2:
            prefill.call("hold_writes")
            prefill.send(f"{number}", pages)
            prefill.settle(lambda stats: stats["held_writes"] == 1)
    for peer in peers[:2]:
        peer.kill()

    def is_held(*numbers: int) -> None:
        """For whom, with how many bytes: pages of each region, and an aux row."""
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


def test_the_word_on_a_peer_that_still_runs_and_has_connections_here_frees_nothing(sides) -> None:
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


def test_a_hand_off_that_is_opened_while_the_peers_connection_is_down_holds_nothing(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    meet(prefill, decode, 7)
    prefill.send("r", [1, 2])
    decode.until("r", "done")
    decode.settle(lambda stats: stats["peers"])  # what stats show may be older than the pairing
    prefill.kill()
    decode.settle(lambda stats: not stats["peers"])
    decode.open("late", 8, prefill=prefill.bootstrap, pages=[12], aux_slot=1)
    decode.abort("late")
    decode.until("late", "releasable")
    assert decode.stats()["holds"] == 0


def test_an_unknown_peers_end_over_tcp_is_not_believed_for_its_connections_cannot_be_told(sides) -> None:
    decode = sides("decode", "nixl")
    with pytest.raises(AssertionError, match="ContainerTerminated is no proof for backend 'nixl'"):
        decode.call("fence", incarnation="0" * 32, connections=False)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_the_end_of_a_process_of_this_host_fences_it_without_a_call(sides, backend, victim: str, capfd) -> None:
    prefill, decode = sides("prefill", backend, elsewhere=False), sides("decode", backend, elsewhere=False)
    hold_a_write(prefill, decode)
    killed, survivor = (prefill, decode) if victim == "prefill" else (decode, prefill)
    killed.kill()
    began = time.monotonic()
    status = survivor.until("r", "releasable")
    assert status["cause"] == "peer_lost"
    assert status["at"] - began < 5.0
    logged = re.search(rf"fence of {killed.incarnation}: (.*)", capfd.readouterr().err)
    assert logged, "without a call, too, the log says what was proof"
    who = f"{'decode' if survivor is decode else 'prefill'} {survivor.incarnation}"
    assert logged[1].startswith(f"ProcessExited(pid={killed.process.pid}, seen_by='{who}')")
    prefill.call("release_writes") if victim == "decode" else None
    survivor.settle(lambda stats: stats["holds"] == stats["kept"] == 0)


def test_the_end_of_a_prefill_of_this_host_frees_what_a_read_from_it_has_left_unsettled(sides, backend) -> None:
    prefill, decode = (
        sides(role, backend, elsewhere=False, direction="read", timing={"drain_s": 0.1})
        for role in ("prefill", "decode")
    )
    fill(prefill, 1)
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    decode.call("hold_writes")
    prefill.send("r", [1, 2])
    decode.settle(lambda stats: stats["held_writes"] == 1)
    prefill.kill()
    decode.until("r", "ended")
    decode.settle(lambda stats: stats["holds"] == 1)
    decode.call("release_writes")
    assert decode.until("r", "releasable")["cause"] == "peer_lost"
    decode.settle(lambda stats: stats["holds"] == stats["kept"] == 0)


def test_a_stopped_process_of_this_host_is_not_fenced(sides, backend) -> None:
    prefill, decode = sides("prefill", backend, elsewhere=False), sides("decode", backend, elsewhere=False)
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.signal(signal.SIGSTOP)
    decode.abort("r")
    decode.settle(lambda stats: stats["holds"] == 1)
    assert not decode.status("r")["releasable"]
    prefill.signal(signal.SIGCONT)
    decode.until("r", "releasable")


def test_a_killed_decode_fails_its_attempts_at_once_and_a_new_one_is_served(sides, backend) -> None:
    prefill, decode = sides("prefill", backend), sides("decode", backend)
    fill(prefill, 1)
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    decode.kill()
    killed = time.monotonic()
    status = prefill.until("r", "ended")
    assert status["at"] - killed < 2.0
    assert (status["cause"], status["releasable"]) == ("peer_lost", True)
    again = sides("decode", backend)
    meet(prefill, again, 7, name="again")
    prefill.send("again", [1, 2])
    again.until("again", "done")


def test_a_frozen_prefill_is_not_taken_for_dead(sides) -> None:
    prefill, decode = sides("prefill"), sides("decode")
    fill(prefill, 1)
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.signal(signal.SIGSTOP)
    time.sleep(3)
    assert decode.status("r")["phase"] == "waiting"
    prefill.signal(signal.SIGCONT)
    prefill.send("r", [1, 2])
    decode.until("r", "done")

"""Both connectors in one process, over the local backend: open early, offer later, send, and abort at every point."""

import ctypes
import threading
import time

import msgspec
import numpy as np
import pytest
from pdpool_connector import (
    Cause,
    ConnectorConfig,
    DecodeConnector,
    HandoffError,
    HostArena,
    Phase,
    PrefillConnector,
    Timeouts,
    shard_model,
)

from tests.unit.runtime.small_memory import SMALL_BYTES, lay_out

WAIT_S = 20.0
PAGE = 256
AUX = 2 * 8 * PAGE
INSTANCES = {True: shard_model([1, 1], 1)}
"""A decode instance of two layers, of which a rank holds one."""


class Pair:
    """A prefill and a decode connector, and the memory of both."""

    def __init__(self, **settings) -> None:
        self.arenas = {role: HostArena(SMALL_BYTES) for role in ("prefill", "decode")}
        self.news = threading.Event()
        config = ConnectorConfig("127.0.0.1", **{"timeouts": Timeouts(match_s=5.0), "facts": {"a": "b"}, **settings})
        self.prefill = PrefillConnector(config, lay_out(self.arenas["prefill"]))
        self.decode = DecodeConnector(config, lay_out(self.arenas["decode"]), self.news.set)

    def open_decode(self, room=7, **arguments):
        return self.decode.open(self.prefill.bootstrap_address, room, f"request {room}", **arguments)

    def open_both(self, room=7):
        return self.prefill.open(room, f"request {room}"), self.open_decode(room)

    def fill(self, role, value):
        ctypes.memset(self.arenas[role].address, value, SMALL_BYTES)

    def bytes_of(self, role, at, count):
        return ctypes.string_at(self.arenas[role].address + at, count)


@pytest.fixture
def pair():
    made = Pair()
    with made.prefill, made.decode:
        yield made


def wait_for(transfer, phase):
    deadline = time.monotonic() + WAIT_S
    while transfer.status.phase is not phase:
        assert time.monotonic() < deadline, transfer.status
        time.sleep(0.002)


def assert_aborted(transfer, cause):
    status = transfer.wait_released(WAIT_S)
    assert (status.phase, status.cause) == (Phase.FAILED, cause), status


class TestSuccess:
    def test_pages_land_where_decode_offered(self, pair):
        pair.fill("prefill", 0xAB)
        source, target = pair.open_both()
        target.offer([4, 5, 6], aux_slot=2)
        source.send([0, 1], start=0, last=False)
        source.send(np.array([7], np.int64), start=2, last=True, aux_slot=1)
        assert target.wait(WAIT_S).phase is Phase.DONE
        assert source.wait_released(WAIT_S).phase is Phase.DONE
        landed = pair.bytes_of("decode", 4 * PAGE, 3 * PAGE)
        assert landed == b"\xab" * len(landed)
        assert pair.bytes_of("decode", AUX + 2 * 64, 64) == b"\xab" * 64
        assert pair.bytes_of("decode", AUX, 64) == bytes(64)
        assert pair.bytes_of("decode", 0, PAGE) == bytes(PAGE)

    def test_sends_before_offer_wait(self, pair):
        source, target = pair.open_both()
        source.send([1], start=0, last=True)
        assert source.status.phase is Phase.WAITING
        target.offer([3], aux_slot=0)
        assert target.wait(WAIT_S).phase is Phase.DONE

    def test_prefix_pages_are_not_sent(self, pair):
        pair.fill("prefill", 1)
        source, target = pair.open_both()
        target.offer([3], aux_slot=0, prefix_pages=1)
        wait_for(source, Phase.READY)
        assert source.status.prefix_pages == 1
        source.send([0, 1], start=0, last=True)
        assert target.wait(WAIT_S).bytes_moved == 2 * PAGE

    def test_facts_arrive_with_the_registry(self, pair):
        deadline = time.monotonic() + WAIT_S
        while (facts := pair.decode.facts(pair.prefill.bootstrap_address)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert facts == {"a": "b"}

    def test_poll_returns_each_change_once(self, pair):
        source, target = pair.open_both()
        target.offer([1], aux_slot=0)
        source.send([1], start=0, last=True)
        source.wait_released(WAIT_S)
        target.wait_released(WAIT_S)
        assert pair.news.is_set()
        assert (pair.prefill.poll(), pair.decode.poll()) == ([source], [target])
        assert (pair.prefill.poll(), pair.decode.poll()) == ([], [])

    def test_same_prompt_twice_in_a_room(self, pair):
        ends = []
        for _ in range(2):
            ends += pair.open_both()
        for at, target in enumerate(ends[1::2]):
            target.offer([at], aux_slot=at)
        for source in ends[::2]:
            source.send([5], start=0, last=True)
        assert all(end.wait(WAIT_S).phase is Phase.DONE for end in ends)


class TestAbort:
    @pytest.mark.parametrize("cause", [Cause.ABORTED, Cause.REFUSED, Cause.TOO_LONG, Cause.INVALID])
    def test_decode_aborts_before_offer(self, pair, cause):
        source, target = pair.open_both()
        target.abort("no room for it", cause)
        assert_aborted(target, cause)
        assert_aborted(source, cause.seen_by_peer())
        assert "no room for it" in source.status.message

    def test_decode_aborts_before_prefill_opens(self, pair):
        target = pair.open_decode()
        target.abort("too long", Cause.TOO_LONG)
        assert_aborted(target, Cause.TOO_LONG)
        assert_aborted(pair.prefill.open(7, "request 7"), Cause.TOO_LONG)

    def test_prefill_aborts_before_decode_opens(self, pair):
        source = pair.prefill.open(7, "request 7")
        source.abort("bad temperature", Cause.REFUSED)
        assert_aborted(source, Cause.REFUSED)
        assert_aborted(pair.open_decode(), Cause.REFUSED)

    def test_decode_aborts_after_offer(self, pair):
        source, target = pair.open_both()
        target.offer([1, 2], aux_slot=0)
        wait_for(source, Phase.READY)
        target.abort()
        assert_aborted(target, Cause.ABORTED)
        assert_aborted(source, Cause.PEER_ABORTED)

    @pytest.mark.parametrize("aborts_first", ["prefill", "decode"])
    def test_abort_between_two_sends(self, pair, aborts_first):
        source, target = pair.open_both()
        target.offer([1, 2], aux_slot=0)
        source.send([1], start=0, last=False)
        wait_for(source, Phase.TRANSFERRING)
        first, second = (source, target) if aborts_first == "prefill" else (target, source)
        first.abort("enough")
        assert_aborted(first, Cause.ABORTED)
        assert_aborted(second, Cause.PEER_ABORTED)

    def test_abort_after_done_changes_nothing(self, pair):
        source, target = pair.open_both()
        target.offer([1], aux_slot=0)
        source.send([1], start=0, last=True)
        assert target.wait_released(WAIT_S).phase is Phase.DONE
        target.abort()
        source.wait_released(WAIT_S)
        source.abort()
        assert (source.status.phase, target.status.phase) == (Phase.DONE, Phase.DONE)
        target.raise_for_status()

    def test_failure_raises_with_its_status(self, pair):
        target = pair.open_decode()
        target.abort("gone")
        target.wait(WAIT_S)
        with pytest.raises(HandoffError, match=r"room 7.*aborted: gone") as raised:
            target.raise_for_status()
        assert raised.value.status == target.status


class TestOffer:
    def test_offer_after_the_end_is_nothing(self, pair):
        target = pair.open_decode()
        target.abort()
        target.wait_released(WAIT_S)
        target.offer([1], aux_slot=0)
        other = pair.open_decode(8)
        other.offer([1], aux_slot=0)

    def test_second_offer_is_refused(self, pair):
        target = pair.open_decode()
        target.offer([1], aux_slot=0)
        with pytest.raises(RuntimeError, match=r"offer\(\) of room 7 was called before"):
            target.offer([2], aux_slot=1)

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            (([1, 2], 1), "pages holds 2, which room 7, request 'request 7' was offered"),
            (([3], 0), "aux_slot holds 0, which room 7"),
        ],
    )
    def test_memory_of_a_live_offer_is_refused(self, pair, second, message):
        pair.open_decode().offer([2], aux_slot=0)
        pages, aux_slot = second
        other = pair.open_decode(8)
        with pytest.raises(ValueError, match=message):
            other.offer(pages, aux_slot=aux_slot)
        other.offer([4], aux_slot=3)

    def test_missing_aux_slot_is_refused(self, pair):
        with pytest.raises(ValueError, match=r"aux_slot is missing: decode's memory has aux rows 0\.\.3"):
            pair.open_decode().offer([1])


class TestReady:
    def test_send_waits_until_ready(self, pair):
        source, target = pair.open_both()
        target.offer([1, 2], aux_slot=0)
        computed = threading.Event()
        source.send([1], start=0, ready=computed.is_set)
        source.send([2], start=1, last=True)
        wait_for(source, Phase.READY)
        with pytest.raises(TimeoutError, match=r"room 7, request 'request 7' has not ended within 0\.1 s"):
            source.wait(0.1)
        assert source.status.phase is Phase.READY
        computed.set()
        assert target.wait(WAIT_S).phase is Phase.DONE

    def test_abort_before_ready_leaves_nothing_in_flight(self, pair):
        source, target = pair.open_both()
        target.offer([1], aux_slot=0)
        wait_for(source, Phase.READY)
        source.send([1], start=0, last=True, ready=lambda: False)
        source.abort()
        assert_aborted(source, Cause.ABORTED)
        assert source.status.bytes_moved == 0
        assert_aborted(target, Cause.PEER_ABORTED)

    def test_never_ready_ends_at_the_deadline(self, pair):
        source = pair.prefill.open(7, "request 7", deadline_s=0.5)
        target = pair.open_decode()
        target.offer([1], aux_slot=0)
        source.send([1], start=0, last=True, ready=lambda: False)
        assert_aborted(source, Cause.TIMED_OUT)
        assert_aborted(target, Cause.TIMED_OUT)

    def test_ready_that_raises_fails_the_handoff(self, pair):
        def raising():
            raise ZeroDivisionError("no event")

        source, target = pair.open_both()
        target.offer([1], aux_slot=0)
        source.send([1], start=0, last=True, ready=raising)
        assert_aborted(source, Cause.INTERNAL)
        assert "ZeroDivisionError: no event" in source.status.message
        target.wait_released(WAIT_S)


class TestMisfit:
    @pytest.mark.parametrize(
        ("changes", "difference"),
        [
            ({"model": "n"}, "model is 'm' at prefill and 'n' at decode"),
            ({"page_tokens": 8, "head_dim": 8}, "page_tokens is 16 at prefill and 8 at decode"),
            ({"total_layers": 2}, "total_layers is 1 at prefill and 2 at decode"),
        ],
        ids=["refused by prefill", "two values", "found by decode"],
    )
    def test_both_sides_name_what_differs_at_once(self, changes, difference):
        arenas = [HostArena(SMALL_BYTES), HostArena(SMALL_BYTES)]
        memory = msgspec.structs.replace(lay_out(arenas[1]), **changes)
        config = ConnectorConfig("127.0.0.1", instance=INSTANCES.get("total_layers" in changes, ()))
        prefill = PrefillConnector(ConnectorConfig("127.0.0.1"), lay_out(arenas[0]))
        with prefill, DecodeConnector(config, memory) as decode:
            source = prefill.open(7, "request 7")
            begun = time.monotonic()
            target = decode.open(prefill.bootstrap_address, 7, "request 7")
            assert_aborted(target, Cause.INVALID)
            assert_aborted(source, Cause.INVALID)
            assert time.monotonic() - begun < 2.0, "not by a deadline"
            assert difference in target.status.message
            assert difference in source.status.message
            late = decode.open(prefill.bootstrap_address, 8, "request 8")
            assert_aborted(late, Cause.INVALID)
            assert_aborted(prefill.open(8, "request 8"), Cause.INVALID)
            assert prefill.stats().peers == ()
        assert prefill.stats().faults == decode.stats().faults == 0


def test_refused_connections_fail_within_two_seconds(memory):
    config = ConnectorConfig("127.0.0.1")
    with PrefillConnector(config, memory) as prefill:
        address = prefill.bootstrap_address
    with DecodeConnector(config, memory) as decode:
        begun = time.monotonic()
        target = decode.open(address, 7, "request 7")
        target.offer([1], aux_slot=0)
        assert_aborted(target, Cause.PEER_LOST)
        assert time.monotonic() - begun < 2.0

"""Decode reads what prefill has computed: over real data planes, with either side giving up, and with prefill gone."""

import threading

import numpy as np
import pytest
from pdpool_connector import Cause, DecodeConnector, Phase, PrefillConnector
from pdpool_connector.backends.base import Poll
from pdpool_connector.protocol import frames as f

from tests.integration.small_side import Side, until

READ = {"direction": "read"}


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


class Pair:
    def __init__(self, backend: str, prefill: dict | None = None, decode: dict | None = None) -> None:
        self.prefill = Side(PrefillConnector, pages=64, backend=backend, **READ, **(prefill or {}))
        self.decode = Side(DecodeConnector, pages=64, backend=backend, **READ, **(decode or {}))

    def open(self, room: int, pages: np.ndarray, **options):
        there = self.prefill.connector.bootstrap_address
        sent = self.prefill.connector.open(room, "r")
        return sent, self.decode.connector.open(there, room, "r", pages=pages, aux_slot=3, **options)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture(params=["local", "nixl", "mooncake"])
def pair(request):
    made = Pair(request.param)
    yield made
    made.close()


@pytest.fixture(params=["local", "nixl", "mooncake"])
def checked(request):
    """A pair in which every hand-off is sampled."""
    made = Pair(request.param, prefill={"checksum_rate": 1.0})
    noise = np.random.default_rng(1)
    made.prefill.cache[:] = noise.integers(0, 256, made.prefill.cache.shape, dtype=np.uint8)
    yield made
    made.close()


def outcomes(pair: Pair) -> dict[str, int]:
    return {name: count for name, count in pair.decode.connector.stats().checksums.items() if count}


def test_pages_come_as_they_are_computed_and_both_sides_end(pair):
    prefill, decode = pair.prefill, pair.decode
    prefill.aux[5] = 77
    sent, got = pair.open(1, ids(9, 8, 40))
    for first, count in ((0, 2), (2, 1)):
        prefill.cache[:, first : first + count] = first + 1
        sent.send(ids(*range(first, first + count)), start=first, last=first == 2, aux_slot=5 if first == 2 else None)
    until(lambda: got.status.ended and sent.status.releasable)
    assert (got.status.phase, sent.status.phase) == (Phase.DONE, Phase.DONE)
    assert got.status.releasable
    assert [int(decode.cache[0, page, 0]) for page in (9, 8, 40)] == [1, 1, 3]
    assert (decode.aux[3] == 77).all()
    moved = 3 * prefill.memory.page_bytes + prefill.memory.aux.item_bytes
    assert got.status.bytes_moved == sent.status.bytes_moved == moved
    until(lambda: decode.connector.stats().bytes_moved_total == moved)


def test_a_prefix_that_decode_holds_is_not_read(pair):
    pair.decode.cache[:, 20] = 9
    sent, got = pair.open(2, ids(21), prefix_pages=1)
    pair.prefill.cache[:, 0:2] = 4
    sent.send(ids(0, 1), start=0, last=True)
    until(lambda: got.status.ended)
    assert got.status.phase is Phase.DONE
    assert (pair.decode.cache[:, 20] == 9).all()
    assert (pair.decode.cache[:, 21] == 4).all()


def test_decode_gives_up_and_prefill_may_use_its_pages_again(pair):
    sent, got = pair.open(3, ids(1, 2))
    sent.send(ids(0), start=0)
    until(lambda: got.status.phase is Phase.TRANSFERRING)
    got.abort("the client left")
    until(lambda: got.status.releasable and sent.status.releasable)
    assert (got.status.cause, sent.status.cause) == (Cause.ABORTED, Cause.PEER_ABORTED)


def test_prefill_gives_up_and_its_pages_are_free_once_decode_says_that_it_reads_no_more(pair):
    sent, got = pair.open(4, ids(1, 2))
    sent.send(ids(0), start=0)
    until(lambda: got.status.phase is Phase.TRANSFERRING)
    sent.abort("out of memory")
    until(lambda: got.status.releasable and sent.status.releasable)
    assert (sent.status.cause, got.status.cause) == (Cause.ABORTED, Cause.PEER_ABORTED)
    again, taken = pair.open(4, ids(1))
    again.send(ids(7), start=0, last=True)
    until(lambda: taken.status.ended)
    assert taken.status.phase is Phase.DONE, "the room serves the next request"


def test_source_pages_stay_back_until_decode_has_said_that_it_reads_no_more():
    """The word that frees prefill's pages is lost for a while: they are not freed by anything else."""
    muted = {"on": True}

    def lose(frame: f.Frame) -> float | None:
        return None if muted["on"] and isinstance(frame, f.Done | f.Drained) else 0.0

    pair = Pair("local", decode={"frame_filter": lose})
    try:
        sent, got = pair.open(5, ids(1))
        sent.send(ids(0), start=0, last=True)
        until(lambda: got.status.ended)
        assert got.status.phase is Phase.DONE
        sent.abort("too late")
        until(lambda: sent.status.phase is Phase.FAILED)
        until(lambda: pair.decode.connector.stats().drops.get("filtered", 0) > 3)
        assert not sent.status.releasable
        muted["on"] = False
        until(lambda: sent.status.releasable)
    finally:
        pair.close()


def test_prefill_that_is_gone_fails_its_hand_offs_and_leaves_decodes_pages_free(pair):
    sent, got = pair.open(6, ids(1, 2))
    sent.send(ids(0), start=0)
    until(lambda: got.status.phase is Phase.TRANSFERRING)
    pair.prefill.close()
    until(lambda: got.status.releasable)
    assert got.status.phase is Phase.FAILED
    assert got.status.cause is Cause.PEER_LOST


def test_a_prefill_that_is_back_before_the_last_read_from_it_has_settled_is_read_from_again(pair, monkeypatch):
    sent, got = pair.open(5, ids(1, 2))
    sent.send(ids(0, 3), start=0, last=True)
    until(lambda: got.status.ended)
    engine = pair.decode.connector._backend
    poll, in_flight, settled = engine.poll, threading.Event(), threading.Event()

    def lasts(handle):
        in_flight.set()
        return poll(handle) if settled.wait(0.002) else Poll.PENDING

    monkeypatch.setattr(engine, "poll", lasts)
    (worker,) = pair.decode.connector._reads.workers()
    worker._at_once_pages = 0
    sent, _ = pair.open(6, ids(1, 2))
    sent.send(ids(0, 3), start=0, last=True)
    until(in_flight.is_set)
    (link,) = pair.decode.connector._links.values()
    (rank,) = link._seats
    pair.decode.connector._reactor.post(lambda: link._on_grace_over(rank, "its connection ended, it did not come back"))
    sent, got = pair.open(7, ids(3, 4))
    sent.send(ids(0, 3), start=0, last=True)
    until(lambda: pair.decode.connector._reads._sources[rank].again is not None)
    settled.set()
    until(lambda: got.status.ended)
    assert got.status.phase is Phase.DONE


def test_pages_that_are_read_in_pieces_and_land_as_they_were_match_their_checksum(checked):
    for room in range(3):
        sent, got = checked.open(room, ids(9, 8, 40), prefix_pages=1)
        sent.send(ids(room, 5, 6), start=0)
        sent.send(ids(7), start=3, last=True)
        until(lambda got=got, sent=sent: got.status.ended and sent.status.releasable)
        assert got.status.phase is Phase.DONE
    until(lambda: outcomes(checked) == {"matched": 3})


def test_one_byte_that_changes_after_it_has_landed_fails_the_hand_off_on_both_sides(checked, monkeypatch):
    engine, cache = checked.decode.connector._backend, checked.decode.cache
    poll = engine.poll

    def flip(handle):
        outcome = poll(handle)
        if outcome is Poll.DONE:
            cache[1, 40, 100] ^= 1
        return outcome

    monkeypatch.setattr(engine, "poll", flip)
    sent, got = checked.open(1, ids(9, 8, 40))
    sent.send(ids(3, 5, 6), start=0, last=True)
    until(lambda: got.status.releasable and sent.status.releasable)
    assert (got.status.phase, got.status.cause) == (Phase.FAILED, Cause.CORRUPT)
    assert "checksum" in got.status.message
    assert sent.status.phase is Phase.FAILED
    until(lambda: outcomes(checked) == {"mismatched": 1})
    monkeypatch.undo()
    sent, got = checked.open(2, ids(9, 8, 40))
    sent.send(ids(3, 5, 6), start=0, last=True)
    until(lambda: got.status.ended)
    assert got.status.phase is Phase.DONE
    until(lambda: outcomes(checked) == {"mismatched": 1, "matched": 1})


def test_an_abort_while_pages_are_hashed_before_they_are_announced_leaves_nothing_behind():
    pair = Pair("local", prefill={"checksum_rate": 1.0})
    try:
        for room in range(40):
            sent, got = pair.open(room, ids(9, 8, 40))
            sent.send(ids(3, 5, 6), start=0, last=True)
            (got if room % 2 else sent).abort("too late or not")
            until(lambda got=got, sent=sent: got.status.releasable and sent.status.releasable)
        for side in (pair.prefill, pair.decode):
            until(lambda side=side: side.connector.stats().held_bytes == 0 and not side.connector.stats().faults)
        assert outcomes(pair).get("mismatched", 0) == 0
        assert not pair.prefill.connector._announcements._sums
    finally:
        pair.close()


def test_a_prefill_that_is_known_by_two_addresses_is_read_from_by_both(pair, monkeypatch):
    engine, reached = pair.decode.connector._backend, threading.Event()
    connect = engine.connect

    def late(*whose):
        reached.wait(30)
        connect(*whose)

    monkeypatch.setattr(engine, "connect", late)
    port = pair.prefill.connector.bootstrap_address.rpartition(":")[2]
    got = []
    for room, host in enumerate(("127.0.0.1", "127.1"), start=1):
        pair.prefill.connector.open(room, "r").send(ids(0), start=0, last=True)
        got.append(pair.decode.connector.open(f"{host}:{port}", room, "r", pages=ids(room), aux_slot=0, deadline_s=20))
    until(lambda: sum(link.stage.value == "linked" for link in pair.decode.connector._links.values()) == 2)
    reached.set()
    until(lambda: all(one.status.ended for one in got))
    assert [one.status.message for one in got] == ["", ""]


def test_sides_of_different_directions_do_not_pair_and_say_so():
    prefill, decode = Side(PrefillConnector), Side(DecodeConnector, **READ)
    try:
        got = decode.connector.open(prefill.connector.bootstrap_address, 1, "r", pages=ids(1), aux_slot=0)
        until(lambda: got.status.ended)
        assert got.status.cause is Cause.INVALID
        assert "direction is write at prefill and read at decode" in got.status.message
    finally:
        decode.close()
        prefill.close()

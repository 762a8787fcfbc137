"""What goes with a hand-off beside its pages: state that is moved, and what is released once nothing is touched."""

import logging
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from pdpool_connector import Cause, ConnectorConfig, DecodeConnector, HostArena, KVMemory, Phase, PrefillConnector
from pdpool_connector.protocol.status import TransferStatus
from pdpool_connector.runtime.transfer import Transfer

PAGES = np.array([1, 2], np.int32)
STATE = 5120  # offset of the state pool in an arena


class Counter:
    """Stands for a reservation: how often it was released, and by which thread."""

    def __init__(self, error: Exception | None = None) -> None:
        self.threads: list[threading.Thread] = []
        self.error = error

    def __call__(self) -> None:
        self.threads.append(threading.current_thread())
        if self.error is not None:
            raise self.error

    @property
    def count(self) -> int:
        return len(self.threads)


@pytest.fixture
def arenas() -> Iterator[list[HostArena]]:
    with HostArena(8192) as one, HostArena(8192) as two:
        yield [one, two]


def memory(arena: HostArena) -> KVMemory:
    return KVMemory(
        kv=(arena.region(0, 256, 8), arena.region(2048, 256, 8)),
        aux=arena.region(4096, 64, 4),
        state=(arena.region(STATE, 32, 4),),
        page_tokens=16,
        layers=1,
        kv_heads=1,
        head_dim=4,
        dtype="float32",
        model="m",
    )


@pytest.fixture
def prefill(arenas: list[HostArena]) -> Iterator[PrefillConnector]:
    connector = PrefillConnector(ConnectorConfig("127.0.0.1", backend="local"), memory(arenas[0]), lambda: None)
    connector.start()
    yield connector
    connector.close()


@pytest.fixture
def decode(arenas: list[HostArena]) -> Iterator[DecodeConnector]:
    connector = DecodeConnector(ConnectorConfig("127.0.0.1", backend="local"), memory(arenas[1]), lambda: None)
    connector.start()
    yield connector
    connector.close()


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def begin(prefill: PrefillConnector, decode: DecodeConnector, **params) -> tuple[Transfer, Transfer]:
    receiving = decode.open(prefill.bootstrap_address, 7, "r", pages=PAGES, aux_slot=3, **params)
    return prefill.open(7, "r"), receiving


def test_success_releases_on_both_sides(prefill, decode) -> None:
    sending, receiving = begin(prefill, decode)
    reservations = Counter(), Counter(), Counter()
    for transfer, reservation in zip((sending, sending, receiving), reservations, strict=True):
        transfer.attach(reservation)
    until(lambda: sending.status.phase is Phase.READY)
    assert [reservation.count for reservation in reservations] == [0, 0, 0]
    sending.send(PAGES, start=0, last=True, aux_slot=0)
    until(lambda: all(reservation.count for reservation in reservations))
    assert [transfer.status.phase for transfer in (sending, receiving)] == [Phase.DONE, Phase.DONE]
    assert [reservation.count for reservation in reservations] == [1, 1, 1]


def test_abort_releases_on_both_sides(prefill, decode) -> None:
    sending, receiving = begin(prefill, decode)
    reservations = Counter(), Counter()
    sending.attach(reservations[0])
    receiving.attach(reservations[1])
    until(lambda: sending.status.phase is Phase.READY)
    receiving.abort()
    receiving.abort()
    until(lambda: all(reservation.count for reservation in reservations))
    assert (sending.status.cause, receiving.status.cause) == (Cause.PEER_ABORTED, Cause.ABORTED)
    assert [reservation.count for reservation in reservations] == [1, 1]


def test_failure_by_deadline_releases(prefill) -> None:
    transfer, reservation = prefill.open(1, "r", deadline_s=0.05), Counter()
    transfer.attach(reservation)
    until(lambda: reservation.count)
    assert (transfer.status.cause, reservation.count) == (Cause.TIMED_OUT, 1)


def test_shutdown_releases(prefill) -> None:
    transfer, reservation = prefill.open(1, "r"), Counter()
    transfer.attach(reservation)
    prefill.close()
    prefill.close()
    assert (transfer.status.cause, reservation.count) == (Cause.SHUTDOWN, 1)


def test_what_is_attached_after_the_end_is_released_at_once_by_the_caller(prefill) -> None:
    transfer, reservation = prefill.open(1, "r"), Counter()
    transfer.abort()
    until(lambda: transfer.status.releasable)
    transfer.attach(reservation)
    assert reservation.threads == [threading.current_thread()]


def test_one_that_raises_is_logged_and_keeps_no_other_from_its_turn(caplog) -> None:
    transfer = Transfer(1, 7, "r", lambda _: None)
    reservations = Counter(), Counter(RuntimeError("no such slot")), Counter()
    for reservation in reservations:
        transfer.attach(reservation)
    with caplog.at_level(logging.ERROR):
        transfer.settle(TransferStatus(Phase.FAILED, Cause.ABORTED, releasable=True))
    assert [reservation.count for reservation in reservations] == [1, 1, 1]
    assert "no such slot" in caplog.text
    assert "room=7" in caplog.text


def test_pages_that_are_held_keep_what_is_attached() -> None:
    transfer, reservation = Transfer(1, 7, "r", lambda _: None), Counter()
    transfer.attach(reservation)
    for status in (
        TransferStatus(Phase.TRANSFERRING),
        TransferStatus(Phase.FAILED, Cause.PEER_LOST),
        TransferStatus(Phase.FAILED, Cause.PEER_LOST, "held"),
    ):
        transfer.settle(status)
        assert reservation.count == 0
    for _ in range(2):
        transfer.settle(TransferStatus(Phase.FAILED, Cause.PEER_LOST, releasable=True))
    assert reservation.count == 1


def test_none_is_lost_or_released_twice_when_the_end_comes_while_attaching() -> None:
    for _ in range(50):
        transfer = Transfer(1, 7, "r", lambda _: None)
        reservations = [Counter() for _ in range(40)]
        ready = threading.Barrier(3)

        def attach(some: list[Counter], ready=ready, transfer=transfer) -> None:
            ready.wait(10)
            for reservation in some:
                transfer.attach(reservation)

        threads = [threading.Thread(target=attach, args=(half,)) for half in (reservations[:20], reservations[20:])]
        for thread in threads:
            thread.start()
        ready.wait(10)
        transfer.settle(TransferStatus(Phase.DONE, releasable=True))
        for thread in threads:
            thread.join(10)
        assert [reservation.count for reservation in reservations] == [1] * 40


def test_state_arrives_with_the_last_pages(prefill, decode, arenas) -> None:
    source, target = (arena.array(STATE, (4, 32), np.uint8) for arena in arenas)
    sending, receiving = begin(prefill, decode, state=np.array([2], np.int32))
    source[1] = 9
    sending.send(PAGES[:1], start=0)
    sending.send(PAGES[1:], start=1, last=True, aux_slot=0, state=np.array([1], np.int32))
    until(lambda: receiving.status.ended)
    assert receiving.status.phase is Phase.DONE
    assert target.max(axis=1).tolist() == [0, 0, 9, 0]
    assert target.min(axis=1).tolist() == [0, 0, 9, 0]

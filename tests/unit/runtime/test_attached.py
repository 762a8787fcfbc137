"""What is attached to a hand-off is released once its pages are."""

import logging
import threading

import numpy as np
from pdpool_connector import Cause, DecodeConnector, Phase, PrefillConnector
from pdpool_connector.protocol.status import TransferStatus
from pdpool_connector.runtime.transfer import Transfer

from tests.waiting import until

PAGES = np.array([1, 2], np.int32)


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


def begin(prefill: PrefillConnector, decode: DecodeConnector) -> tuple[Transfer, Transfer]:
    receiving = decode.open(prefill.bootstrap_address, 7, "r")
    receiving.offer(PAGES, aux_slot=3)
    return prefill.open(7, "r"), receiving


def test_success_releases_on_both_sides(prefill, decode) -> None:
    sending, receiving = begin(prefill, decode)
    reservations = Counter(), Counter(), Counter()
    for transfer, reservation in zip((sending, sending, receiving), reservations, strict=True):
        transfer._attach(reservation)
    until(lambda: sending.status.phase is Phase.READY)
    assert [reservation.count for reservation in reservations] == [0, 0, 0]
    sending.send(PAGES, start=0, last=True, aux_slot=0)
    until(lambda: all(reservation.count for reservation in reservations))
    assert [transfer.status.phase for transfer in (sending, receiving)] == [Phase.DONE, Phase.DONE]
    assert [reservation.count for reservation in reservations] == [1, 1, 1]


def test_abort_releases_on_both_sides(prefill, decode) -> None:
    sending, receiving = begin(prefill, decode)
    reservations = Counter(), Counter()
    sending._attach(reservations[0])
    receiving._attach(reservations[1])
    until(lambda: sending.status.phase is Phase.READY)
    receiving.abort()
    receiving.abort()
    until(lambda: all(reservation.count for reservation in reservations))
    assert (sending.status.cause, receiving.status.cause) == (Cause.PEER_ABORTED, Cause.ABORTED)
    assert [reservation.count for reservation in reservations] == [1, 1]


def test_deadline_releases(prefill) -> None:
    transfer, reservation = prefill.open(1, "r", deadline_s=0.05), Counter()
    transfer._attach(reservation)
    until(lambda: reservation.count)
    assert (transfer.status.cause, reservation.count) == (Cause.TIMED_OUT, 1)


def test_shutdown_releases(prefill) -> None:
    transfer, reservation = prefill.open(1, "r"), Counter()
    transfer._attach(reservation)
    prefill.close()
    prefill.close()
    assert (transfer.status.cause, reservation.count) == (Cause.SHUTDOWN, 1)


def test_attached_after_the_end_is_released_at_once(prefill) -> None:
    transfer, reservation = prefill.open(1, "r"), Counter()
    transfer.abort()
    until(lambda: transfer.status.releasable)
    transfer._attach(reservation)
    assert reservation.threads == [threading.current_thread()]


def test_release_that_raises_is_logged(caplog) -> None:
    transfer = Transfer(1, 7, "r", "", lambda _: None)
    reservations = Counter(), Counter(RuntimeError("no such slot")), Counter()
    for reservation in reservations:
        transfer._attach(reservation)
    with caplog.at_level(logging.ERROR):
        transfer._settle(TransferStatus(Phase.FAILED, Cause.ABORTED, releasable=True))
    assert [reservation.count for reservation in reservations] == [1, 1, 1]
    assert "no such slot" in caplog.text
    assert "room=7" in caplog.text


def test_held_pages_keep_what_is_attached() -> None:
    transfer, reservation = Transfer(1, 7, "r", "", lambda _: None), Counter()
    transfer._attach(reservation)
    for status in (
        TransferStatus(Phase.TRANSFERRING),
        TransferStatus(Phase.FAILED, Cause.PEER_LOST),
        TransferStatus(Phase.FAILED, Cause.PEER_LOST, "held"),
    ):
        transfer._settle(status)
        assert reservation.count == 0
    for _ in range(2):
        transfer._settle(TransferStatus(Phase.FAILED, Cause.PEER_LOST, releasable=True))
    assert reservation.count == 1


def test_end_while_attaching_releases_each_once() -> None:
    for _ in range(50):
        transfer = Transfer(1, 7, "r", "", lambda _: None)
        reservations = [Counter() for _ in range(40)]
        ready = threading.Barrier(3)

        def attach(some: list[Counter], ready=ready, transfer=transfer) -> None:
            ready.wait(10)
            for reservation in some:
                transfer._attach(reservation)

        threads = [threading.Thread(target=attach, args=(half,)) for half in (reservations[:20], reservations[20:])]
        for thread in threads:
            thread.start()
        ready.wait(10)
        transfer._settle(TransferStatus(Phase.DONE, releasable=True))
        for thread in threads:
            thread.join(10)
        assert [reservation.count for reservation in reservations] == [1] * 40

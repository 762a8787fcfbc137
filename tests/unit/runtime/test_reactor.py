"""The owner thread: nothing that it calls can end it, and it stops when told."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
from pdpool_connector.runtime.reactor import Reactor


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor("test", lambda: None, lambda: None)
    reactor.start()
    yield reactor
    assert reactor.stop(5)


def call(reactor: Reactor) -> bool:
    done = threading.Event()
    reactor.post(done.set)
    return done.wait(5)


def test_a_call_that_raises_is_counted_and_ends_nothing(reactor: Reactor, caplog) -> None:
    reactor.post(lambda: 1 / 0)
    assert call(reactor)
    assert reactor.faults == 1
    assert "ZeroDivisionError" in caplog.text


def test_timers_fire_in_order_once_and_can_be_moved_and_cancelled(reactor: Reactor) -> None:
    fired: list[str] = []
    over = threading.Event()

    def arm() -> None:
        now = time.monotonic()
        reactor.at("late", now + 0.06, lambda: fired.append("late"))
        reactor.at("early", now + 0.03, lambda: fired.append("early"))
        reactor.at("moved", now + 0.01, lambda: fired.append("never"))
        reactor.at("moved", now + 0.09, lambda: fired.append("moved"))
        reactor.at("gone", now + 0.01, lambda: fired.append("gone"))
        reactor.cancel("gone")
        reactor.at("over", now + 0.12, over.set)

    reactor.post(arm)
    assert over.wait(5)
    assert fired == ["early", "late", "moved"]


def test_a_readable_descriptor_is_served_until_it_is_not_watched(reactor: Reactor) -> None:
    pipe = os.eventfd(1, os.EFD_NONBLOCK)
    served = threading.Event()

    def serve() -> None:
        os.eventfd_read(pipe)
        reactor.unwatch(pipe)
        served.set()

    reactor.post(lambda: reactor.watch(pipe, serve))
    assert served.wait(5)
    os.eventfd_write(pipe, 1)
    assert call(reactor)
    assert os.eventfd_read(pipe) == 1
    os.close(pipe)


def test_a_flood_of_posts_does_not_starve_timers(reactor: Reactor) -> None:
    fired = threading.Event()
    flooding = True

    def flood() -> None:
        if flooding:
            reactor.post(flood)

    reactor.post(flood)
    reactor.post(lambda: reactor.at("t", time.monotonic(), fired.set))
    assert fired.wait(5)
    flooding = False


def test_lag_shows_a_turn_that_takes_long(reactor: Reactor) -> None:
    reactor.post(lambda: time.sleep(0.05))
    assert call(reactor)
    assert call(reactor)
    assert 0.04 < reactor.lag() < 1.0


def test_idle_costs_next_to_nothing(reactor: Reactor) -> None:
    begun, cpu = time.monotonic(), time.process_time()
    time.sleep(1.0)
    assert (time.process_time() - cpu) / (time.monotonic() - begun) < 0.02

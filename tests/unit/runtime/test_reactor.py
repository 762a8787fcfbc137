"""The owner of all state: nothing that it calls can end it, there is one turn at a time, and it stops on request."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import zmq
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.reactor import Reactor


@pytest.fixture
def reactor(request) -> Iterator[Reactor]:
    idle = dict.fromkeys(("after_turn", "at_rest", "at_end", "torn"), lambda: None)
    reactor = Reactor("test", **idle, timeouts=getattr(request, "param", None))
    reactor.start()
    yield reactor
    assert reactor.stop(30)


def call(reactor: Reactor) -> bool:
    done = threading.Event()
    reactor.post(done.set)
    return done.wait(30)


def test_call_that_raises_is_counted(reactor: Reactor, caplog) -> None:
    reactor.post(lambda: 1 / 0)
    assert call(reactor)
    assert reactor.faults == 1
    assert "ZeroDivisionError" in caplog.text


def test_timers_fire_once_in_order(reactor: Reactor) -> None:
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
    assert over.wait(30)
    assert fired == ["early", "late", "moved"]


def test_watched_descriptor_is_served(reactor: Reactor) -> None:
    pipe = os.eventfd(1, os.EFD_NONBLOCK)
    served = threading.Event()

    def serve() -> None:
        os.eventfd_read(pipe)
        reactor.unwatch(pipe)
        served.set()

    reactor.post(lambda: reactor.watch(pipe, serve))
    assert served.wait(30)
    os.eventfd_write(pipe, 1)
    assert call(reactor)
    assert os.eventfd_read(pipe) == 1
    os.close(pipe)


def test_descriptor_closed_in_turn_is_not_served(reactor: Reactor) -> None:
    pipes = [os.eventfd(1, os.EFD_NONBLOCK) for _ in range(2)]
    served: list[int] = []

    def serve(mine: int, other: int) -> None:
        served.append(mine)
        for pipe in (mine, other):
            reactor.unwatch(pipe)
            os.close(pipe)

    def watch_both() -> None:
        for mine, other in (pipes, pipes[::-1]):
            reactor.watch(mine, partial(serve, mine, other))

    reactor.post(watch_both)
    deadline = time.monotonic() + 30
    while not served and time.monotonic() < deadline:
        assert call(reactor)
    assert len(served) == 1
    assert call(reactor)
    assert reactor.faults == 0


def test_a_flood_of_posts_does_not_starve_timers(reactor: Reactor) -> None:
    fired = threading.Event()
    flooding = True

    def flood() -> None:
        if flooding:
            reactor.post(flood)

    reactor.post(flood)
    reactor.post(lambda: reactor.at("t", time.monotonic(), fired.set))
    assert fired.wait(30)
    flooding = False


@pytest.mark.parametrize("reactor", [Timeouts(loop_lag_window_s=60.0)], indirect=True)
def test_lag_shows_a_long_turn(reactor: Reactor) -> None:
    reactor.post(lambda: time.sleep(0.05))
    assert call(reactor)
    assert call(reactor)
    assert reactor.lag() > 0.04


def test_idle_costs_no_time(reactor: Reactor) -> None:
    assert call(reactor)
    assert reactor._thread.ident is not None
    clock = time.pthread_getcpuclockid(reactor._thread.ident)  # this process may have other threads
    begun, cpu = time.monotonic(), time.clock_gettime(clock)
    time.sleep(1.0)
    assert time.clock_gettime(clock) - cpu < 0.02 * (time.monotonic() - begun)


def test_step_runs_in_the_calling_thread(reactor: Reactor) -> None:
    threads: set[str] = set()
    deadline = time.monotonic() + 30
    while threading.current_thread().name not in threads:
        assert time.monotonic() < deadline
        reactor.step(lambda: threads.add(threading.current_thread().name))
        time.sleep(0.001)


def test_calls_posted_by_a_step_run_in_it(reactor: Reactor) -> None:
    done: list[int] = []

    def first() -> None:
        reactor.step(lambda: done.append(2))
        reactor.post(lambda: done.append(3))
        done.append(1)

    assert call(reactor)
    reactor.step(first)
    assert call(reactor)
    assert done == [1, 2, 3]


def test_turns_never_overlap_or_get_lost(reactor: Reactor) -> None:
    busy = threading.Lock()
    counts = [0, 0]

    def count() -> None:
        counts[1] += not busy.acquire(blocking=False)
        counts[0] += 1
        busy.release()

    def many() -> None:
        for _ in range(3000):
            reactor.step(count)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert call(reactor)
    assert counts == [12000, 0]


@pytest.mark.parametrize("reactor", [Timeouts(loop_idle_s=600.0)], indirect=True)
def test_timer_of_a_step_wakes_the_loop(reactor: Reactor) -> None:
    fired = threading.Event()
    assert call(reactor)
    reactor.step(lambda: reactor.at("soon", time.monotonic() + 0.02, fired.set))
    assert fired.wait(30)


def test_message_announced_during_a_send_is_read(reactor: Reactor) -> None:
    """Sending clears what zmq signals by a socket's descriptor, and the loop sleeps on that."""
    context: zmq.Context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://pair")
    theirs.connect("inproc://pair")
    heard = threading.Semaphore(0)

    def read() -> None:
        ours.recv(zmq.NOBLOCK)
        heard.release()

    def send() -> None:
        ours.send(b"out")
        reactor.recheck(ours)

    reactor.step(lambda: reactor.watch(ours, read))
    for _ in range(300):
        theirs.send(b"in")
        reactor.step(send)
        assert heard.acquire(timeout=30)
        theirs.recv()
    reactor.step(lambda: reactor.unwatch(ours))
    assert call(reactor)
    context.destroy(linger=0)


def test_interrupted_turn_is_reported_first() -> None:
    seen: list[str] = []
    idle = dict.fromkeys(("after_turn", "at_rest", "at_end"), lambda: None)
    reactor = Reactor("test", torn=lambda: seen.append("torn"), **idle)
    reactor.start()
    ours = threading.current_thread()

    def interrupt() -> None:
        if threading.current_thread() is ours:  # threads of the program are interrupted, the loop's own is not
            seen.append("begun")
            reactor.post(lambda: seen.append("next"))
            raise KeyboardInterrupt

    deadline = time.monotonic() + 30
    while not seen:
        assert time.monotonic() < deadline
        with contextlib.suppress(KeyboardInterrupt):
            reactor.step(interrupt)
    assert call(reactor)
    assert seen == ["begun", "torn", "next"]
    assert reactor.stop(30)

"""Prefills that do not answer: how long requests wait for them, and when they are tried again. Time is the test's."""

import pytest
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime import silent_prefills
from pdpool_connector.runtime.silent_prefills import SilentPrefills

from tests.unit.runtime.timers import Timers

AGAIN_S, RETRY_S, SILENT_S = 0.5, 10.0, 600.0
TIMEOUTS = Timeouts(connect_again_s=AGAIN_S, silent_retry_s=RETRY_S, silent_s=SILENT_S)


class World(Timers):
    """Clock and connector in one."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[tuple[str, Cause, str]] = []
        self.tried: list[str] = []
        self.silent = SilentPrefills(
            self, TIMEOUTS, lambda it: self.failed.append((it.prefill, it.cause, it.message)), self.tried.append
        )

    def fail(self, prefill: str = "p:1", *, in_vain: bool = True) -> None:
        self.silent.on_failed(prefill, "no answer", in_vain=in_vain)

    @property
    def known(self) -> list[str]:
        return list(self.silent.stats(self.time))


@pytest.fixture
def world() -> World:
    return World()


def test_first_try_has_its_whole_time(world) -> None:
    world.silent.limit("p:1")
    world.wait(1000)
    assert (world.failed, world.tried) == ([], [])


def test_try_that_was_cut_short_proves_no_silence(world) -> None:
    world.fail(in_vain=False)
    assert world.known == []


def test_later_requests_end_soon(world) -> None:
    world.fail()
    world.wait(7)
    world.silent.limit("p:1")
    world.wait(AGAIN_S / 2)
    world.silent.limit("p:1")
    assert world.failed == []
    world.wait(AGAIN_S / 2)
    assert world.failed == [("p:1", Cause.PEER_LOST, "prefill p:1 was given up 8 s ago and is still silent: no answer")]
    world.silent.limit("p:1")
    world.wait(AGAIN_S)
    assert len(world.failed) == 2


def test_other_prefills_have_their_whole_time(world) -> None:
    world.fail()
    world.silent.limit("p:2")
    world.wait(1000)
    assert world.failed == []


def test_it_is_tried_again_without_requests(world) -> None:
    world.fail()
    world.wait(RETRY_S)
    assert world.tried == ["p:1"]
    world.fail(in_vain=False)
    world.wait(RETRY_S)
    assert world.tried == ["p:1", "p:1"]


def test_prefill_that_answers_is_no_longer_silent(world) -> None:
    world.fail()
    world.silent.limit("p:1")
    world.silent.remove("p:1")
    world.silent.limit("p:1")
    world.wait(1000)
    assert (world.failed, world.tried, world.known) == ([], [], [])


def test_prefill_that_no_request_names_is_forgotten(world) -> None:
    world.fail()
    world.wait(SILENT_S + RETRY_S)
    assert world.known == []
    assert len(world.tried) == SILENT_S // RETRY_S - 1
    assert world.timers == {}


def test_request_keeps_it_in_memory(world) -> None:
    world.fail()
    world.wait(SILENT_S - 1)
    world.silent.limit("p:1")
    world.wait(SILENT_S - 1)
    assert world.known == ["p:1"]


def test_statistics_say_since_when(world) -> None:
    world.fail()
    world.wait(3)
    (link,) = world.silent.stats(world.time).values()
    assert (link.address, link.state, link.failure, link.failing_s) == ("p:1", "silent", "no answer", 3.0)


def test_addresses_that_are_remembered_have_a_bound(world, monkeypatch) -> None:
    monkeypatch.setattr(silent_prefills, "MAX_PREFILLS", 2)
    for prefill in ("p:1", "p:2", "p:3"):
        world.fail(prefill)
    assert world.known == ["p:1", "p:2"]

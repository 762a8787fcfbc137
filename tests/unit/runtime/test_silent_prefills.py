"""How long requests wait for a prefill that did not answer a short while ago. Time is the test's."""

import pytest
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime import silent_prefills
from pdpool_connector.runtime.silent_prefills import SilentPrefills

from tests.unit.runtime.timers import Timers

AGAIN_S, SILENT_S = 0.5, 60.0


@pytest.fixture
def time() -> Timers:
    return Timers()


@pytest.fixture
def failed() -> list:
    return []


@pytest.fixture
def silent(time, failed) -> SilentPrefills:
    return SilentPrefills(time, Timeouts(connect_again_s=AGAIN_S, silent_s=SILENT_S), failed.append)


def test_first_try_has_its_whole_time(time, silent, failed) -> None:
    silent.limit("p:1")
    time.wait(1000)
    assert not failed


def test_later_requests_end_soon(time, silent, failed) -> None:
    silent.add("p:1", "no answer")
    time.wait(10)
    silent.limit("p:1")
    time.wait(AGAIN_S / 2)
    silent.limit("p:1")
    assert not failed
    time.wait(AGAIN_S / 2)
    ((prefill, cause, message),) = [(one.prefill, one.cause, one.message) for one in failed]
    assert (prefill, cause) == ("p:1", Cause.PEER_LOST)
    assert message == "prefill p:1 was given up 10 s ago and is still silent: no answer"
    silent.limit("p:1")
    time.wait(AGAIN_S)
    assert len(failed) == 2


def test_other_prefills_have_their_whole_time(time, silent, failed) -> None:
    silent.add("p:1", "no answer")
    silent.limit("p:2")
    time.wait(1000)
    assert not failed


def test_linked_prefill_is_not_given_up(time, silent, failed) -> None:
    silent.add("p:1", "no answer")
    silent.limit("p:1")
    silent.remove("p:1")
    silent.limit("p:1")
    time.wait(1000)
    assert not failed


def test_memory_ends(time, silent, failed) -> None:
    silent.add("p:1", "no answer")
    time.wait(SILENT_S)
    silent.limit("p:1")
    time.wait(1000)
    assert not failed


def test_request_at_the_last_moment_ends_soon(time, silent, failed) -> None:
    silent.add("p:1", "no answer")
    time.wait(SILENT_S - AGAIN_S / 2)
    silent.limit("p:1")
    time.wait(AGAIN_S / 2)
    silent.add("p:2", "no answer")
    time.wait(AGAIN_S / 2)
    assert [one.prefill for one in failed] == ["p:1"]


def test_addresses_that_are_remembered_have_a_bound(time, silent, monkeypatch) -> None:
    monkeypatch.setattr(silent_prefills, "MAX_PREFILLS", 2)
    for prefill in ("p:1", "p:2", "p:3"):
        silent.add(prefill, "no answer")
    assert [prefill in silent for prefill in ("p:1", "p:2", "p:3")] == [True, True, False]
    time.wait(SILENT_S)
    silent.add("p:3", "no answer")
    assert "p:3" in silent

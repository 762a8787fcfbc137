"""A purge ends hand-offs at both sides, on live connectors; pages stay held until no peer touches them."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

import pytest
from pdpool_connector import Cause, DecodeConnector, Phase, PrefillConnector
from pdpool_connector.backends.base import Poll
from pdpool_connector.backends.local import LocalBackend
from pdpool_connector.transport.tokens import TokenVerifier

from tests.integration.small_side import Side, offer
from tests.integration.test_connector_secured import PUBLIC, post, token
from tests.waiting import until

IDS = itertools.count(1)
ALL = {"older_than_s": 0, "reason": "leaked"}


@pytest.fixture
def pair() -> Iterator[dict[str, Side]]:
    with contextlib.ExitStack() as stack:
        made = {
            "prefill": Side(PrefillConnector, admin_gate=TokenVerifier(PUBLIC, "pod")),
            "decode": Side(DecodeConnector, admin_gate=TokenVerifier(PUBLIC, "pod")),
        }
        for side in made.values():
            stack.callback(side.close)
        yield made


class Slow(LocalBackend):
    """Its writes stay under way until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go_on = threading.Event(), threading.Event()

    def submit_at_once(self, *_: object) -> None:
        """Every write is left to the worker's thread."""

    def poll(self, handle):
        self.asked.set()
        return super().poll(handle) if self.go_on.is_set() else Poll.PENDING


def begin(pair: dict[str, Side], page: int):
    """Both halves of a hand-off that waits for prefill's last pages."""
    room = next(IDS)
    sent = pair["prefill"].connector.open(room, "r")
    got = offer(pair["decode"], pair["prefill"], room, [page])
    until(lambda: sent.status.phase is Phase.READY)
    return sent, got


@pytest.mark.parametrize("purged", ["prefill", "decode"])
def test_purge_ends_both_halves_and_releases_pages(pair, purged):
    halves = [*begin(pair, 3), *begin(pair, 4)]
    status, answer = post(pair[purged], "purge", ALL, token("purge"))
    assert (status, answer) == (200, {"purged": 2})
    for half in halves:
        half.wait_released(30)
        assert (half.status.phase, half.status.cause) == (Phase.FAILED, Cause.PURGED)
        assert half.status.message.endswith("purged by operator: leaked")
    sent, got = begin(pair, 3)
    sent.send([3], start=0, last=True, aux_slot=1)
    assert got.wait(30).phase is Phase.DONE, "pages and connection serve the next hand-off"


def test_younger_hand_offs_go_on(pair):
    sent, got = begin(pair, 3)
    assert post(pair["prefill"], "purge", {**ALL, "older_than_s": 3600}, token("purge")) == (200, {"purged": 0})
    old, _ = begin(pair, 4)
    old.opened_at -= 3600
    assert post(pair["prefill"], "purge", {**ALL, "older_than_s": 3600}, token("purge")) == (200, {"purged": 1})
    assert old.wait(30).cause is Cause.PURGED
    sent.send([3], start=0, last=True, aux_slot=1)
    assert got.wait(30).phase is Phase.DONE
    assert sent.wait(30).phase is Phase.DONE


def test_pages_stay_held_while_a_write_is_under_way():
    backend = Slow()
    gate = TokenVerifier(PUBLIC, "pod")
    with (
        contextlib.closing(Side(PrefillConnector, backend=backend, admin_gate=gate)) as prefill,
        contextlib.closing(Side(DecodeConnector)) as decode,
    ):
        sent, got = begin({"prefill": prefill, "decode": decode}, 3)
        sent.send([3], start=0, last=True, aux_slot=1)
        assert backend.asked.wait(30)
        assert post(prefill, "purge", ALL, token("purge")) == (200, {"purged": 1})
        assert sent.wait(30).cause is Cause.PURGED
        assert not sent.status.releasable
        assert not got.status.releasable
        backend.go_on.set()
        for half in (sent, got):
            assert half.wait_released(30).cause is Cause.PURGED


def test_second_purge_finds_nothing(pair):
    sent, _ = begin(pair, 3)
    post(pair["prefill"], "purge", ALL, token("purge"))
    sent.wait_released(30)
    assert post(pair["prefill"], "purge", ALL, token("purge")) == (200, {"purged": 0})


@pytest.mark.parametrize(
    ("body", "operation", "status"),
    [
        (ALL, "fence", 401),
        ({**ALL, "older_than_s": -1}, "purge", 400),
        ({**ALL, "older_than_s": 1e9}, "purge", 400),
        ({**ALL, "reason": ""}, "purge", 400),
        ({**ALL, "reason": "x" * 257}, "purge", 400),
        ({**ALL, "room": 7}, "purge", 400),
        ({"reason": "no age"}, "purge", 400),
    ],
)
def test_bad_purge_request_changes_nothing(pair, body, operation, status):
    sent, got = begin(pair, 3)
    assert post(pair["prefill"], "purge", body, token(operation))[0] == status
    sent.send([3], start=0, last=True, aux_slot=1)
    assert got.wait(30).phase is Phase.DONE


def test_purge_without_operator_key_is_refused():
    with contextlib.closing(Side(PrefillConnector)) as side:
        assert post(side, "purge", ALL, token("purge"))[0] == 403


def test_negative_age_is_refused(pair):
    with pytest.raises(ValueError, match="older_than_s=-1 must be 0 or more"):
        pair["prefill"].connector.purge(-1, "r")

"""Transfer backends whose calls really fail or time out: what each side learns, and what it holds."""

import re
import signal
import time
from collections.abc import Iterable

import numpy as np
import pytest

from tests.integration.connector_peer import Side
from tests.integration.handoffs import (
    HALF_REGISTERED,
    end_data_connections,
    fail_a_write,
    fill,
    offer,
    open_both,
    settle_empty,
)
from tests.integration.instances import shape
from tests.integration.real_failures import REASONS

LEARNS_S = 2.0
STAGING_BYTES = 64 << 20
MOONCAKE_GIVES_UP_S = 3
PAGES = list(range(8, 40))


@pytest.fixture(params=["nixl", "mooncake"])
def backend(request, monkeypatch) -> str:
    monkeypatch.setenv("UCX_TLS", "tcp")  # over CMA, NIXL does without the connections that are ended
    return request.param


def check_root_cause(said: str, failed_at: float, *sides: Side) -> None:
    """Each side learns in time what the backend said, and keeps what may still be touched."""
    for side in sides:
        status = side.until("r", "ended")
        assert status["at"] - failed_at < LEARNS_S
        for asked in (status, side.status("r")):
            assert (asked["cause"], asked["message"]) == ("transfer_failed", said)
            assert not asked["releasable"], "the backend had not said that its writes are over"
        side.settle(lambda stats: stats["causes"].get("transfer_failed") == 1)


def fence_and_check_empty(prefill: Side, *decodes: Side, names: Iterable[str] = ("r",)) -> None:
    """Fence each side from the other: then nothing is left of the hand-offs."""
    for decode in decodes:
        decode.call("fence", incarnation=prefill.incarnation)
        prefill.call("fence", incarnation=decode.incarnation)
    for side in (prefill, *decodes):
        for name in names:
            side.until(name, "releasable")
        settle_empty(side)


def test_failed_write_fails_only_its_own_hand_off(sides, backend) -> None:
    prefill, fragile = sides("prefill", backend), sides("decode", backend, **HALF_REGISTERED)
    other = sides("decode", backend)
    fill(prefill, 1)
    open_both(prefill, other, 8, name="beside")
    prefill.until("beside", "ready")
    said = fail_a_write(prefill, fragile, room=7)
    check_root_cause(said, time.monotonic(), prefill, fragile)
    prefill.send("beside", [1, 2])
    other.until("beside", "done")
    assert (other.pages[:, [8, 3]] == prefill.pages[:, [1, 2]]).all()
    fence_and_check_empty(prefill, fragile)
    settle_empty(other)


def test_peer_serves_other_rooms_after_failed_write(sides, backend) -> None:
    prefill, fragile = sides("prefill", backend), sides("decode", backend, **HALF_REGISTERED)
    fill(prefill, 1)
    open_both(prefill, fragile, 8, name="before", pages=[4])
    prefill.until("before", "ready")
    fail_a_write(prefill, fragile, room=7)
    prefill.send("before", [1])
    open_both(prefill, fragile, 9, name="after", pages=[5])
    prefill.send("after", [2])
    for name in ("before", "after"):
        status = fragile.until(name, "ended")
        assert status["phase"] == "done", status
    assert (fragile.pages[:, [4, 5]] == prefill.pages[:, [1, 2]]).all()
    fence_and_check_empty(prefill, fragile)


# Not Mooncake in strips: it waits a second after each that was refused, and they are many.
@pytest.mark.parametrize(
    ("backend", "staging"), [("nixl", True), ("nixl", False), ("mooncake", True)], indirect=["backend"]
)
def test_failed_write_between_unlike_ranks_reaches_all(instances, backend, staging: bool) -> None:
    (prefill,) = instances("prefill", backend, shape([2]), staging_bytes=STAGING_BYTES * staging).ranks
    decode = instances("decode", backend, shape([2], tp=2), **HALF_REGISTERED).ranks
    fill(prefill, 1)
    said = fail_a_write(prefill, *decode, room=7)
    check_root_cause(said, time.monotonic(), prefill, *decode)
    assert (prefill.stats()["staged_writes"] > 0) is staging
    fence_and_check_empty(prefill, *decode)


@pytest.mark.parametrize("staging", [True, False])
def test_rooms_that_fail_together_are_all_cleaned_up(instances, backend: str, staging: bool) -> None:
    """Staging: heads are gathered for two ranks. Without it, whole pages go to one."""
    (prefill,) = instances("prefill", backend, shape([2]), staging_bytes=STAGING_BYTES * staging).ranks
    decodes = instances("decode", backend, shape([2], tp=1 + staging), **HALF_REGISTERED).ranks
    fill(prefill, 1)
    rooms = {f"r{number}": [number, 63 - number] for number in range(3)}  # the second is not registered
    for room, (name, pages) in enumerate(rooms.items()):
        prefill.open(name, room)
        for decode in decodes:
            offer(decode, prefill, room, name=name, pages=pages)
    for name in rooms:
        prefill.until(name, "ready")
    prefill.call("hold_writes")
    for name in rooms:
        prefill.send(name, [1, 2])
    prefill.settle(lambda stats: stats["held_writes"] >= len(decodes))
    if backend == "nixl":
        for decode in decodes:
            assert end_data_connections(decode, prefill, *decodes)
    prefill.call("release_writes")
    for side in (prefill, *decodes):
        for name in rooms:
            status = side.until(name, "ended")
            assert status["cause"] == "transfer_failed"
            assert re.search(REASONS[backend], status["message"]), status
        # What had not begun when the first failed may be over by then: nothing of it is under way.
        assert not side.status("r0")["releasable"], "the backend had not said that its writes are over"
        side.settle(lambda stats: stats["causes"] == {"transfer_failed": len(rooms)})
    assert (prefill.stats()["staged_writes"] > 0) is staging
    fence_and_check_empty(prefill, *decodes, names=rooms)


def test_write_given_up_by_mooncake_holds_pages(sides, monkeypatch) -> None:
    """Mooncake says that a transfer to a stopped process has failed; all of it lands when the process goes on."""
    for name in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"):
        monkeypatch.setenv(name, str(MOONCAKE_GIVES_UP_S))
    prefill, decode = sides("prefill", "mooncake"), sides("decode", "mooncake")
    fill(prefill, 1)
    open_both(prefill, decode, 7, pages=PAGES)
    prefill.until("r", "ready")
    prefill.call("hold_writes")
    prefill.send("r", PAGES)
    prefill.settle(lambda stats: stats["held_writes"] == 1)
    decode.abort("r")
    assert prefill.until("r", "ended")["cause"] == "peer_aborted"
    decode.signal(signal.SIGSTOP)
    prefill.call("release_writes")
    assert prefill.settle(lambda stats: stats["failed_writes"])["failed_writes"]
    assert not decode.pages.any(), "nothing landed late: the test shows nothing"
    decode.signal(signal.SIGCONT)
    held_while_it_lands(prefill, decode)
    for side in (prefill, decode):
        side.settle(lambda stats: stats["holds"] == 1)
        assert not side.status("r")["releasable"], "Mooncake's failure was taken for the end of its bytes"
    prefill.kill()
    decode.call("fence", incarnation=prefill.incarnation, connections=False)
    decode.until("r", "releasable")
    decode.pages[:] = 0
    time.sleep(1.0)  # the interval in which stale bytes would come
    assert not decode.pages.any(), "pages were written after their release"


def held_while_it_lands(prefill: Side, decode: Side, within_s: float = 30.0) -> None:
    """Wait until all of a late write is in place; the pages stay held meanwhile."""
    deadline = time.monotonic() + within_s
    while not np.array_equal(decode.pages[:, PAGES], prefill.pages[:, PAGES]):
        assert time.monotonic() < deadline, "the late bytes did not all come"
        assert not decode.status("r")["releasable"], "released while bytes were landing"

"""Real data planes whose calls fail or time out for real under a connector: who is told what, and what is held."""

import re
import signal
import time
from collections.abc import Iterable

import numpy as np
import pytest

from tests.integration.connector_peer import Side
from tests.integration.handoffs import HALF_REGISTERED, end_data_connections, fail_a_write, fill, meet
from tests.integration.instances import shape
from tests.integration.real_failures import REASONS

TOLD_S = 2.0
STAGING_BYTES = 64 << 20
MOONCAKE_GIVES_UP_S = 3
PAGES = list(range(8, 40))


@pytest.fixture(params=["nixl", "mooncake"])
def backend(request, monkeypatch) -> str:
    monkeypatch.setenv("UCX_TLS", "tcp")  # over CMA, NIXL does without the connections that are ended
    return request.param


def check_root_cause(said: str, failed_at: float, *sides: Side) -> None:
    """Each side was told in time what the engine had said, says it again, and keeps what may still be touched."""
    for side in sides:
        status = side.until("r", "ended")
        assert status["at"] - failed_at < TOLD_S
        for asked in (status, side.status("r")):
            assert (asked["cause"], asked["message"]) == ("transfer_failed", said)
            assert not asked["releasable"], "the engine had not said that nothing is under way any more"
        side.settle(lambda stats: stats["causes"].get("transfer_failed") == 1)


def fence_and_check_empty(prefill: Side, *decodes: Side, names: Iterable[str] = ("r",)) -> None:
    """Here it is known that nothing comes any more. Then nothing is left, in the adapter's tables neither."""
    for decode in decodes:
        decode.call("fence", incarnation=prefill.incarnation)
        prefill.call("fence", incarnation=decode.incarnation)
    for side in (prefill, *decodes):
        for name in names:
            side.until(name, "releasable")
        stats = side.settle(lambda stats: stats["rows"] == stats["kept"] == stats["holds"] == 0)
        assert stats["faults"] == 0


def test_a_transfer_that_fails_ends_its_hand_off_by_its_root_cause_and_that_of_no_other_peer(sides, backend) -> None:
    prefill, fragile = sides("prefill", backend), sides("decode", backend, **HALF_REGISTERED)
    other = sides("decode", backend)
    fill(prefill, 1)
    meet(prefill, other, 8, name="beside")
    prefill.until("beside", "ready")
    said = fail_a_write(prefill, fragile, room=7)
    check_root_cause(said, time.monotonic(), prefill, fragile)
    prefill.send("beside", [1, 2])
    other.until("beside", "done")
    assert (other.pages[:, [8, 3]] == prefill.pages[:, [1, 2]]).all()
    fence_and_check_empty(prefill, fragile)
    other.settle(lambda stats: stats["rows"] == stats["kept"] == stats["holds"] == 0)


def test_rooms_of_the_same_peer_go_on_after_a_transfer_that_failed(sides, backend) -> None:
    prefill, fragile = sides("prefill", backend), sides("decode", backend, **HALF_REGISTERED)
    fill(prefill, 1)
    meet(prefill, fragile, 8, name="before", pages=[4])
    prefill.until("before", "ready")
    fail_a_write(prefill, fragile, room=7)
    prefill.send("before", [1])
    meet(prefill, fragile, 9, name="after", pages=[5])
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
def test_a_transfer_of_gathered_or_scattered_heads_that_fails_is_told_to_all_ranks(
    instances, backend, staging: bool
) -> None:
    (prefill,) = instances("prefill", backend, shape([2]), staging_bytes=STAGING_BYTES * staging).ranks
    decode = instances("decode", backend, shape([2], tp=2), **HALF_REGISTERED).ranks
    fill(prefill, 1)
    said = fail_a_write(prefill, *decode, room=7)
    check_root_cause(said, time.monotonic(), prefill, *decode)
    assert (prefill.stats()["staged_writes"] > 0) is staging
    fence_and_check_empty(prefill, *decode)


@pytest.mark.parametrize("staging", [True, False])
def test_rooms_whose_engine_calls_fail_at_once_are_each_told_and_cleaned_up(
    instances, backend: str, staging: bool
) -> None:
    """Staging: heads are gathered for two ranks. Without it, whole pages go to one."""
    (prefill,) = instances("prefill", backend, shape([2]), staging_bytes=STAGING_BYTES * staging).ranks
    decodes = instances("decode", backend, shape([2], tp=1 + staging), **HALF_REGISTERED).ranks
    fill(prefill, 1)
    rooms = {f"r{number}": [number, 63 - number] for number in range(3)}  # the second is not registered
    for room, (name, pages) in enumerate(rooms.items()):
        prefill.open(name, room)
        for decode in decodes:
            decode.open(name, room, prefill=prefill.bootstrap, pages=pages, aux_slot=room)
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
        assert not side.status("r0")["releasable"], "the engine had not said that nothing is under way any more"
        side.settle(lambda stats: stats["causes"] == {"transfer_failed": len(rooms)})
    assert (prefill.stats()["staged_writes"] > 0) is staging
    fence_and_check_empty(prefill, *decodes, names=rooms)


def test_pages_of_an_aborted_write_that_mooncake_gave_up_are_held_while_its_bytes_land(sides, monkeypatch) -> None:
    """Mooncake says that a transfer to a stopped process has failed; all of it lands when the process goes on."""
    for name in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"):
        monkeypatch.setenv(name, str(MOONCAKE_GIVES_UP_S))
    prefill, decode = sides("prefill", "mooncake"), sides("decode", "mooncake")
    fill(prefill, 1)
    meet(prefill, decode, 7, pages=PAGES)
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
        assert not side.status("r")["releasable"], "Mooncake's word that it failed was taken for the end of its bytes"
    prefill.kill()
    decode.call("fence", incarnation=prefill.incarnation, connections=False)
    decode.until("r", "releasable")
    decode.pages[:] = 0
    time.sleep(1.0)  # the interval in which stale bytes would come
    assert not decode.pages.any(), "pages were written after their release"


def held_while_it_lands(prefill: Side, decode: Side, within_s: float = 30.0) -> None:
    """Look on until all of a late write is in place."""
    deadline = time.monotonic() + within_s
    while not np.array_equal(decode.pages[:, PAGES], prefill.pages[:, PAGES]):
        assert time.monotonic() < deadline, "the late bytes did not all come"
        assert not decode.status("r")["releasable"], "released while bytes were landing"

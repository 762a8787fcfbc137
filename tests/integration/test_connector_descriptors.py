"""Descriptors of a prefill over NIXL whose decodes are killed while it writes to them.

NIXL 1.5.1 tries to connect when it loads a peer. Where that is refused, UCX keeps the socket until the process ends:
measured on the bare library, one for each try. The connector loads no peer again that it knows to be dead. The end of a
process on another host shows later, so that one such try may come before it.
"""

import signal

import pytest

from tests.integration.handoffs import TIMEOUTS, open_both

KILLED, FIRST = 8, 2
"""Decodes that are killed in all, and those after which all that libraries open once is open."""
ROOMS = 3
"""Hand-offs of each decode; the last one is sent when the decode is dead, so that prefill connects again for it."""


@pytest.mark.parametrize(("elsewhere", "tries"), [(False, 0), (True, 1)], ids=["same host", "another host"])
def test_killed_decodes_leave_few_descriptors(sides, monkeypatch, elsewhere: bool, tries: int) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # over CMA a write is over before the decode can be killed
    options = {"elsewhere": elsewhere, "timeouts": {**TIMEOUTS, "result_s": 1.0}, "log": "ERROR"}
    prefill = sides("prefill", "nixl", **options)
    counts = []
    for _ in range(KILLED):
        decode = sides("decode", "nixl", **options)
        names = [f"{decode.incarnation[:8]}-{room}" for room in range(ROOMS)]
        for room, name in enumerate(names):
            open_both(prefill, decode, room, name=name, pages=range(8 * room, 8 * room + 8))
        for name in names:
            prefill.until(name, "ready")
        decode.signal(signal.SIGSTOP)  # a write to it does not end
        for name in names[:-1]:
            prefill.send(name, range(8))
        prefill.until(names[0], "transferring")
        decode.kill()
        prefill.send(names[-1], range(8))
        for name in names:
            prefill.until(name, "ended")
        prefill.call("fence", incarnation=decode.incarnation)
        for name in names:
            prefill.until(name, "releasable")
        counts.append(prefill.settle(lambda stats: not stats["rows"] and not stats["peers"])["fds"])
    assert counts[-1] - counts[FIRST - 1] <= tries * (KILLED - FIRST), counts

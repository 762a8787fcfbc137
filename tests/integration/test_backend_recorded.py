"""The stand-ins of the conformance suite fail as the real packages do once a peer has ended.

They do not report such a transfer as done, and do not write to where the peer was.
"""

import signal

import numpy as np
import pytest

from tests.integration.backend_cases import RECORDED, SMALL, cross, fill, move, peers

PAGES = range(4, 20), range(30, 46)


def pytest_generate_tests(metafunc):
    cross(metafunc, "plane", RECORDED)


def kill(target):
    target.signal(signal.SIGKILL)
    target.process.wait(10)


def close(target):
    assert target.call("close") == {}


@pytest.mark.parametrize("leave", [kill, close])
def test_nothing_is_moved_once_the_peer_has_left(plane, leave):
    with peers(plane, SMALL, "i", "T") as (initiator, target):
        assert initiator.connect(target) == {}
        assert move(initiator, target, *PAGES)["outcome"] == "done"
        leave(target)
        source, sink = initiator, target
        fill(source, sink)
        before = sink.arena.view.copy()
        ended = move(initiator, target, *PAGES)
        assert ended["outcome"] == "failed_unsettled"
        assert ("has ended" if leave is kill else "registered") in ended["failure"]
        assert np.array_equal(sink.arena.view, before)


def test_a_peer_that_had_left_before_is_not_reached(plane):
    with peers(plane, SMALL, "i", "T") as (initiator, target):
        kill(target)
        answer = initiator.connect(target)
        if plane.backend == "mori":
            assert answer["error"] == "PeerUnreachableError"
        else:  # connecting moves nothing
            assert answer == {}
            assert move(initiator, target, *PAGES)["outcome"] == "failed_unsettled"

"""A peer of the version before: bytes that version 1 put on the wire, and what it is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import Linked, PeerReady, Writer
from pdpool_connector.protocol.status import Cause, Phase
from pdpool_connector.protocol.versions import VersionMismatchError, negotiate

from tests.unit.protocol.sides import DECODE, PREFILL, Decode, Prefill, ids, sent, writes

D, P = DECODE.encode().hex(), PREFILL.encode().hex()
ABOUT = f"92d920{D}010700"
RECORDED = {
    "hello": f"96a548656c6c6f01d920{D}01ad31302e302e302e313a38393939c4016d",
    "hello_ok": f"94a748656c6c6f4f6b01d920{P}c4016d",
    "open": f"9ba44f70656e01d920{D}{ABOUT}a172c40808000000090000000003cb403e000000000000",
    "accepted": f"96a8416363657074656401d920{P}{ABOUT}",
    "sending": f"96a753656e64696e6701d920{P}{ABOUT}",
    "done": f"97a4446f6e6501d920{P}{ABOUT}10",
    "failed": f"98a64661696c656401d920{P}{ABOUT}a974696d65645f6f7574a46c617465",
    "drained": f"98a7447261696e656401d920{P}{ABOUT}a974696d65645f6f7574a46c617465",
    "ack": f"96a341636b01d920{D}{ABOUT}",
    "abort": f"99a541626f727401d920{D}{ABOUT}a172a761626f72746564ab636c69656e74206c656674",
    "query": f"96a5517565727901d920{D}{ABOUT}",
}
"""Recorded from the code that spoke version 1: attempt 1 of DECODE, room 7, pages 8 and 9, aux slot 3."""


def heard(name: str) -> f.AnyFrame:
    return f.decode(bytes.fromhex(RECORDED[name]))


def same_but_longer(frame: f.Frame, name: str) -> bool:
    """What version 1 reads of a frame is what it would have sent itself: it ignores what stands behind."""
    old = msgspec.msgpack.decode(bytes.fromhex(RECORDED[name]))
    return msgspec.msgpack.decode(f.encode(frame))[: len(old)] == old


def prefill() -> Prefill:
    side = Prefill()
    side.do(PeerReady(DECODE, 1))
    return side


def decode() -> Decode:
    side = Decode(linked=False)
    side.do(PeerReady(PREFILL, 1))
    side.do(Linked("p:1", (Writer(PREFILL),)))
    return side


@pytest.mark.parametrize("name", RECORDED)
def test_frames_of_version_1_are_read_and_come_out_as_they_were(name: str) -> None:
    assert same_but_longer(heard(name), name)


def test_a_decode_of_version_1_gets_its_pages_and_is_answered_in_version_1() -> None:
    side = prefill()
    side.request()
    effects = side.hear(heard("open"))
    assert [same_but_longer(frame, "accepted") for frame in sent(effects)] == [True]
    (write,) = writes(side.send(last=True))
    assert (write.source, write.target, write.aux) == (ids(4, 5), ids(8, 9), (2, 3))
    effects = side.landed(write)
    assert side.status[1].phase is Phase.DONE
    assert [frame.version for frame in sent(effects, f.Done)] == [1]
    assert sent(side.hear(heard("query")), f.Done)
    side.hear(heard("ack"))
    side.wait(100)
    assert side.machine.rows == 0


def test_a_decode_of_version_1_may_abort() -> None:
    side = prefill()
    side.request()
    side.hear(heard("open"))
    (drained,) = sent(side.hear(heard("abort")))
    assert (type(drained), drained.version, side.status[1].cause) == (f.Drained, 1, Cause.PEER_ABORTED)


def test_a_prefill_of_version_1_is_offered_pages_and_heard_in_version_1() -> None:
    side = decode()
    (opened,) = sent(side.open())
    assert same_but_longer(opened, "open")
    side.hear(heard("accepted"))
    side.hear(heard("sending"))
    assert side.status[1].phase is Phase.TRANSFERRING
    effects = side.hear(heard("done"))
    assert (side.status[1].phase, side.status[1].bytes_moved) == (Phase.DONE, 16)
    assert [same_but_longer(frame, "ack") for frame in sent(effects)] == [True]


def test_a_prefill_of_version_1_may_fail_and_is_told_of_aborts() -> None:
    side = decode()
    side.open()
    side.hear(heard("failed"))
    assert not side.status[1].releasable
    side.hear(heard("drained"))
    assert (side.status[1].cause, side.status[1].releasable) == (Cause.TIMED_OUT, True)
    other = decode()
    other.open()
    (abort,) = sent(other.abort(message="client left"), f.Abort)
    assert same_but_longer(abort, "abort")


@given(st.integers(0, 9), st.integers(0, 9))
def test_the_highest_version_that_both_speak_is_spoken(oldest: int, newest: int) -> None:
    common = set(range(oldest, newest + 1)) & set(range(f.VERSION_MIN, f.VERSION_MAX + 1))
    if common:
        assert negotiate(oldest, newest) == max(common)
    else:
        with pytest.raises(VersionMismatchError, match=rf"is {oldest}\.\.{newest} at the peer"):
            negotiate(oldest, newest)


@pytest.mark.parametrize(
    ("wants", "why"),
    [
        ({"direction": "read"}, "direction 'read' needs version 2"),
        ({"parts": 2}, "2 decode ranks on one prefill rank needs version 2"),
        ({"state": True}, "a pool of per-request state needs version 2"),
    ],
)
def test_what_version_1_cannot_carry_is_refused_with_the_reason(wants: dict, why: str) -> None:
    with pytest.raises(VersionMismatchError, match=why):
        negotiate(1, 1, **wants)
    assert negotiate(1, 2, **wants) == 2


def test_what_version_3_cannot_carry_is_refused_with_the_reason() -> None:
    with pytest.raises(VersionMismatchError, match="state that is cut over tensor ranks needs version 4"):
        negotiate(1, 3, state=True, shares=True)
    assert negotiate(1, 4, state=True, shares=True) == 4
    assert negotiate(1, 3, state=True) == 3

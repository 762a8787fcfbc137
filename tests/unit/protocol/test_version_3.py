"""A peer that speaks version 3 at most: every frame it puts on the wire, and hand-offs with it in WRITE and in READ.

Version 4 differs in one field of one frame, `Hello.state`, and in what is told of memory; no other frame differs.
"""

from typing import get_args

import msgspec
import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import Linked, PeerLost, PeerReady, Writer, WriteResult
from pdpool_connector.protocol.status import Cause, Phase

from tests.unit.protocol.sides import (
    DECODE,
    DECODE_2,
    PREFILL,
    TIMING,
    Decode,
    DecodeRead,
    Prefill,
    PrefillRead,
    ids,
    names,
    reads,
    sent,
    writes,
)
from tests.unit.protocol.test_expect import expect

PROMPT = b"k" * 16
D, E, P, K = DECODE.encode().hex(), DECODE_2.encode().hex(), PREFILL.encode().hex(), f"c410{PROMPT.hex()}"
ABOUT, SECOND, ROOM_8, OTHER = (f"92d920{one}" for one in (f"{D}010700", f"{D}020700", f"{D}020800", f"{E}010700"))
PAGES, LIFE = "c4080800000009000000", "cb403e000000000000"
LEFT, FULL = "ab636c69656e74206c656674", "ad6f7574206f66206d656d6f7279"
ABORTED, PEER_ABORTED = "a761626f72746564", "ac706565725f61626f72746564"
FROM_DECODE = {
    "hello": f"97a548656c6c6f03d920{D}01ad31302e302e302e313a38393939c4016dc3",
    "goodbye": f"94a7476f6f6462796503d920{D}b76465636f6465206973207368757474696e6720646f776e",
    "open": f"9fa44f70656e03d920{D}{ABOUT}a172{PAGES}0003{LIFE}0001c400{K}",
    "open, part 0 of 2": f"9fa44f70656e03d920{D}{ABOUT}a172{PAGES}0003{LIFE}0002c400{K}",
    "open, part 1 of 2": f"9fa44f70656e03d920{E}{OTHER}a172{PAGES}00ff{LIFE}0102c400{K}",
    "open after expect": f"9fa44f70656e03d920{D}{SECOND}a172{PAGES}0003{LIFE}0001c400{K}",
    "two opens": f"94a5426174636803d920{D}929fa44f70656e03d920{D}{ABOUT}a172{PAGES}0003{LIFE}0001c400{K}"
    f"9fa44f70656e03d920{D}{ROOM_8}a171c404010000000003{LIFE}0001c400{K}",
    "expect": f"9ba645787065637403d920{D}{ABOUT}a172{LIFE}0001{K}",
    "expect, part 1 of 2": f"9ba645787065637403d920{E}{OTHER}a172{LIFE}0102{K}",
    "query": f"96a5517565727903d920{D}{ABOUT}",
    "ack": f"96a341636b03d920{D}{ABOUT}",
    "abort": f"9ca541626f727403d920{D}{ABOUT}a172{ABORTED}{LEFT}0001{K}",
    "abort, part 0 of 2": f"9ca541626f727403d920{D}{ABOUT}a172{ABORTED}{LEFT}0002{K}",
    "abort, part 1 of 2": f"9ca541626f727403d920{E}{OTHER}a172{ABORTED}{LEFT}0102{K}",
    "READ: fetching": f"97a84665746368696e6703d920{D}{ABOUT}01",
    "READ: done": f"98a4446f6e6503d920{D}{ABOUT}08c0",
    "READ: done, part 1 of 2": f"98a4446f6e6503d920{E}{OTHER}08c0",
    "READ: failed": f"98a64661696c656403d920{D}{ABOUT}{ABORTED}{LEFT}",
    "READ: drained": f"9ca7447261696e656403d920{D}{ABOUT}{ABORTED}{LEFT}a1720001{K}",
    "READ: failed by prefill": f"98a64661696c656403d920{D}{ABOUT}{PEER_ABORTED}{FULL}",
    "READ: drained by prefill": f"9ca7447261696e656403d920{D}{ABOUT}{PEER_ABORTED}{FULL}a1720001{K}",
}
"""Recorded from the code that spoke version 3: room 7, pages 8 and 9, aux slot 3, 30 s."""
FROM_PREFILL = {
    "hello_ok": f"94a748656c6c6f4f6b03d920{P}c4016d",
    "hello_refused": f"95ac48656c6c6f5265667573656401d920{P}b16d6f64656c20697320276d272068657265c3",
    "prefill's goodbye": f"94a7476f6f6462796503d920{P}b870726566696c6c206973207368757474696e6720646f776e",
    "accepted": f"96a8416363657074656403d920{P}{ABOUT}",
    "accepted, part 1 of 2": f"96a8416363657074656403d920{P}{OTHER}",
    "sending": f"96a753656e64696e6703d920{P}{ABOUT}",
    "done": f"98a4446f6e6503d920{P}{ABOUT}08c0",
    "done, part 1 of 2": f"98a4446f6e6503d920{P}{OTHER}08c0",
    "done after expect": f"98a4446f6e6503d920{P}{SECOND}08c0",
    "failed": f"98a64661696c656403d920{P}{ABOUT}{ABORTED}{FULL}",
    "drained": f"9ca7447261696e656403d920{P}{ABOUT}{ABORTED}{FULL}a00001c400",
    "failed by decode": f"98a64661696c656403d920{P}{ABOUT}{PEER_ABORTED}{LEFT}",
    "drained by decode": f"9ca7447261696e656403d920{P}{ABOUT}{PEER_ABORTED}{LEFT}a00001c400",
    "READ: computed": f"9da8436f6d707574656403d920{P}{ABOUT}0000c4080400000005000000c302c400c0",
    "READ: computed, part 1 of 2": f"9da8436f6d707574656403d920{P}{OTHER}0000c4080400000005000000c3ffc400c0",
    "READ: computed first": f"9da8436f6d707574656403d920{P}{ABOUT}0000c40404000000c2ffc400c0",
    "READ: computed last": f"9da8436f6d707574656403d920{P}{ABOUT}0101c40405000000c302c400c0",
    "READ: abort": f"9ca541626f727403d920{P}{ABOUT}a172{ABORTED}{FULL}0001{K}",
    "READ: ack": f"96a341636b03d920{P}{ABOUT}",
}
"""As above, of pages 4 and 5 and aux slot 2."""
RECORDED = FROM_DECODE | FROM_PREFILL


def heard(name: str) -> f.AnyFrame:
    return f.decode(bytes.fromhex(RECORDED[name]))


def as_version_3(frames: list[f.Frame], *expected: str) -> bool:
    """What version 3 reads of these frames is what it would have sent itself: it ignores what stands behind."""
    plain = [msgspec.msgpack.decode(f.encode(frame)) for frame in frames]
    old = [msgspec.msgpack.decode(bytes.fromhex(RECORDED[name])) for name in expected]
    return [ours[: len(theirs)] for ours, theirs in zip(plain, old, strict=True)] == old


def prefill(kind: type[Prefill] = Prefill, *, other: int | None = None) -> Prefill:
    """With the request, and paired with a decode of version 3, and another of the version `other`."""
    side = kind()
    side.do(PeerReady(DECODE, 3))
    if other is not None:
        side.do(PeerReady(DECODE_2, other))
    side.request(prompt=PROMPT)
    return side


def decode(kind: type[Decode] = Decode, **part: int) -> Decode:
    """Linked with a prefill of version 3, of whose `parts` it is number `part`."""
    side = kind(TIMING, (Writer(PREFILL, **part),), linked=False)
    side.do(PeerReady(PREFILL, 3))
    side.do(Linked("p:1", side.writers))
    return side


def leaves_nothing(*sides: Prefill | Decode) -> bool:
    for side in sides:
        side.wait(2 * TIMING.verdict_s)
    return all(side.machine.rows == 0 for side in sides)


def ended(side: Prefill | Decode) -> tuple[Phase, Cause | None, bool]:
    return side.status[1].phase, side.status[1].cause, side.status[1].releasable


DONE = (Phase.DONE, None, True)
OURS, THEIRS = (Phase.FAILED, Cause.ABORTED, True), (Phase.FAILED, Cause.PEER_ABORTED, True)
OURS_HELD, THEIRS_HELD = (Phase.FAILED, Cause.ABORTED, False), (Phase.FAILED, Cause.PEER_ABORTED, False)

# --- Frames ---


def test_every_kind_of_frame_is_recorded() -> None:
    assert {type(heard(name)) for name in RECORDED} == set(get_args(f.AnyFrame))


@pytest.mark.parametrize("name", RECORDED)
def test_frames_of_version_3_are_read_and_come_out_as_they_were(name: str) -> None:
    frame = heard(name)
    assert frame.version == (1 if isinstance(frame, f.HelloRefused) else 3)
    assert as_version_3([frame], name)


def test_a_hello_of_version_3_asks_for_no_share_of_state_and_reads_as_much_of_ours() -> None:
    hello = heard("hello")
    assert isinstance(hello, f.Hello)
    assert (hello.oldest_version, hello.address, hello.kv, hello.state) == (1, "10.0.0.1:8999", True, False)
    assert as_version_3([msgspec.structs.replace(hello, state=True)], "hello")


def test_opens_that_come_together_are_taken_and_ours_travel_together() -> None:
    side = prefill()
    side.request(2, room=8, rid="q", prompt=PROMPT)
    batch = heard("two opens")
    assert isinstance(batch, f.Batch)
    for frame in batch.frames:
        side.hear(frame)
    assert [side.status[handle].phase for handle in (1, 2)] == [Phase.READY, Phase.READY]
    other = decode()
    opens = sent(other.open(prompt=PROMPT)) + sent(other.open(2, room=8, rid="q", pages=(1,), prompt=PROMPT))
    assert as_version_3(list(f.batches(opens)), "two opens")


# --- WRITE ---


def test_a_decode_of_version_3_gets_its_pages() -> None:
    side = prefill()
    assert as_version_3(sent(side.hear(heard("open"))), "accepted")
    (write,) = writes(side.send())
    assert (write.source, write.target, write.aux) == (ids(4, 5), ids(8, 9), (2, 3))
    assert as_version_3(sent(side.landed(write)), "done")
    assert as_version_3(sent(side.hear(heard("query"))), "done")
    side.hear(heard("ack"))
    assert ended(side) == DONE
    assert leaves_nothing(side)


def test_a_prefill_of_version_3_is_offered_pages_and_heard() -> None:
    side = decode()
    assert as_version_3(sent(side.open(prompt=PROMPT)), "open")
    side.hear(heard("accepted"))
    side.hear(heard("sending"))
    assert side.status[1].phase is Phase.TRANSFERRING
    assert as_version_3(sent(side.hear(heard("done"))), "ack")
    assert (ended(side), side.status[1].bytes_moved) == (DONE, 8)
    assert leaves_nothing(side)


def test_a_decode_of_version_3_that_gives_up_is_told_when_nothing_is_in_flight() -> None:
    side = prefill()
    side.hear(heard("open"))
    (write,) = writes(side.send())
    assert as_version_3(sent(side.hear(heard("abort"))), "failed by decode")
    assert ended(side) == THEIRS_HELD
    assert as_version_3(sent(side.landed(write)), "drained by decode")
    side.hear(heard("ack"))
    assert ended(side) == THEIRS
    assert leaves_nothing(side)


def test_a_prefill_of_version_3_is_told_that_decode_gives_up_and_says_when_nothing_is_in_flight() -> None:
    side = decode()
    side.open(prompt=PROMPT)
    side.hear(heard("accepted"))
    assert as_version_3(sent(side.abort(message="client left")), "abort")
    side.hear(heard("failed by decode"))
    assert ended(side) == OURS_HELD
    assert as_version_3(sent(side.hear(heard("drained by decode"))), "ack")
    assert ended(side) == OURS
    assert leaves_nothing(side)


def test_a_prefill_that_gives_up_tells_a_decode_of_version_3_and_is_heard_by_ours() -> None:
    side, other = prefill(), decode()
    side.hear(heard("open"))
    (write,) = writes(side.send())
    assert as_version_3(sent(side.abort(message="out of memory")), "failed")
    assert as_version_3(sent(side.landed(write)), "drained")
    side.hear(heard("ack"))
    assert ended(side) == OURS
    other.open(prompt=PROMPT)
    other.hear(heard("failed"))
    assert ended(other) == THEIRS_HELD
    assert as_version_3(sent(other.hear(heard("drained"))), "ack")
    assert ended(other) == THEIRS
    assert leaves_nothing(side, other)


# --- READ ---


def test_a_decode_of_version_3_reads_what_it_is_told_of() -> None:
    side = prefill(PrefillRead)
    assert as_version_3(sent(side.hear(heard("open"))), "accepted")
    assert as_version_3(sent(side.send(pages=(4,), last=False)), "READ: computed first")
    assert sent(side.hear(heard("READ: fetching"))) == []
    assert as_version_3(sent(side.send(pages=(5,), start=1)), "READ: computed last")
    assert as_version_3(sent(side.hear(heard("READ: done"))), "READ: ack")
    assert (ended(side), side.status[1].bytes_moved) == (DONE, 8)
    assert leaves_nothing(side)


def test_what_a_prefill_of_version_3_tells_of_is_read() -> None:
    side = decode(DecodeRead)
    assert as_version_3(sent(side.open(prompt=PROMPT)), "open")
    side.hear(heard("accepted"))
    (first,) = reads(side.hear(heard("READ: computed first")))
    assert as_version_3(sent(side.hear(heard("READ: computed first"))), "READ: fetching")
    side.landed(first)
    (last,) = reads(side.hear(heard("READ: computed last")))
    assert (first.source + last.source, first.target + last.target) == (ids(4, 5), ids(8, 9))
    assert last.aux == (2, 3)
    assert as_version_3(sent(side.landed(last)), "READ: done")
    side.hear(heard("READ: ack"))
    assert ended(side) == DONE
    assert leaves_nothing(side)


def test_prefill_holds_its_pages_until_a_decode_of_version_3_that_gives_up_reads_no_more() -> None:
    side = prefill(PrefillRead)
    side.hear(heard("open"))
    assert as_version_3(sent(side.send()), "READ: computed")
    side.hear(heard("READ: failed"))
    assert ended(side) == THEIRS_HELD
    assert as_version_3(sent(side.hear(heard("READ: drained"))), "READ: ack")
    assert ended(side) == THEIRS
    assert leaves_nothing(side)


def test_a_decode_that_gives_up_tells_a_prefill_of_version_3_when_it_reads_no_more() -> None:
    side = decode(DecodeRead)
    side.open(prompt=PROMPT)
    (read,) = reads(side.hear(heard("READ: computed")))
    assert as_version_3(sent(side.abort(message="client left")), "READ: failed")
    assert ended(side) == OURS_HELD
    assert as_version_3(sent(side.landed(read, WriteResult.STOPPED)), "READ: drained")
    side.hear(heard("READ: ack"))
    assert ended(side) == OURS
    assert leaves_nothing(side)


def test_a_prefill_that_gives_up_what_is_read_asks_a_decode_of_version_3_and_is_obeyed_by_ours() -> None:
    side, other = prefill(PrefillRead), decode(DecodeRead)
    side.hear(heard("open"))
    side.send()
    assert as_version_3(sent(side.abort(message="out of memory")), "READ: abort")
    side.hear(heard("READ: failed by prefill"))
    assert ended(side) == OURS_HELD
    assert as_version_3(sent(side.hear(heard("READ: drained by prefill"))), "READ: ack")
    assert ended(side) == OURS
    other.open(prompt=PROMPT)
    (read,) = reads(other.hear(heard("READ: computed")))
    assert as_version_3(sent(other.hear(heard("READ: abort"))), "READ: failed by prefill")
    assert as_version_3(sent(other.landed(read, WriteResult.STOPPED)), "READ: drained by prefill")
    other.hear(heard("READ: ack"))
    assert ended(other) == THEIRS
    assert leaves_nothing(side, other)


# --- Two parts ---


@pytest.mark.parametrize("other", [3, 4])
def test_two_decodes_of_which_one_may_be_newer_get_their_parts_each_in_its_version(other: int) -> None:
    side = prefill(other=other)
    side.hear(heard("open, part 0 of 2"))
    assert side.status[1].phase is not Phase.READY
    side.hear(heard("open, part 1 of 2"))
    assert side.status[1].phase is Phase.READY
    parts = writes(side.send())
    assert {write.attempt.decode: write.aux for write in parts} == {DECODE: (2, 3), DECODE_2: None}
    done = {frame.attempt.decode: frame for write in parts for frame in sent(side.landed(write), f.Done)}
    assert [done[peer].version for peer in (DECODE, DECODE_2)] == [3, other]
    assert as_version_3([done[DECODE]], "done")
    assert other != 3 or as_version_3([done[DECODE_2]], "done, part 1 of 2")
    assert ended(side) == DONE


def test_two_decodes_of_version_3_read_their_parts() -> None:
    side = prefill(PrefillRead, other=3)
    side.hear(heard("open, part 0 of 2"))
    assert as_version_3(sent(side.hear(heard("open, part 1 of 2"))), "accepted, part 1 of 2")
    assert as_version_3(sent(side.send()), "READ: computed", "READ: computed, part 1 of 2")
    side.hear(heard("READ: done"))
    assert side.status[1].phase is Phase.TRANSFERRING
    side.hear(heard("READ: done, part 1 of 2"))
    assert ended(side) == DONE


@pytest.mark.parametrize("opened", [True, False])
def test_one_of_two_decodes_of_version_3_that_gives_up_ends_the_other_part(opened: bool) -> None:
    side = prefill(other=3)
    side.hear(heard("open, part 0 of 2"))
    if opened:
        side.hear(heard("open, part 1 of 2"))
    told = [frame for frame in sent(side.hear(heard("abort, part 1 of 2"))) if frame.attempt.decode == DECODE]
    assert as_version_3(told, "drained by decode")
    assert ended(side) == THEIRS


@pytest.mark.parametrize("kind", [Decode, DecodeRead])
def test_a_prefill_of_version_3_is_told_of_the_part(kind: type[Decode]) -> None:
    side = decode(kind, part=0, parts=2)
    assert as_version_3(sent(side.open(prompt=PROMPT)), "open, part 0 of 2")
    if kind is Decode:
        assert as_version_3(sent(side.abort(message="client left")), "abort, part 0 of 2")


# --- What is not opened yet ---


def test_a_prefill_of_version_3_is_told_what_is_expected_and_serves_it_when_it_is_opened() -> None:
    side = decode()
    assert as_version_3(sent(side.do(expect(1, prompt=PROMPT))), "expect")
    assert as_version_3(sent(side.open(2, prompt=PROMPT)), "open after expect")
    side.hear(heard("done after expect"))
    assert side.status[2].phase is Phase.DONE


@pytest.mark.parametrize("kind", [Prefill, PrefillRead])
def test_what_a_decode_of_version_3_expects_ends_with_it(kind: type[Prefill]) -> None:
    side = prefill(kind)
    side.hear(heard("expect"))
    side.do(PeerLost(DECODE, "decode is gone"))
    assert ended(side) == (Phase.FAILED, Cause.PEER_LOST, True)


def test_what_one_of_two_decodes_of_version_3_has_opened_ends_with_the_other_that_expects_it() -> None:
    side = prefill(other=3)
    side.hear(heard("expect, part 1 of 2"))
    side.hear(heard("open, part 0 of 2"))
    assert names(side.do(PeerLost(DECODE_2, "decode is gone"))) == ["Drained"]
    assert ended(side) == (Phase.FAILED, Cause.PEER_LOST, True)


def test_what_a_decode_of_version_3_has_opened_is_no_more_expected() -> None:
    side = prefill()
    side.hear(heard("expect"))
    side.hear(heard("open after expect"))
    (write,) = writes(side.send())
    assert as_version_3(sent(side.landed(write)), "done after expect")
    assert ended(side) == DONE

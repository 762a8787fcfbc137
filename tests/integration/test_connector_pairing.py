"""Whom a live prefill pairs with: how many at a time, and which process of those that one address has seen."""

import contextlib
import errno
import secrets
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from pdpool_connector import Cause, DecodeConnector, Phase, PrefillConnector
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.fence import ProcessExited
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime import peer_table as decodes_module
from pdpool_connector.runtime.instance_connection import Stage
from pdpool_connector.runtime.process_watch import GRACE_S

from tests.integration.small_side import Side, offer, until

TRIES = 20
PAGES = [5]


@pytest.fixture
def prefill() -> Iterator[Side]:
    with contextlib.closing(Side(PrefillConnector)) as made:
        yield made


@pytest.fixture
def decodes() -> Iterator[list[Side]]:
    # None asks how its attempts stand while a test lasts: one that was replaced would take its place back.
    timeouts = Timeouts(query_s=300.0)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Side(DecodeConnector, timeouts=timeouts))) for _ in range(2)]


def paired(prefill: Side) -> set[str]:
    return {peer.incarnation for peer in prefill.connector.stats().peers}


def hello(sender: str, like: Side, address: str) -> bytes:
    """The Hello of a process at `address` that has the memory of another."""
    return f.encode(
        f.Hello(
            version=f.VERSION_MAX,
            oldest_version=f.VERSION_MIN,
            sender=sender,
            address=address,
            memory=like.connector._remote_form,
        )
    )


def ask(prefill: Side, decode: Side, room: int, pages=PAGES):
    return offer(decode, prefill, room, pages)


def test_decode_beyond_the_limit_waits_its_turn(prefill, decodes, monkeypatch) -> None:
    monkeypatch.setattr(decodes_module, "MAX_PEERS", 1)
    first, second = decodes
    ask(prefill, first, 1)
    until(lambda: paired(prefill) == {first.connector.incarnation})
    got = ask(prefill, second, 2)
    until(lambda: any("has 1 peers, which is its limit" in link.failure for link in second.connector.stats().links))
    assert paired(prefill) == {first.connector.incarnation}
    first.connector.close()
    sent = prefill.connector.open(2, "r")
    sent.send(PAGES, start=0, last=True, aux_slot=0)
    until(lambda: got.status.ended)
    assert got.status.phase is Phase.DONE


def test_successor_at_same_address_ends_old_hand_offs(prefill, decodes) -> None:
    old, other = decodes
    waits, goes_on = prefill.connector.open(1, "r"), prefill.connector.open(2, "r")
    ask(prefill, old, 1)
    ask(prefill, other, 2)
    until(lambda: waits.status.phase is goes_on.status.phase is Phase.READY)
    sender = secrets.token_hex(16)
    with zmq.Context() as context, context.socket(zmq.DEALER) as successor:
        successor.connect(f"tcp://{prefill.connector.control_address}")
        successor.send(hello(sender, old, old.connector.control_address))
        until(lambda: paired(prefill) == {sender, other.connector.incarnation})
    until(lambda: waits.status.ended)
    assert waits.status.cause is Cause.PEER_LOST
    assert f"was replaced by process {sender[:8]}" in waits.status.message
    assert goes_on.status.phase is Phase.READY, "the process at another address is another's business"


def test_end_of_connection_is_noticed_during_another_hello(prefill, decodes, monkeypatch) -> None:
    """zmq announces it once: the look that a Hello of another takes at its own connection may be what reads it."""
    monkeypatch.setattr(decodes_module, "GRACE_S", 0.01)
    like = decodes[0]
    speaker = secrets.token_hex(16)
    with zmq.Context() as context, context.socket(zmq.DEALER) as speaks:
        speaks.connect(f"tcp://{prefill.connector.control_address}")
        speaks.send(hello(speaker, like, "speaks:1"))
        until(lambda: paired(prefill) == {speaker})
        for _ in range(TRIES):
            leaver = secrets.token_hex(16)
            with context.socket(zmq.DEALER) as leaves:
                leaves.linger = 0
                leaves.connect(f"tcp://{prefill.connector.control_address}")
                leaves.send(hello(leaver, like, "leaves:1"))
                until(lambda leaver=leaver: paired(prefill) == {speaker, leaver})
                speaks.send(hello(speaker, like, "speaks:1"))
            until(lambda: paired(prefill) == {speaker}, 10)


def test_write_of_failed_thread_is_held_until_fenced(prefill, decodes, monkeypatch) -> None:
    def fails(*_: object) -> bool:
        raise RuntimeError("a fault in the thread")

    decode = decodes[0]
    sent = prefill.connector.open(1, "r")
    ask(prefill, decode, 1)
    until(lambda: sent.status.phase is Phase.READY)
    worker = prefill.connector._decodes.get(decode.connector.incarnation).worker
    worker._at_once_pages = 0
    monkeypatch.setattr(worker, "_advance", fails)
    sent.send(PAGES, start=0, last=True, aux_slot=0)
    until(lambda: sent.status.ended)
    assert not sent.status.releasable, "nobody knows what became of the write"
    until(lambda: prefill.connector.stats().holds == 1)
    prefill.connector.fence(decode.connector.incarnation, ProcessExited(pid=1, seen_by="the test"))
    until(lambda: sent.status.releasable)
    assert prefill.connector._writes == {}


def test_decode_forgotten_by_prefill_pairs_again(prefill) -> None:
    with contextlib.closing(Side(DecodeConnector, connect_deadline_s=4.0)) as decode:
        waits = prefill.connector.open(1, "r")
        ended = ask(prefill, decode, 1)
        until(lambda: waits.status.phase is Phase.READY)
        (link,) = decode.connector._links.values()
        until(lambda: time.monotonic() > link._give_up)
        known = prefill.connector._decodes.get(decode.connector.incarnation)
        prefill.connector._reactor.post(lambda: prefill.connector._decodes.lose(known, "taken for lost"))
        until(lambda: waits.status.ended)
        sent = prefill.connector.open(2, "r")
        sent.send(PAGES, start=0, last=True, aux_slot=0)
        got = ask(prefill, decode, 2, [6])
        until(lambda: got.status.ended and ended.status.releasable)
        assert (got.status.phase, got.status.message) == (Phase.DONE, "")
        assert ended.status.cause is Cause.PEER_LOST


def by_two_addresses(prefill: Side, decode: Side) -> list:
    """A hand-off by each; both are paired by then."""
    port = prefill.connector.bootstrap_address.rpartition(":")[2]
    pairs = []
    for room, host in enumerate(("127.0.0.1", "127.1"), start=1):
        sent = prefill.connector.open(room, "r")
        got = offer(decode, f"{host}:{port}", room, [5 + room - 1])
        pairs.append((sent, got))
    until(lambda: all(sent.status.phase is Phase.READY for sent, _ in pairs))
    return pairs


def test_prefill_with_two_addresses_answers_at_both(prefill) -> None:
    with contextlib.closing(Side(DecodeConnector)) as decode:
        pairs = by_two_addresses(prefill, decode)
        for sent, got in pairs:
            sent.send(PAGES, start=0, last=True, aux_slot=0)
            until(lambda got=got: got.status.phase is Phase.DONE)
        links = list(decode.connector._links.values())
        until(lambda: all(link.stage is Stage.LINKED for link in links))
        assert [link.rounds for link in links] == [1, 1]


def test_end_of_one_of_two_connections_ends_nothing(prefill) -> None:
    with contextlib.closing(Side(DecodeConnector)) as decode:
        pairs = by_two_addresses(prefill, decode)
        (peer, link), *_ = decode.connector._by_peer.items()
        decode.connector._reactor.post(lambda: link._on_grace_over(peer, "taken for lost"))
        until(lambda: decode.connector._by_peer[peer] is not link)
        ended = time.monotonic()
        until(lambda: time.monotonic() > ended + 2 * GRACE_S)
        for sent, got in pairs:
            sent.send(PAGES, start=0, last=True, aux_slot=0)
            until(lambda got=got: got.status.ended)
            assert (got.status.phase, got.status.message) == (Phase.DONE, "")


def test_decode_that_cannot_be_watched_leaves_no_thread(prefill, decodes, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no watch left")

    monkeypatch.setattr(prefill.connector._exits, "watch", refuse)
    sender = secrets.token_hex(16)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://{prefill.connector.control_address}")
        stranger.send(hello(sender, decodes[0], decodes[0].connector.control_address))
        until(lambda: prefill.connector.stats().faults)
    assert not [thread for thread in threading.enumerate() if sender[:8] in thread.name]

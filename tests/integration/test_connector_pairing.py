"""Which decodes a live prefill pairs with: how many at a time, and which process of those at one address."""

import contextlib
import errno
import secrets
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from pdpool_connector import Cause, DecodeConnector, Phase, PrefillConnector
from pdpool_connector.backends import open_backend
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.fence import ProcessExited
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime import peer_table

from tests.integration.small_side import Side, offer
from tests.waiting import until

TRIES = 20
PAGES = [5]


@pytest.fixture
def prefill() -> Iterator[Side]:
    with contextlib.closing(Side(PrefillConnector)) as made:
        yield made


@pytest.fixture
def decodes() -> Iterator[list[Side]]:
    # A decode that was replaced must not ask for its attempts while a test lasts: it would take its place back.
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
    monkeypatch.setattr(peer_table, "MAX_PEERS", 1)
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
        until(lambda: waits.status.ended)
    assert waits.status.cause is Cause.PEER_LOST
    assert f"was replaced by process {sender[:8]}" in waits.status.message
    until(lambda: other.connector.incarnation in paired(prefill))
    assert goes_on.status.phase is Phase.READY, "a process at another address was taken for it"


def test_end_of_connection_is_noticed_during_another_hello(decodes) -> None:
    """zmq reports an end once, and what handles the Hello of another decode may be what reads it."""
    like, speaker = decodes[0], secrets.token_hex(16)
    with (
        contextlib.closing(Side(PrefillConnector, timeouts=Timeouts(lost_grace_s=0.01))) as prefill,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as speaks,
    ):
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


class FailingPoll:
    """A transfer backend that raises what no backend may raise."""

    def __init__(self) -> None:
        self._backend = open_backend("local", secrets.token_hex(16), target=False, host="127.0.0.1")

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def poll(self, _: object) -> None:
        raise RuntimeError("a fault in the thread")


def test_write_of_failed_thread_is_held_until_fenced(decodes) -> None:
    decode = decodes[0]
    with contextlib.closing(Side(PrefillConnector, backend=FailingPoll())) as prefill:
        sent = prefill.connector.open(1, "r")
        ask(prefill, decode, 1)
        sent.send(PAGES, start=0, last=True, aux_slot=0)
        until(lambda: sent.status.ended)
        assert not sent.status.releasable, "the write may still be under way"
        until(lambda: prefill.connector.stats().holds == 1)
        prefill.connector.fence(decode.connector.incarnation, ProcessExited(pid=1, seen_by="the test"))
        sent.wait_released(30)


def test_decode_forgotten_by_prefill_pairs_again(prefill) -> None:
    with contextlib.closing(Side(DecodeConnector, timeouts=Timeouts(connect_s=0.5))) as decode:
        waits = prefill.connector.open(1, "r")
        ended = ask(prefill, decode, 1)
        until(lambda: waits.status.phase is Phase.READY)
        time.sleep(1.0)  # they are paired for longer than decode tries to connect
        peers = prefill.connector._peers
        known = peers.get(decode.connector.incarnation)
        prefill.connector._reactor.post(lambda: peers.lose(known, "taken for lost"))
        until(lambda: waits.status.ended)
        sent = prefill.connector.open(2, "r")
        sent.send(PAGES, start=0, last=True, aux_slot=0)
        got = ask(prefill, decode, 2, [6])
        assert (got.wait(30).phase, got.status.message) == (Phase.DONE, "")
        assert ended.wait_released(30).cause is Cause.PEER_LOST


def test_prefill_with_two_addresses_answers_at_both(prefill) -> None:
    with contextlib.closing(Side(DecodeConnector)) as decode:
        port = prefill.connector.bootstrap_address.rpartition(":")[2]
        pairs = []
        for room, host in enumerate(("127.0.0.1", "127.1"), start=1):
            pairs.append((prefill.connector.open(room, "r"), offer(decode, f"{host}:{port}", room, [5 + room - 1])))
        until(lambda: all(sent.status.phase is Phase.READY for sent, _ in pairs))
        for sent, got in pairs:
            sent.send(PAGES, start=0, last=True, aux_slot=0)
            assert got.wait(30).phase is Phase.DONE
        until(lambda: [link.state for link in decode.connector.stats().links] == ["linked", "linked"])


def test_decode_that_cannot_be_watched_leaves_no_thread(prefill, decodes, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no watch left")

    monkeypatch.setattr(prefill.connector._process_watch, "watch", refuse)
    sender = secrets.token_hex(16)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://{prefill.connector.control_address}")
        stranger.send(hello(sender, decodes[0], decodes[0].connector.control_address))
        until(lambda: prefill.connector.stats().faults)
    assert not [thread for thread in threading.enumerate() if sender[:8] in thread.name]

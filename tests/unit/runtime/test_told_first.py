"""A hand-off that fails: the peer has been told before the engine can see it."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from pdpool_connector import Cause, ConnectorConfig, DecodeConnector, HostArena, Phase, PrefillConnector
from pdpool_connector.backends.local import LocalBackend
from pdpool_connector.transport.control import ControlLink, ControlServer

from tests.unit.runtime.small_memory import SMALL_BYTES, lay_out

PAGES = np.arange(2, dtype=np.int32)
TELL = ("Drained", "Failed", "Abort")


@pytest.fixture
def sides(direction) -> Iterator[tuple[PrefillConnector, DecodeConnector]]:
    config = ConnectorConfig("127.0.0.1", backend="local", direction=direction)
    with HostArena(SMALL_BYTES) as one, HostArena(SMALL_BYTES) as other:
        prefill = PrefillConnector(config, lay_out(one), lambda: None)
        decode = DecodeConnector(config, lay_out(other), lambda: None)
        prefill.start()
        decode.start()
        yield prefill, decode
        prefill.close()
        decode.close()


def note_what_is_sent(monkeypatch, halves, seen) -> None:
    """Each frame that has been handed to zmq, and what the status of its sender's half said then."""
    send, flush = ControlServer._send, ControlLink._flush

    def prefill_sends(server, route, frames) -> None:
        send(server, route, frames)
        seen.extend((type(frame).__name__, halves[0].status.phase) for frame in frames)

    def decode_sends(link) -> None:
        frames = list(link._outbox)
        flush(link)
        seen.extend((type(frame).__name__, halves[1].status.phase) for frame in frames)

    monkeypatch.setattr(ControlServer, "_send", prefill_sends)
    monkeypatch.setattr(ControlLink, "_flush", decode_sends)


@pytest.mark.parametrize(("direction", "failing"), [("write", 0), ("read", 1)])
def test_the_peer_is_told_of_an_engine_call_that_raised_before_the_caller_sees_it(sides, failing, monkeypatch) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("the link is down")

    prefill, decode = sides
    monkeypatch.setattr(LocalBackend, "submit", submit)
    halves = [prefill.open(7, "r"), decode.open(prefill.bootstrap_address, 7, "r", pages=PAGES, aux_slot=0)]
    seen: list[tuple[str, Phase]] = []
    note_what_is_sent(monkeypatch, halves, seen)
    halves[0].send(PAGES, start=0, last=True, aux_slot=0)
    deadline = time.monotonic() + 30
    while not all(half.status.ended for half in halves):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert halves[failing].status.cause is Cause.TRANSFER_FAILED
    told, status = next(entry for entry in seen if entry[0] in TELL)
    assert status is not Phase.FAILED, f"the caller could see the failure before {told} had gone out"

"""Which connection a message came by, and which have ended, by numbers that are never used again."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq
from pdpool_connector.protocol import frames as f
from pdpool_connector.transport import control
from pdpool_connector.transport.control import Arrival, ControlServer
from pdpool_connector.transport.drops import Drops

DESCRIPTOR = 7


@pytest.fixture
def server() -> Iterator[ControlServer]:
    turns = SimpleNamespace(later=lambda _: None, recheck=lambda _: None)
    with zmq.Context() as context:
        made = ControlServer(context, "127.0.0.1", 0, Drops(), turns)
        yield made
        made.close()


def reported(monkeypatch: pytest.MonkeyPatch, *kinds: int) -> None:
    """What zmq tells of connections at the next look, all by the same descriptor."""
    events = [{"event": kind, "value": DESCRIPTOR} for kind in kinds]
    monkeypatch.setattr(control, "_events", lambda _: [events.pop(0) for _ in list(events)])


def arrival() -> Arrival:
    message = SimpleNamespace(get=lambda _: str(DESCRIPTOR))
    return Arrival(f.Goodbye(version=1, sender="0" * 32, reason=""), b"route", message)


def test_the_end_of_a_connection_is_not_that_of_the_next_which_got_its_descriptor(server, monkeypatch) -> None:
    reported(monkeypatch, zmq.EVENT_ACCEPTED)
    first = server.connection(arrival())
    reported(monkeypatch, zmq.EVENT_DISCONNECTED, zmq.EVENT_ACCEPTED)
    second = server.connection(arrival())
    assert -1 not in (first, second)
    assert first != second
    assert server.ended() == [first]
    reported(monkeypatch, zmq.EVENT_DISCONNECTED)
    assert server.ended() == [second]


def test_a_message_of_a_connection_that_has_ended_since_is_of_none(server, monkeypatch) -> None:
    reported(monkeypatch, zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED)
    assert server.connection(arrival()) == -1

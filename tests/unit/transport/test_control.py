"""Which connection a message came by, which have ended, and that no frame spoils another."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from pdpool_connector.protocol import frames as f
from pdpool_connector.transport import control
from pdpool_connector.transport.address import Address
from pdpool_connector.transport.control import HARD_LIMIT_BYTES, Arrival, ControlLink, ControlServer
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
    """What zmq reports of connections at the next look, all by the same descriptor."""
    events = [{"event": kind, "value": DESCRIPTOR} for kind in kinds]
    monkeypatch.setattr(control, "_events", lambda _: [events.pop(0) for _ in list(events)])


def arrival() -> Arrival:
    message = SimpleNamespace(get=lambda _: str(DESCRIPTOR))
    return Arrival(f.Goodbye(version=1, sender="0" * 32, reason=""), b"route", message)


def test_end_of_connection_spares_the_next(server, monkeypatch) -> None:
    reported(monkeypatch, zmq.EVENT_ACCEPTED)
    first = server.connection(arrival())
    reported(monkeypatch, zmq.EVENT_DISCONNECTED, zmq.EVENT_ACCEPTED)
    second = server.connection(arrival())
    assert -1 not in (first, second)
    assert first != second
    assert server.ended() == [first]
    reported(monkeypatch, zmq.EVENT_DISCONNECTED)
    assert server.ended() == [second]


def test_message_of_ended_connection_has_none(server, monkeypatch) -> None:
    reported(monkeypatch, zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED)
    assert server.connection(arrival()) == -1


def goodbye(reason: str) -> f.Goodbye:
    return f.Goodbye(version=f.VERSION_MAX, sender="0" * 32, reason=reason)


def query(number: object) -> f.Query:
    """A frame that travels in batches, if it can be encoded."""
    return f.Query(version=f.VERSION_MAX, sender="0" * 32, attempt=f.AttemptId("0" * 32, number), room=1)


@pytest.fixture
def links(server: ControlServer) -> Iterator[list[ControlLink]]:
    """Two decodes, each known to the server by its first frame."""
    turns = SimpleNamespace(later=lambda _: None, recheck=lambda _: None)
    with zmq.Context() as context:
        made = [ControlLink(context, Address("127.0.0.1", server.port), Drops(), turns) for _ in range(2)]
        yield made
        for link in made:
            link.close()


def heard(end: ControlServer | ControlLink, count: int) -> list:
    """The next frames that arrive at one end."""
    frames: list = []
    while len(frames) < count:
        assert end.socket.poll(60_000), f"only {frames} arrived"
        frames += end.receive()
    return frames


def test_malformed_message_is_dropped(server, links) -> None:
    links[0].socket.send(b"no frame")
    links[0].send(query(7))
    links[0]._flush()
    assert [one.frame.attempt.number for one in heard(server, 1)] == [7]
    assert server._drops.counts() == {"malformed": 1}


@pytest.mark.parametrize("poison", [goodbye("\ud800"), query(2**64), query(np.int64(1))])
def test_unencodable_frame_spoils_no_other(server, links, poison) -> None:
    for number, link in enumerate(links):
        for frame in (query(number), query(10 + number), poison, query(20 + number)):
            link.send(frame)
        link._flush()
    arrived: dict[bytes, list[int]] = {}
    for one in heard(server, 6):
        arrived.setdefault(one.route, []).append(one.frame.attempt.number)
    assert sorted(arrived.values()) == [[0, 10, 20], [1, 11, 21]]
    for route, (number, *_) in arrived.items():
        for frame in (query(number), poison, query(10 + number)):
            server.send(route, frame)
    server.flush()
    for number, link in enumerate(links):
        assert [frame.attempt.number for frame in heard(link, 2)] == [number, 10 + number]
        assert link._drops.counts() == {"unencodable": 1}
    assert server._drops.counts() == {"unencodable": 2}


@pytest.mark.parametrize(("sockets", "host"), [(1, "127.0.0.1"), (2, "127.0.0.1"), (9, "no address")])
def test_failed_connection_leaves_no_socket(monkeypatch, sockets, host) -> None:
    turns = SimpleNamespace(later=lambda _: None, recheck=lambda _: None)
    made: list[zmq.Socket] = []
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, sockets)
        create = context.socket
        monkeypatch.setattr(context, "socket", lambda kind: made.append(create(kind)) or made[-1])
        with pytest.raises(zmq.ZMQError):
            ControlLink(context, Address(host, 1), Drops(), turns)
        still_open = [one for one in made if not one.closed]
        for one in still_open:
            one.close(0)  # or the context's end would wait for it
    assert made
    assert not still_open


@pytest.mark.parametrize(("excess", "cut"), [(0, False), (1, True)])
def test_oversized_message_ends_its_connection(server, excess, cut) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        told = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(f"tcp://127.0.0.1:{server.port}")
        stranger.send(b"\0" * (HARD_LIMIT_BYTES + excess))
        assert (told if cut else server.socket).poll(60_000)
        assert list(server.receive()) == []
        assert server._drops.counts() == ({} if cut else {"oversized": 1})
        stranger.disable_monitor()
        told.close(0)

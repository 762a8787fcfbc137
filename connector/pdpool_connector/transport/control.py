"""The control channel over zmq: prefill listens (ROUTER), decode connects (DEALER). Owner thread only; nothing blocks.

Every socket is bounded (high-water marks, frame size). Every message counts as hostile until `frames.decode` has
checked it. zmq never rebuilds a connection by itself. Its end is reported: it is evidence about the peer.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from pdpool_connector.protocol.frames import (
    MAX_FRAME_BYTES,
    Batch,
    Frame,
    MalformedFrameError,
    SingleFrame,
    batches,
    decode,
    encode,
)
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.transport.address import Address
from pdpool_connector.transport.curve import CurveKey, connect_with, listen_with
from pdpool_connector.transport.drops import Drops

HIGH_WATER = 20_000
"""Frames queued for one peer before more are dropped; every frame that matters is repeated."""
BATCH = 256
"""Messages taken from one socket in one turn, so that a flood cannot starve timers and completions."""
OUTBOX = 64
"""Frames that wait for the end of a turn before they are sent; more are sent at once, so that long turns delay none."""
STRANGERS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Connections that were refused: another key, no key, or no zmq at all."""
HARD_LIMIT_BYTES = 2 * MAX_FRAME_BYTES
"""Above this zmq cuts the connection before it allocates; between the two limits a frame is counted and dropped."""
KEEPALIVE_PROBES = 3
"""Unanswered probes that end a connection: kernels answer them for a frozen process, so only a dead host fails them."""


_NOW: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
"""Plain numbers: the operations of pyzmq's enumerations cost more than its calls."""


def readable(socket: zmq.Socket[Any]) -> bool:
    """Whether there is a message to receive. Cheaper than the exception that receiving none is."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


class Turns(Protocol):
    """What the loop that owns a socket does for it."""

    def later(self, call: Callable[[], None]) -> None:
        """Call at the end of the present turn."""

    def recheck(self, socket: zmq.Socket[Any]) -> None:
        """Look whether there is something to read: sending may take the news of it from the socket's descriptor."""


class Arrival(NamedTuple):
    """A checked frame, the ROUTER's name for the connection, and the message that brought it."""

    frame: SingleFrame
    route: bytes
    message: zmq.Frame


class ControlServer:
    """Listens on one port. `route` in `send` is what an `Arrival` carried."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        drops: Drops,
        turns: Turns,
        key: CurveKey | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """With a key, only clients that speak CURVE get in. Raises OSError when the port cannot be bound."""
        self._drops, self._turns = drops, turns
        self._serials = count(1)
        self._open: dict[int, int] = {}
        """Number of each connection, by its descriptor, which the kernel soon gives to another."""
        self._ended: list[int] = []
        self._outbox: dict[bytes, list[Frame]] = {}
        self.socket = context.socket(zmq.ROUTER)
        _tune(self.socket, timeouts or Timeouts())
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if key is not None:
            listen_with(self.socket, key)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | STRANGERS
        )
        try:
            self.socket.bind(
                f"tcp://{Address(host, port)}" if port else f"tcp://{Address(host, 0)}".replace(":0", ":*")
            )
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"control port {Address(host, port)} cannot be bound: {error}") from error
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def receive(self) -> Iterator[Arrival]:
        """Yield what has arrived, at most a batch of messages. Connections that ended meanwhile are in `ended()`."""
        for _ in range(BATCH):
            if not readable(self.socket):
                return
            route, message, *more = self.socket.recv_multipart(_NOW, copy=False)
            if more:
                self._drops.note("malformed", f"message of {len(more) + 1} parts")
                continue
            name = route.bytes
            for frame in _checked(message, self._drops):
                yield Arrival(frame, name, message)

    def connection(self, arrival: Arrival) -> int:
        """Number of the connection that a message came by; -1 when it has ended since, or zmq does not know."""
        try:
            descriptor = int(arrival.message.get(zmq.SRCFD))
        except zmq.ZMQError:
            self._drops.note("malformed", "message by a ZMTP 1.0 peer")
            return -1
        # What the monitor knows by now happened before the frame is judged, or makes it moot.
        self._watch()
        return self._open.get(descriptor, -1)

    def send(self, route: bytes, frame: Frame) -> None:
        """Put a frame into the outbox, which is sent at the end of the turn."""
        if not self._outbox:
            self._turns.later(self.flush)
        frames = self._outbox.setdefault(route, [])
        frames.append(frame)
        if len(frames) >= OUTBOX:
            self._send(route, self._outbox.pop(route))

    def flush(self) -> None:
        """Queue what is in the outbox; what cannot be queued is counted and dropped."""
        while self._outbox:
            self._send(*self._outbox.popitem())

    def _send(self, route: bytes, frames: Sequence[Frame]) -> None:
        for message in _encoded(frames, self._drops):
            try:
                self.socket.send(route, _MORE)
                self.socket.send(message, _NOW)
            except zmq.ZMQError as error:
                self._drops.note("unsent", str(error))
        self._turns.recheck(self.socket)

    def ended(self) -> list[int]:
        """Numbers of the connections that have ended since the last call."""
        self._watch()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Close; frames already queued may still go out while the context lingers."""
        self.flush()
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()

    def _watch(self) -> None:
        for event in _events(self.monitor):
            if event["event"] == zmq.EVENT_DISCONNECTED:
                if (ended := self._open.pop(event["value"], None)) is not None:
                    self._ended.append(ended)
            elif event["event"] == zmq.EVENT_ACCEPTED:
                self._open[event["value"]] = next(self._serials)
            elif event["event"] & STRANGERS:
                self._drops.note("unauthenticated", f"handshake failed with code {event['value']}")


class ControlLink:
    """One connection to one control port. It ends once, and then is to be closed and replaced."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        control: Address,
        drops: Drops,
        turns: Turns,
        key: CurveKey | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        """Raises zmq.ZMQError when no socket is left to be had."""
        self._drops, self._turns = drops, turns
        self._outbox: list[Frame] = []
        with contextlib.ExitStack() as undo:
            self.socket = undo.enter_context(context.socket(zmq.DEALER))
            _tune(self.socket, timeouts or Timeouts())
            self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
            if key is not None:
                connect_with(self.socket, key)
            self.monitor = undo.enter_context(self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED))
            self.socket.connect(f"tcp://{control}")
            undo.pop_all()

    def receive(self) -> Iterator[SingleFrame]:
        """Yield what has arrived, at most a batch of messages."""
        for _ in range(BATCH):
            if not readable(self.socket):
                return
            parts = self.socket.recv_multipart(_NOW, copy=False)
            if len(parts) != 1:
                self._drops.note("malformed", f"message of {len(parts)} parts")
            else:
                yield from _checked(parts[0], self._drops)

    def send(self, frame: Frame) -> None:
        """Put a frame into the outbox, which is sent at the end of the turn."""
        if not self._outbox:
            self._turns.later(self._flush)
        self._outbox.append(frame)
        if len(self._outbox) >= OUTBOX:
            self._flush()

    def _flush(self) -> None:
        """Queue what is in the outbox; what cannot be queued is counted and dropped."""
        frames, self._outbox = self._outbox, []
        for message in _encoded(frames, self._drops):
            try:
                self.socket.send(message, _NOW)
            except zmq.ZMQError as error:
                self._drops.note("unsent", str(error))
        if frames:
            self._turns.recheck(self.socket)

    def ended(self) -> bool:
        """True, once, after the connection was refused, reset or closed by the other side.

        What had arrived before can still be received, so ask only when `receive` has yielded less than a batch.
        """
        return bool(list(_events(self.monitor)))

    def close(self) -> None:
        """Close; frames already queued may still go out while the context lingers."""
        self._flush()
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()


def _tune(socket: zmq.Socket[bytes], timeouts: Timeouts) -> None:
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, timeouts.keepalive_idle_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, timeouts.keepalive_interval_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    # The kernel sends no probes while data is unacknowledged. By default, it repeats that data for 15 minutes.
    silent_s = timeouts.keepalive_idle_s + KEEPALIVE_PROBES * timeouts.keepalive_interval_s
    socket.setsockopt(zmq.TCP_MAXRT, silent_s * 1000)


def _encoded(frames: Sequence[Frame], drops: Drops) -> list[bytes]:
    """The messages that carry `frames`, made before any is sent: a frame that cannot be made spoils no other."""
    messages = []
    for frame in batches(frames):
        try:
            messages.append(encode(frame))
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(frame, Batch):
                messages += [message for one in frame.frames for message in _encoded([one], drops)]
            else:
                drops.note("unencodable", f"{type(frame).__name__}: {error}")
    return messages


def _events(monitor: zmq.Socket[bytes]) -> Iterator[Mapping[str, Any]]:
    """What has been reported of connections since the last call."""
    while readable(monitor):
        yield parse_monitor_message(monitor.recv_multipart(_NOW))


def _checked(message: zmq.Frame, drops: Drops) -> Sequence[SingleFrame]:
    try:
        frame = decode(message.bytes)
    except MalformedFrameError as error:
        drops.note(error.reason, str(error))
        return ()
    return frame.frames if isinstance(frame, Batch) else (frame,)

"""The control channel over zmq: prefill listens (ROUTER), decode connects (DEALER). Owner thread only; nothing blocks.

Every socket is bounded (high-water marks, frame size), and every message is taken for hostile until `frames.decode` has
checked it. A connection is never rebuilt by zmq behind our back: its end is evidence about the peer, and is reported.
"""

from collections.abc import Iterator
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from pdpool_connector.protocol.frames import MAX_FRAME_BYTES, AnyFrame, Frame, MalformedFrameError, decode, encode
from pdpool_connector.transport.address import Address
from pdpool_connector.transport.drops import Drops

HIGH_WATER = 20_000
"""Frames queued for one peer before more are dropped; every frame that matters is repeated."""
BATCH = 256
"""Frames taken from one socket in one turn, so that a flood cannot starve timers and completions."""
HARD_LIMIT_BYTES = 2 * MAX_FRAME_BYTES
"""Above this zmq cuts the connection before it allocates; between the two limits a frame is counted and dropped."""
KEEPALIVE_S = (10, 5, 3)
"""Idle, interval, count of TCP keep-alive: kernels answer it for a frozen process, so only a dead host fails it."""


class Arrival(NamedTuple):
    """A checked frame, the ROUTER's name for the connection, and the descriptor of the connection."""

    frame: AnyFrame
    route: bytes
    connection: int


class ControlServer:
    """Listens on one port. `route` in `send` is what an `Arrival` carried."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, drops: Drops) -> None:
        """Raises OSError when the port cannot be bound."""
        self._drops = drops
        self.socket = context.socket(zmq.ROUTER)
        _tune(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        )
        try:
            self.socket.bind(
                f"tcp://{Address(host, port)}" if port else f"tcp://{Address(host, 0)}".replace(":0", ":*")
            )
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"control port {Address(host, port)} cannot be bound: {error}") from error
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._open: set[int] = set()
        self._ended: list[int] = []

    def receive(self) -> Iterator[Arrival]:
        """Yield what has arrived, at most a batch of it. Connections that ended meanwhile are in `ended()`."""
        for _ in range(BATCH):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(parts) != 2:
                self._drops.note("malformed", f"message of {len(parts) - 1} parts")
                continue
            # Read before the frame is judged: what the monitor knows by now happened before, or makes it moot.
            self._watch()
            connection = self._connection(parts[1])
            if connection >= 0 and (frame := _checked(parts[1], self._drops)) is not None:
                yield Arrival(frame, parts[0].bytes, connection)

    def _connection(self, message: zmq.Frame) -> int:
        """Descriptor of the connection that a message came by; -1 for peers so old that zmq keeps none."""
        try:
            return int(message.get(zmq.SRCFD))
        except zmq.ZMQError:
            self._drops.note("malformed", "message by a ZMTP 1.0 peer")
            return -1

    def connected(self, connection: int) -> bool:
        """False when a connection has ended since its frame was sent."""
        return connection in self._open

    def send(self, route: bytes, frame: Frame) -> None:
        """Queue a frame; one that cannot be queued is counted and dropped."""
        try:
            self.socket.send_multipart([route, encode(frame)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._drops.note("unsent", f"{type(frame).__name__}: {error}")

    def ended(self) -> list[int]:
        """Connections that have ended since the last call."""
        self._watch()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Close; frames already queued may still go out while the context lingers."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()

    def _watch(self) -> None:
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._open.discard(event["value"])
                self._ended.append(event["value"])
            elif event["event"] == zmq.EVENT_ACCEPTED:
                self._open.add(event["value"])


class ControlLink:
    """One connection to one control port. It ends once, and then is to be closed and replaced."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], control: Address, drops: Drops) -> None:
        self._drops = drops
        self.socket = context.socket(zmq.DEALER)
        _tune(self.socket)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self.socket.connect(f"tcp://{control}")

    def receive(self) -> Iterator[AnyFrame]:
        """Yield what has arrived, at most a batch of it."""
        for _ in range(BATCH):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(parts) != 1:
                self._drops.note("malformed", f"message of {len(parts)} parts")
            elif (frame := _checked(parts[0], self._drops)) is not None:
                yield frame

    def send(self, frame: Frame) -> None:
        """Queue a frame; one that cannot be queued is counted and dropped."""
        try:
            self.socket.send(encode(frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._drops.note("unsent", f"{type(frame).__name__}: {error}")

    def ended(self) -> bool:
        """True, once, after the connection was refused, reset or closed by the other side.

        What had arrived before can still be received, so ask only when `receive` has yielded less than a batch.
        """
        over = False
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            over = True
        return over

    def close(self) -> None:
        """Close; frames already queued may still go out while the context lingers."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()


def _tune(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    for option, value in zip(
        (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL, zmq.TCP_KEEPALIVE_CNT), KEEPALIVE_S, strict=True
    ):
        socket.setsockopt(option, value)


def _checked(message: zmq.Frame, drops: Drops) -> AnyFrame | None:
    try:
        return decode(message.bytes)
    except MalformedFrameError as error:
        drops.note(error.reason, str(error))
        return None

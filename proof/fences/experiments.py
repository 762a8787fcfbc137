"""One experiment for each event: what is done, and the moment from which late bytes are counted."""

import signal
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from pdpool_connector.transport.sockets import other_ends

from proof.fences.peers import Pair, until

WATCH_S: Final = 0.5
"""Late bytes were seen within milliseconds, or as long as a process writes."""


class Event(NamedTuple):
    """Name, and what is done; it returns the bytes that landed after the claim."""

    name: str
    run: Callable[[Pair], int]
    planes: tuple[str, ...] = ("local/memory", "nixl/memory", "nixl/tcp", "mooncake/tcp")


def _watched(pair: Pair) -> int:
    pair.blank()
    time.sleep(WATCH_S)  # the measured interval
    return pair.late()


def _exit(pair: Pair) -> int:
    pair.writer.kill()
    return _watched(pair)


def _exit_while_target_is_busy(pair: Pair) -> int:
    """The target's threads get no CPU until the exit was seen: what lies in its sockets comes after the claim."""
    pair.target.signal(signal.SIGSTOP)
    pair.writer.kill()
    pair.blank()
    pair.target.signal(signal.SIGCONT)
    time.sleep(WATCH_S)  # the measured interval
    return pair.late()


def _exit_and_connections_ended(pair: Pair) -> int:
    pair.target.signal(signal.SIGSTOP)
    pair.writer.kill()
    pair.target.signal(signal.SIGCONT)
    until(lambda: all(other_ends(pair.target.pid)), "the end of the connections of a dead process")
    return _watched(pair)


def _deregistered(pair: Pair) -> int:
    pair.target.call("deregister")
    return _watched(pair)


def _closed(pair: Pair) -> int:
    pair.target.call("close")
    return _watched(pair)


def _stopped(pair: Pair) -> int:
    pair.writer.signal(signal.SIGSTOP)
    pair.blank()
    time.sleep(WATCH_S)  # silence, as a peer shows that is frozen or cut off
    pair.writer.signal(signal.SIGCONT)
    time.sleep(WATCH_S)  # the measured interval
    return pair.late()


NETWORKED: Final = ("nixl/memory", "nixl/tcp", "mooncake/tcp")
EVENTS: Final = (
    Event("writer exited (kill -9)", _exit),
    Event("writer exited, target's threads delayed", _exit_while_target_is_busy),
    Event("writer exited, its connections ended here", _exit_and_connections_ended),
    Event("target deregistered its memory", _deregistered, NETWORKED),
    Event("target closed its backend", _closed),
    Event("writer stopped, silent, resumed", _stopped),
)

"""Decode's link to one prefill instance: from its bootstrap address to the ranks that serve this decode rank.

A link asks the bootstrap registry for the ranks, finds out which of them it has to do with, and connects to each; it is
linked when all of these are paired. When one connection ends, it asks again at once: the same process answering means
that nothing was lost; another one, or none within the grace, is evidence that the old one is gone, and says nothing of
the other ranks, whose connections stay. Owner thread only.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

import zmq

from pdpool_connector.layout.memory import LayoutError
from pdpool_connector.layout.pairing import Writer
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.versions import VersionMismatchError, negotiate
from pdpool_connector.runtime.process_watch import GRACE_S
from pdpool_connector.runtime.rank_connection import RankConnection
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.runtime.stats import LinkStats
from pdpool_connector.transport.bootstrap import BootstrapError, RankInfo

log = logging.getLogger(__name__)

REFUSED_S = 5.0
"""An address at which nobody has listened for so long, at each of some ten tries, has no process behind it. One that is
started again refuses for a moment, too, but what it had is lost with it."""
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
OWED_S = 10.0
"""Pause between attempts to hear again of a process whose silence holds pages back; there is no end to these."""


class Found(NamedTuple):
    """A prefill rank that serves us, and as what."""

    info: RankInfo
    writer: Writer


class ConnectionOwner(Protocol):
    """What a link asks of its connector, and tells it."""

    def find(self, prefill: str) -> "Future[Sequence[Found]]":
        """Ask the registry; fails with BootstrapError, or with LayoutError when the instances do not fit."""

    def connect(self, link: "InstanceConnection", found: Found, name: str) -> RankConnection:
        """Connect to a rank and say hello. Raises OSError or zmq.ZMQError when nothing is left to do it with."""

    def link_paired(self, link: "InstanceConnection", peer: str, version: int) -> None:
        """One of its ranks is paired."""

    def link_whole(self, link: "InstanceConnection", writers: Sequence[Found]) -> None:
        """All of its ranks are paired."""

    def link_broken(self, link: "InstanceConnection") -> None:
        """The connection to a rank that was paired ended; the same process may answer again, or another."""

    def link_lost(self, link: "InstanceConnection", peer: str, message: str) -> None:
        """There is evidence that a rank that was paired is gone."""

    def link_failed(self, link: "InstanceConnection", cause: Cause, message: str) -> None:
        """It could not be made whole; it is closed, or rests, or, while it is owed something, tries on slowly."""

    def link_frame(self, frame: f.AttemptFrame) -> None:
        """A paired rank said something about an attempt."""

    def link_wanted(self, link: "InstanceConnection") -> bool:
        """True while attempts wait for this address."""

    def link_owed(self, link: "InstanceConnection") -> bool:
        """True while pages are held that only a word of a process there can free."""

    def link_fenced(self, peer: str) -> bool:
        """True for a process with which nothing is begun again."""


class Stage(Enum):
    """How far a link has come."""

    ASKING = "asking"
    """The registry is asked."""
    JOINING = "joining"
    """The ranks are known, and not all of them are paired."""
    LINKED = "linked"
    PAUSING = "pausing"
    """Something failed, and is tried again soon."""
    RESTING = "resting"
    """Something failed, and nobody needs the ranks that are missing."""
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class RankSlot:
    """One rank that serves us. `known`: it was paired, and there is no evidence yet that it is gone."""

    found: Found
    line: RankConnection | None = None
    known: bool = False

    @property
    def paired(self) -> bool:
        """Whether it can be spoken to."""
        return self.line is not None and self.line.paired


class InstanceConnection:
    """See the module's docstring."""

    def __init__(self, prefill: str, owner: ConnectionOwner, reactor: Reactor, *, connect_s: float) -> None:
        self.prefill = prefill
        self.stage = Stage.PAUSING
        self._owner, self._reactor, self._connect_s = owner, reactor, connect_s
        self._seats: dict[str, RankSlot] = {}
        self.rounds = 0
        """How often its ranks were connected to: each time with the next of the keys."""
        self._failure = ""
        self._failing_since = 0.0
        self._refused_since: float | None = None
        self._backoff = BACKOFF_FIRST_S
        self._slow = False
        self._give_up = time.monotonic() + connect_s
        self._ask()

    def hurry(self) -> None:
        """Somebody waits for it: say what is there, or go on at once where it rests or sits out a long pause."""
        if self.stage is Stage.LINKED:
            for peer, seat in self._seats.items():
                assert seat.line is not None
                self._owner.link_paired(self, peer, seat.line.version)
            self._owner.link_whole(self, [seat.found for seat in self._seats.values()])
        elif self.stage is Stage.RESTING or (self._slow and self.stage is Stage.PAUSING):
            self._slow = False
            self._backoff = BACKOFF_FIRST_S
            self._give_up = time.monotonic() + self._connect_s
            self._refused_since = None
            self._ask()

    def part_with(self, peer: str, why: str) -> None:
        """A process has exited or was fenced (`why`): if it has a seat here, it loses it."""
        if (seat := self._seats.get(peer)) is not None:
            message = f"{self._name(seat.found)} {why}"
            self._lose(peer, message)
            self._again(message)

    def line(self, peer: str) -> RankConnection | None:
        """The connection to a paired rank; None when there is none."""
        seat = self._seats.get(peer)
        return seat.line if seat is not None and seat.paired else None

    def stats(self, now: float) -> LinkStats:
        """For `ConnectorStats`."""
        missing = tuple(sorted(seat.found.info.rank for seat in self._seats.values() if not seat.paired))
        failing_s = now - self._failing_since if self._failure else None
        return LinkStats(self.prefill, self.stage.value, missing, self._failure, failing_s)

    def close(self) -> None:
        """Close for good."""
        self.stage = Stage.CLOSED
        self._reactor.cancel(("pause", self))
        for seat in self._seats.values():
            self._reactor.cancel(("grace", seat))
            if seat.line is not None:
                seat.line.close()
        self._seats.clear()

    # --- The registry's answer ---

    def _ask(self) -> None:
        self._reactor.cancel(("pause", self))
        self.stage = Stage.ASKING
        self._owner.find(self.prefill).add_done_callback(
            lambda done: self._reactor.post(partial(self._on_answer, done))
        )

    def _on_answer(self, answer: "Future[Sequence[Found]]") -> None:
        if self.stage is not Stage.ASKING or answer.cancelled():
            return
        error = answer.exception()
        if isinstance(error, BootstrapError):
            self._on_no_answer(error)
        elif isinstance(error, LayoutError):
            self._again(f"prefill {self.prefill} cannot be paired: {error}", final=Cause.INVALID)
        elif error is not None:
            self._again(f"bootstrap {self.prefill}: {type(error).__name__}: {error}")
        elif (misfit := _misfit(answer.result())) is not None:
            self._again(f"prefill {self.prefill} cannot be paired: {misfit}", final=Cause.INVALID)
        elif fenced := [one for one in answer.result() if self._owner.link_fenced(one.info.incarnation)]:
            message = f"{self._name(fenced[0])} was fenced, and no other process has come in its place"
            self._again(message, final=Cause.PEER_LOST)
        else:
            self._join(answer.result())

    def _on_no_answer(self, error: BootstrapError) -> None:
        message, now = str(error), time.monotonic()
        self._refused_since = (self._refused_since or now) if error.refused else None
        if error.final:
            self._again(message, final=Cause.REFUSED)
        elif self._refused_since is not None and now - self._refused_since >= REFUSED_S:
            self._again(f"{message}; nobody has listened there for {REFUSED_S:g} s", final=Cause.PEER_LOST)
        else:
            self._again(message)

    def _join(self, found: Sequence[Found]) -> None:
        self.stage = Stage.JOINING
        self._refused_since = None
        self.rounds += 1
        serving = {one.info.incarnation: one for one in found}
        for peer in [peer for peer in self._seats if peer not in serving]:
            self._lose(peer, f"{self._name(self._seats[peer].found)} was restarted")
        for peer, one in serving.items():
            seat = self._seats.setdefault(peer, RankSlot(one))
            seat.found = one
            if seat.line is None:
                try:
                    seat.line = self._owner.connect(self, one, self._name(one))
                except (OSError, zmq.ZMQError) as error:
                    self._again(f"{self._name(one)} cannot be connected to: {error}")
                    return
        self._check_whole()

    def _check_whole(self) -> None:
        if self.stage is Stage.JOINING and all(seat.paired for seat in self._seats.values()):
            self.stage = Stage.LINKED
            self._slow = False
            self._backoff = BACKOFF_FIRST_S
            self._failure = ""
            self._owner.link_whole(self, [seat.found for seat in self._seats.values()])

    # --- What the lines tell ---

    def line_paired(self, peer: str) -> None:
        """See `RankConnectionOwner`."""
        seat = self._seats[peer]
        assert seat.line is not None
        seat.known = True
        self._reactor.cancel(("grace", seat))
        self._owner.link_paired(self, peer, seat.line.version)
        self._check_whole()

    def line_frame(self, frame: f.AttemptFrame) -> None:
        """See `RankConnectionOwner`."""
        self._owner.link_frame(frame)

    def line_ended(self, peer: str, message: str, *, paired: bool) -> None:
        """See `RankConnectionOwner`."""
        seat = self._seats[peer]
        seat.line = None
        if not paired:
            self._again(message)
            return
        self._owner.link_broken(self)
        lost = f"{message}, and the same process did not answer again"
        self._reactor.at(("grace", seat), time.monotonic() + GRACE_S, partial(self._on_grace_over, peer, lost))
        self._give_up = time.monotonic() + self._connect_s
        if self.stage is not Stage.ASKING:
            self._ask()

    def line_refused(self, peer: str, message: str, *, retry: bool) -> None:
        """See `RankConnectionOwner`."""
        self._seats[peer].line = None
        self._again(message, final=None if retry else Cause.INVALID)

    def line_left(self, peer: str, message: str) -> None:
        """See `RankConnectionOwner`."""
        self._lose(peer, message)
        self._again(message)

    # --- Failures ---

    def _on_grace_over(self, peer: str, message: str) -> None:
        self._lose(peer, message)
        self._again(message)

    def _lose(self, peer: str, message: str) -> None:
        """A rank has no seat any more; the connector is told if it had been paired."""
        seat = self._seats.pop(peer)
        self._reactor.cancel(("grace", seat))
        if seat.line is not None:
            seat.line.close()
        self._give_up = time.monotonic() + self._connect_s
        if seat.known:
            log.warning("%s", message)
            self._owner.link_lost(self, peer, message)

    def _again(self, message: str, *, final: Cause | None = None) -> None:
        """Try once more after a pause, unless that is pointless (`final`), too late, or nobody wants it any more.

        A word that is owed is wanted too, but for as long as one wants a hand-off, and after that now and then.
        """
        now = time.monotonic()
        coming_back = any(seat.known and not seat.paired for seat in self._seats.values())
        wanted = coming_back or self._owner.link_wanted(self)
        if wanted:
            self._note_failure(message, now)
        owed = not self._slow and self._owner.link_owed(self)
        if final is None and (wanted or owed) and now < self._give_up:
            self.stage = Stage.PAUSING
            self._reactor.at(("pause", self), now + self._backoff, self._ask)
            self._backoff = min(2 * self._backoff, BACKOFF_MAX_S)
        else:
            self._fail(final or Cause.PEER_LOST, message)

    def _fail(self, cause: Cause, message: str) -> None:
        """Give up on the ranks that are missing; those that are there stay, for they may have something to say."""
        for peer in [peer for peer, seat in self._seats.items() if not seat.paired]:
            self._lose(peer, message)
        self._reactor.cancel(("pause", self))
        if self._owner.link_owed(self):
            self.stage = Stage.PAUSING
            self._slow = True
            now = time.monotonic()
            self._give_up = now + OWED_S + self._connect_s
            self._reactor.at(("pause", self), now + OWED_S, self._ask)
        elif self._seats:
            self.stage = Stage.RESTING
        else:
            self.close()
        self._owner.link_failed(self, cause, message)

    def _note_failure(self, message: str, now: float) -> None:
        if not self._failure:
            self._failing_since = now
            log.warning("prefill %s is not linked: %s", self.prefill, message)
        self._failure = message

    def _name(self, found: Found) -> str:
        return f"rank {found.info.rank} of prefill {self.prefill}"


def _misfit(found: Sequence[Found]) -> str | None:
    """Why these ranks cannot be spoken to, found out before they are."""
    for info, writer in found:
        try:
            negotiate(*info.protocol, direction=info.direction, parts=writer.parts)
        except VersionMismatchError as error:
            return f"rank {info.rank} of prefill cannot be spoken to: {error}"
    return None

"""Decode's connection to one prefill instance: from its bootstrap address to the ranks that write to this decode rank.

It asks the bootstrap registry for the ranks, finds those that write to us, and connects to each. It is linked when all
of these are paired. When a connection ends, it asks again at once. If the same process answers, nothing was lost. If
another answers, or none within the grace, the old one is lost; the connections of other ranks stay. Owner thread only.
"""

import logging
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
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.versions import VersionMismatchError, negotiate
from pdpool_connector.runtime.rank_connection import RankConnection
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.runtime.stats import LinkStats
from pdpool_connector.transport.bootstrap import BootstrapError, RankInfo

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """A prefill rank that writes to us, and what it writes."""

    info: RankInfo
    writer: Writer


class MisfitRank(NamedTuple):
    """A prefill rank that can never write to us. We would be number `rank_index` of its `rank_count` decode ranks."""

    info: RankInfo
    rank_index: int
    rank_count: int


class MisfitError(LayoutError):
    """Two instances can never be paired. `ranks`: those of prefill."""

    def __init__(self, message: str, ranks: Sequence[MisfitRank]) -> None:
        super().__init__(message)
        self.ranks = ranks


class ConnectionOwner(Protocol):
    """What an instance connection needs of its connector."""

    def find(self, prefill: str) -> "Future[Sequence[Found]]":
        """Ask the registry; fails with BootstrapError, or with MisfitError when the instances do not fit."""

    def connect(self, instance: "InstanceConnection", found: Found, name: str) -> RankConnection:
        """Connect to a rank and send Hello. Raises OSError or zmq.ZMQError when no socket is left."""

    def on_paired(self, instance: "InstanceConnection", peer: str, version: int) -> None:
        """One of its ranks is paired."""

    def on_linked(self, instance: "InstanceConnection", writers: Sequence[Found]) -> None:
        """All of its ranks are paired."""

    def on_unlinked(self, instance: "InstanceConnection") -> None:
        """The connection to a paired rank ended; the same process may answer again, or another."""

    def on_lost(self, instance: "InstanceConnection", peer: str, message: str) -> None:
        """There is evidence that a rank that was paired is gone."""

    def on_unreachable(self, instance: "InstanceConnection", cause: Cause, message: str) -> None:
        """It could not be linked; it is closed, or rests, or tries on slowly while pages are held for it."""

    def on_frame(self, frame: f.AttemptFrame) -> None:
        """A frame about an attempt came from a paired rank."""

    def is_wanted(self, instance: "InstanceConnection") -> bool:
        """True while attempts wait for this address."""

    def is_owed(self, instance: "InstanceConnection") -> bool:
        """True while pages are held that only a frame of a process there can release."""

    def is_fenced(self, peer: str) -> bool:
        """True for a process with which nothing is begun again."""


class Stage(Enum):
    """How far an instance connection has come."""

    ASKING = "asking"
    """The registry is asked."""
    JOINING = "joining"
    """The ranks are known, and not all of them are paired."""
    LINKED = "linked"
    PAUSING = "pausing"
    """Something failed, and is tried again soon."""
    RESTING = "resting"
    """Something failed, and no attempt needs the ranks that are missing."""
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class RankSlot:
    """One rank that writes to us. `known`: it was paired, and there is no evidence yet that it is gone."""

    found: Found
    connection: RankConnection | None = None
    known: bool = False

    @property
    def paired(self) -> bool:
        """Whether frames can be sent to it."""
        return self.connection is not None and self.connection.paired


class InstanceConnection:
    """See the module's docstring."""

    def __init__(self, prefill: str, owner: ConnectionOwner, reactor: Reactor, timeouts: Timeouts) -> None:
        self.prefill = prefill
        self.stage = Stage.PAUSING
        self._owner, self._reactor, self._timeouts = owner, reactor, timeouts
        self._slots: dict[str, RankSlot] = {}
        self.rounds = 0
        """How often its ranks were connected to: each time with the next of the keys."""
        self.misfits: Sequence[MisfitRank] = ()
        """Ranks that have refused to pair for good, or that can never be paired, and the others of their instance."""
        self.in_vain = False
        """Whether it has failed because nothing answered for `connect_s`."""
        self._failure = ""
        self._failing_since = 0.0
        self._refused_since: float | None = None
        self._pause_s = timeouts.connect_first_s
        self._slow = False
        self._give_up = reactor.now() + timeouts.connect_s
        self._ask()

    @property
    def refused(self) -> bool:
        """Whether its address has refused the last connection."""
        return self._refused_since is not None

    def hurry(self) -> None:
        """An attempt waits for it: report what is linked, or go on at once where it rests or makes a long pause."""
        if self.stage is Stage.LINKED:
            for peer, slot in self._slots.items():
                assert slot.connection is not None
                self._owner.on_paired(self, peer, slot.connection.version)
            self._owner.on_linked(self, [slot.found for slot in self._slots.values()])
        elif self.stage is Stage.RESTING or (self._slow and self.stage is Stage.PAUSING):
            self._slow = False
            self._pause_s = self._timeouts.connect_first_s
            self._give_up = self._reactor.now() + self._timeouts.connect_s
            self._refused_since = None
            self._ask()

    def mark_lost(self, peer: str, why: str) -> None:
        """A process has exited or was fenced (`why`): if it has a slot here, that is empty now."""
        if (slot := self._slots.get(peer)) is not None:
            message = f"{self._name(slot.found)} {why}"
            self._lose(peer, message)
            self._retry(message)

    def connection(self, peer: str) -> RankConnection | None:
        """The connection to a paired rank; None when there is none."""
        slot = self._slots.get(peer)
        return slot.connection if slot is not None and slot.paired else None

    def stats(self, now: float) -> LinkStats:
        """For `ConnectorStats`."""
        missing = tuple(sorted(slot.found.info.rank for slot in self._slots.values() if not slot.paired))
        failing_s = now - self._failing_since if self._failure else None
        return LinkStats(self.prefill, self.stage.value, missing, self._failure, failing_s)

    def close(self) -> None:
        """Close for good."""
        self.stage = Stage.CLOSED
        self._reactor.cancel(("pause", self))
        for slot in self._slots.values():
            self._reactor.cancel(("grace", slot))
            if slot.connection is not None:
                slot.connection.close()
        self._slots.clear()

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
        elif isinstance(error, MisfitError):
            self.misfits = error.ranks
            self._retry(f"prefill {self.prefill} cannot be paired: {error}", final=Cause.INVALID)
        elif error is not None:
            self._retry(f"bootstrap {self.prefill}: {type(error).__name__}: {error}")
        elif (mismatch := _version_mismatch(answer.result())) is not None:
            self.misfits = [MisfitRank(info, to.rank_index, to.rank_count) for info, to in answer.result()]
            self._retry(f"prefill {self.prefill} cannot be paired: {mismatch}", final=Cause.INVALID)
        elif fenced := [one for one in answer.result() if self._owner.is_fenced(one.info.incarnation)]:
            message = f"{self._name(fenced[0])} was fenced, and no other process has taken its place"
            self._retry(message, final=Cause.PEER_LOST)
        else:
            self._join(answer.result())

    def _on_no_answer(self, error: BootstrapError) -> None:
        message, now = str(error), self._reactor.now()
        self._refused_since = (self._refused_since or now) if error.refused else None
        if error.final:
            self._retry(message, final=Cause.REFUSED)
        elif self._refused_since is not None and now - self._refused_since >= self._timeouts.refused_s:
            lasted = f"it has refused connections for {now - self._refused_since:.1f} s"
            self._retry(f"{message}; {lasted}", final=Cause.PEER_LOST)
        else:
            self._retry(message)

    def _join(self, found: Sequence[Found]) -> None:
        self.stage = Stage.JOINING
        self._refused_since = None
        self.rounds += 1
        writers = {one.info.incarnation: one for one in found}
        for peer in [peer for peer in self._slots if peer not in writers]:
            self._lose(peer, f"{self._name(self._slots[peer].found)} was restarted")
        for peer, one in writers.items():
            slot = self._slots.setdefault(peer, RankSlot(one))
            slot.found = one
            if slot.connection is None:
                try:
                    slot.connection = self._owner.connect(self, one, self._name(one))
                except (OSError, zmq.ZMQError) as error:
                    self._retry(f"{self._name(one)} cannot be connected to: {error}")
                    return
        self._check_linked()

    def _check_linked(self) -> None:
        if self.stage is Stage.JOINING and all(slot.paired for slot in self._slots.values()):
            self.stage = Stage.LINKED
            self._slow = False
            self._pause_s = self._timeouts.connect_first_s
            self._failure = ""
            self._owner.on_linked(self, [slot.found for slot in self._slots.values()])

    # --- Reports of rank connections ---

    def on_rank_paired(self, peer: str) -> None:
        """See `RankConnectionOwner`."""
        slot = self._slots[peer]
        assert slot.connection is not None
        slot.known = True
        self._reactor.cancel(("grace", slot))
        self._owner.on_paired(self, peer, slot.connection.version)
        self._check_linked()

    def on_rank_frame(self, frame: f.AttemptFrame) -> None:
        """See `RankConnectionOwner`."""
        self._owner.on_frame(frame)

    def on_rank_ended(self, peer: str, message: str, *, paired: bool) -> None:
        """See `RankConnectionOwner`."""
        slot = self._slots[peer]
        slot.connection = None
        if not paired:
            self._retry(message)
            return
        self._owner.on_unlinked(self)
        lost = f"{message}, and the same process did not answer again"
        deadline = self._reactor.now() + self._timeouts.lost_grace_s
        self._reactor.at(("grace", slot), deadline, partial(self._on_grace_over, peer, lost))
        self._give_up = self._reactor.now() + self._timeouts.connect_s
        if self.stage is not Stage.ASKING:
            self._ask()

    def on_rank_refused(self, peer: str, message: str, *, retry: bool) -> None:
        """See `RankConnectionOwner`."""
        slot = self._slots[peer]
        slot.connection = None
        writer = slot.found.writer
        self.misfits = () if retry else (MisfitRank(slot.found.info, writer.rank_index, writer.rank_count),)
        self._retry(message, final=None if retry else Cause.INVALID)

    def on_rank_left(self, peer: str, message: str) -> None:
        """See `RankConnectionOwner`."""
        self._lose(peer, message)
        self._retry(message)

    # --- Failures ---

    def _on_grace_over(self, peer: str, message: str) -> None:
        self._lose(peer, message)
        self._retry(message)

    def _lose(self, peer: str, message: str) -> None:
        """A rank has no slot any more; the connector gets a report if it had been paired."""
        slot = self._slots.pop(peer)
        self._reactor.cancel(("grace", slot))
        if slot.connection is not None:
            slot.connection.close()
        self._give_up = self._reactor.now() + self._timeouts.connect_s
        if slot.known:
            log.warning("%s", message)
            self._owner.on_lost(self, peer, message)

    def _retry(self, message: str, *, final: Cause | None = None) -> None:
        """Try once more after a pause, unless that is pointless (`final`), too late, or no attempt needs it any more.

        Also retries while pages are held for this prefill: at full rate for `connect_s`, then every `held_retry_s`.
        """
        now = self._reactor.now()
        is_returning = any(slot.known and not slot.paired for slot in self._slots.values())
        is_wanted = is_returning or self._owner.is_wanted(self)
        if is_wanted:
            self._note_failure(message, now)
        is_owed = not self._slow and self._owner.is_owed(self)
        if final is None and (is_wanted or is_owed) and now < self._give_up:
            self.stage = Stage.PAUSING
            self._reactor.at(("pause", self), now + self._pause_s, self._ask)
            self._pause_s = min(2 * self._pause_s, self._timeouts.connect_max_s)
        else:
            self.in_vain = final is None and now >= self._give_up
            self._fail(final or Cause.PEER_LOST, message)

    def _fail(self, cause: Cause, message: str) -> None:
        """Give up the ranks that are missing; those that are paired stay, for their frames may still matter."""
        for peer in [peer for peer, slot in self._slots.items() if not slot.paired]:
            self._lose(peer, message)
        self._reactor.cancel(("pause", self))
        if self._owner.is_owed(self):
            self.stage = Stage.PAUSING
            self._slow = True
            again = self._reactor.now() + self._timeouts.held_retry_s
            self._give_up = again + self._timeouts.connect_s
            self._reactor.at(("pause", self), again, self._ask)
        elif self._slots:
            self.stage = Stage.RESTING
        else:
            self.close()
        self._owner.on_unreachable(self, cause, message)

    def _note_failure(self, message: str, now: float) -> None:
        if not self._failure:
            self._failing_since = now
            log.warning("prefill %s is not linked: %s", self.prefill, message)
        self._failure = message

    def _name(self, found: Found) -> str:
        return f"rank {found.info.rank} of prefill {self.prefill}"


def _version_mismatch(found: Sequence[Found]) -> str | None:
    """Why no protocol version is common with some rank; None when there is one with each."""
    for info, _ in found:
        try:
            negotiate(*info.protocol, we_are="decode")
        except VersionMismatchError as error:
            return f"{error} (rank {info.rank} of prefill)"
    return None

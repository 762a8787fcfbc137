"""Rings of what went into a machine and came out of it, one for each room, bounded in all. Pure; one thread.

One machine serves all hand-offs, so a ring of the whole machine could not replay one of them. A *trace* is everything
that happened in one room. That is all that can change a hand-off there, because only halves of one room match. Routers
draw rooms at random, so a trace has one hand-off, or the samples of one request.

Some events change all hand-offs: a peer, a link, a fence, drain, shutdown. They are kept once, and merged into a trace
when it is read. A tick belongs to the traces whose timers it fired. Bounds of the whole machine are not recorded. So
the trace of a hand-off that was refused because a table was full does not replay; the replay shows the difference.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import (
    Drain,
    Effect,
    Event,
    Ignored,
    Linked,
    OfferPages,
    OpenAttempt,
    OpenRequest,
    PeerLost,
    PeerReady,
    Plain,
    Received,
    Send,
    SendPages,
    Shutdown,
    Tick,
)
from pdpool_connector.protocol.frames import AttemptId

RING: Final = 512
"""Steps kept of one trace: a prompt of 100 chunks takes 300, and five minutes of waiting with queries 120."""
WIDE: Final = 4096
"""Events kept that change all hand-offs. Of older ones only the state that they left is kept."""
MAX_BYTES: Final = 64 << 20
"""Bound on all rings together, by estimate; the oldest trace goes first."""
ENDED: Final = 256
"""Traces of failed hand-offs that are kept, because a late half may still come."""
STEP_BYTES: Final = 1024
"""Estimate of one step with its effects, without ids of pages and state."""


class Noted(msgspec.Struct, frozen=True, gc=False):
    """A step with its place in the order of all. It is part of no cycle, so the garbage collector skips it."""

    order: int
    at: float
    event: Event
    effects: Sequence[Effect]
    fault: str = ""


@dataclass(slots=True, eq=False)
class Trace:
    """What is kept of one room.

    `names`: handles and attempts in it. `live`: handles whose hand-off has not ended. `lingers`: the machine may
    remember a failed half, and a later half in this room may get its cause.
    """

    room: int
    steps: deque[Noted] = field(default_factory=deque)
    names: dict[Hashable, None] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    request_id: str = ""
    lingers: bool = False
    nbytes: int = 0
    missing: int = 0


class Snapshot(NamedTuple):
    """A trace detached from the recorder: its own steps, and the events that change all hand-offs, in order."""

    room: int
    request_id: str
    missing: int
    steps: list[Noted]
    wide: list[Noted]


Shares = dict[int, tuple[Trace, list[Effect]]]
Find = Callable[[Any], Trace | None]


class Recorder:
    """See the module. Call `note` after each call of `handle`, and `ended` when a hand-off was reported ended.

    Args:
        incarnation: Of this process.
        keep_s: How long the machine remembers a failed half, in seconds. Its trace may grow for that long.
        ring: Steps kept of one trace.
        max_bytes: Bound on all traces together.
    """

    def __init__(self, incarnation: str, keep_s: float, *, ring: int = RING, max_bytes: int = MAX_BYTES) -> None:
        self._incarnation = incarnation
        self._keep_s, self._ring, self._max_bytes = keep_s, ring, max_bytes
        self._order = 0
        self._nbytes = 0
        self._traces: dict[int, Trace] = {}
        self._ended: dict[int, float] = {}
        self._named: dict[Hashable, Trace] = {}
        self._wide: deque[Noted] = deque()
        self._before: dict[Hashable, Noted] = {}
        self._finders: dict[type[Plain], Find | None] = {}

    def __len__(self) -> int:
        return len(self._traces)

    def note(
        self,
        event: Event,
        now: float,
        effects: Sequence[Effect],
        fired: Sequence[tuple[str, Hashable]] = (),
        fault: str = "",
    ) -> None:
        """Keep one step. `fired`: timers due at a tick. `fault`: type of the exception that `handle` raised."""
        self._order += 1
        kind = type(event)
        try:
            find = self._finders[kind]
        except KeyError:
            find = self._finders[kind] = self._finder(kind)
        noted = Noted(self._order, now, event, effects, fault)
        if find is not None:
            if (trace := find(event) or self._begun(event, now, effects)) is not None:
                self._add(trace, noted)
        elif kind is Tick:
            self._note_tick(noted, fired)
        else:
            self._note_wide(noted)

    def ended(self, handle: int, now: float, *, failed: bool, releasable: bool) -> None:
        """A hand-off was reported ended. A trace without failure is forgotten; a failed one is kept for a while."""
        trace = self._named.get(handle)
        if trace is None or not releasable:
            return
        trace.live.discard(handle)
        trace.lingers |= failed
        if trace.live:
            return
        if not trace.lingers:
            self._forget(trace)
            return
        self._ended[trace.room] = now
        if len(self._ended) > ENDED:
            self._forget(self._traces[next(iter(self._ended))])

    def snapshot(self, handle: int) -> Snapshot | None:
        """The trace of a hand-off so far; None when it was evicted."""
        trace = self._named.get(handle)
        if trace is None:
            return None
        wide = [*self._before.values(), *self._wide]
        return Snapshot(trace.room, trace.request_id, trace.missing, list(trace.steps), wide)

    # --- Which trace an event belongs to ---

    def _finder(self, kind: type[Plain]) -> Find | None:
        """How events of this type name their trace; None for those that change all hand-offs."""
        if kind is Received:
            return lambda event: self._named.get(event.frame.attempt)
        names = set(kind.__struct_fields__)
        if "attempt" in names:
            return lambda event: self._named.get(event.attempt)
        if "handle" in names:
            return lambda event: self._named.get(event.handle)
        return None

    def _begun(self, event: Event, now: float, effects: Sequence[Effect]) -> Trace | None:
        """The trace of the room in which an event begins a hand-off; None for an event that begins none."""
        if isinstance(event, OpenRequest | OpenAttempt):
            trace = self._at(event.room, now)
            trace.request_id = event.request_id
            trace.live.add(event.handle)
            self._name(trace, event.handle)
            if isinstance(event, OpenAttempt):
                self._name(trace, AttemptId(self._incarnation, event.handle))
            return trace
        if not isinstance(event, Received) or not _begins(event.frame, effects):
            return None
        frame = event.frame
        if _refused(frame, effects) and frame.room not in self._traces:
            return None
        trace = self._at(frame.room, now)
        self._name(trace, frame.attempt)
        trace.lingers |= isinstance(frame, f.Abort)
        return trace

    def _at(self, room: int, now: float) -> Trace:
        trace = self._traces.get(room)
        if trace is not None and now - self._ended.get(room, now) > self._keep_s:
            self._forget(trace)
            trace = None
        self._ended.pop(room, None)
        if trace is None:
            trace = self._traces[room] = Trace(room)
        return trace

    def _name(self, trace: Trace, name: Hashable) -> None:
        trace.names[name] = None
        self._named[name] = trace
        if len(trace.names) > RING:  # the steps of the oldest have left the ring by then
            oldest = next((known for known in trace.names if known not in trace.live), name)
            del trace.names[oldest]
            self._unname(trace, oldest)

    def _unname(self, trace: Trace, name: Hashable) -> None:
        if self._named.get(name) is trace:
            del self._named[name]

    # --- What is kept ---

    def _add(self, trace: Trace, noted: Noted) -> None:
        if self._traces.get(trace.room) is not trace:
            return  # evicted by what the same event added to other traces
        trace.steps.append(noted)
        weight = _weight(noted.event)
        if len(trace.steps) > self._ring:
            weight -= _weight(trace.steps.popleft().event)
            trace.missing += 1
        trace.nbytes += weight
        self._nbytes += weight
        while self._nbytes > self._max_bytes and len(self._traces) > 1:
            oldest = next(iter(self._ended or self._traces))
            self._forget(self._traces[oldest])

    def _forget(self, trace: Trace) -> None:
        self._nbytes -= trace.nbytes
        self._ended.pop(trace.room, None)
        for name in trace.names:
            self._unname(trace, name)
        if self._traces.get(trace.room) is trace:
            del self._traces[trace.room]

    def _note_tick(self, noted: Noted, fired: Sequence[tuple[str, Hashable]]) -> None:
        """Each trace whose timer was due gets the tick, even if it had no visible effect there."""
        shares = self._shares(noted.effects)
        shared = False
        for _, key in fired:
            room = getattr(key, "room", None)
            shared |= room is None and not isinstance(key, AttemptId)
            trace = self._named.get(key) if room is None else self._traces.get(room)
            if trace is not None:
                shares.setdefault(id(trace), (trace, []))
        self._add_shares(noted, shares)
        if shared:
            self._keep_wide(noted)

    def _note_wide(self, noted: Noted) -> None:
        """Keep the event once, and in each trace the effects that it had there."""
        self._add_shares(noted, self._shares(noted.effects))
        self._keep_wide(noted)

    def _add_shares(self, noted: Noted, shares: Shares) -> None:
        for trace, effects in shares.values():
            trace.lingers |= not trace.live
            self._add(trace, replace(noted, effects=effects))

    def _keep_wide(self, noted: Noted) -> None:
        self._wide.append(replace(noted, effects=()))
        if len(self._wide) > WIDE:
            self._fold(self._wide.popleft())

    def _fold(self, noted: Noted) -> None:
        """Keep of an old event the state that it left."""
        match noted.event:
            case PeerReady(peer):
                self._before["ready", peer] = noted
            case PeerLost(peer):
                self._before.pop(("ready", peer), None)
                for key, old in list(self._before.items()):
                    if isinstance(old.event, Linked) and peer in [writer.incarnation for writer in old.event.writers]:
                        del self._before[key]
            case Linked(prefill):
                self._before["linked", prefill] = noted
            case Drain() | Shutdown():
                self._before["drain"] = noted

    def _shares(self, effects: Sequence[Effect]) -> Shares:
        """Effects with the trace that they belong to, by identity of the trace."""
        shares: Shares = {}
        for effect in effects:
            if (trace := self._of_effect(effect)) is not None:
                shares.setdefault(id(trace), (trace, []))[1].append(effect)
        return shares

    def _of_effect(self, effect: Effect) -> Trace | None:
        if isinstance(effect, Send):
            return self._named.get(effect.frame.attempt) if isinstance(effect.frame, f.AttemptFrame) else None
        name = getattr(effect, "attempt", None) or getattr(effect, "handle", None)
        return None if name is None else self._named.get(name)


def _begins(frame: f.AttemptFrame, effects: Sequence[Effect]) -> bool:
    """Whether a frame is the first of its attempt. A frame that was ignored changed nothing."""
    return isinstance(frame, f.RequestFrame) and not any(isinstance(effect, Ignored) for effect in effects)


def _refused(frame: f.AttemptFrame, effects: Sequence[Effect]) -> bool:
    sent = [type(effect.frame) for effect in effects if isinstance(effect, Send)]
    return isinstance(frame, f.Open) and f.Ended in sent


def _weight(event: Event) -> int:
    content = event.frame if isinstance(event, Received) else event
    if isinstance(content, f.Offer | SendPages | OfferPages):
        return STEP_BYTES + len(content.pages) + sum(map(len, content.state))
    return STEP_BYTES

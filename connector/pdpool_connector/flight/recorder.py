"""Rings of what went into a machine and came out of it, one for each hand-off, bounded in all. Pure; one thread.

One machine serves all hand-offs, so a ring alone would not replay. A *story* is therefore everything that happened
under one (room, sibling, prompt), which is all that can bear on one hand-off: both halves, attempts that supersede each
other, halves that were missed. (Where one side tells its prompt and the other does not, there are two stories of it.)
Events that concern everybody (a peer came or went, a link, a fence, drain, shutdown) are kept once, and are merged into
each story when it is read. A tick belongs to the stories whose timers it fired. What is left out are the bounds of the
whole machine: the story of a hand-off that was refused because a table was full does not replay, and the replay says so
by its difference.
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
from pdpool_connector.protocol.missed import PartFrame

RING: Final = 512
"""Steps kept of one story: a prompt of 100 chunks takes 300, and five minutes of waiting with queries 120."""
WIDE: Final = 4096
"""Events kept that concern everybody; beyond them only the state that they left."""
MAX_BYTES: Final = 64 << 20
"""Bound on all rings together, by estimate; the oldest story goes first."""
ENDED: Final = 256
"""Failed stories that are kept for what may still come to them."""
STEP_BYTES: Final = 1024
"""Estimate of one step with its effects, ids of pages and state apart."""

Key = tuple[int, int, bytes]
"""Room, sibling and prompt."""


class Noted(msgspec.Struct, frozen=True, gc=False):
    """A step with its place in the order of all. ModelShard of no cycle: the garbage collector need not look at it."""

    order: int
    at: float
    event: Event
    effects: Sequence[Effect]
    fault: str = ""


@dataclass(slots=True, eq=False)
class Story:
    """What is kept under one key. `live`: handles that have not come to their end.

    `lingers`: the machine may remember a half of it that failed, and the next that comes to the room may meet that.
    """

    key: Key
    steps: deque[Noted] = field(default_factory=deque)
    names: dict[Hashable, None] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    request_id: str = ""
    lingers: bool = False
    nbytes: int = 0
    missing: int = 0


class Telling(NamedTuple):
    """A story as it stands, detached from the recorder: its own steps, and what concerned everybody, in order."""

    room: int
    sibling: int
    request_id: str
    missing: int
    steps: list[Noted]
    wide: list[Noted]


Shares = dict[int, tuple[Story, list[Effect]]]
Find = Callable[[Any], Story | None]


class Recorder:
    """See the module's docstring. `note` after each call of `handle`, `ended` when a hand-off was reported ended.

    `incarnation`: of this process. `keep_s`: how long a machine may remember a failed half, so how long its story may
    go on.
    """

    def __init__(self, incarnation: str, keep_s: float, *, ring: int = RING, max_bytes: int = MAX_BYTES) -> None:
        self._incarnation = incarnation
        self._keep_s, self._ring, self._max_bytes = keep_s, ring, max_bytes
        self._order = 0
        self._nbytes = 0
        self._stories: dict[Key, Story] = {}
        self._ended: dict[Key, float] = {}
        self._named: dict[Hashable, Story] = {}
        self._wide: deque[Noted] = deque()
        self._before: dict[Hashable, Noted] = {}
        self._finders: dict[type[Plain], Find | None] = {}

    def __len__(self) -> int:
        return len(self._stories)

    def note(
        self,
        event: Event,
        now: float,
        effects: Sequence[Effect],
        fired: Sequence[tuple[str, Hashable]] = (),
        fault: str = "",
    ) -> None:
        """Keep one step. `fired`: the timers that a tick found due; `fault`: the exception's type, if there was one."""
        self._order += 1
        kind = type(event)
        try:
            find = self._finders[kind]
        except KeyError:
            find = self._finders[kind] = self._finder(kind)
        noted = Noted(self._order, now, event, effects, fault)
        if find is not None:
            if (story := find(event) or self._begun(event, now, effects)) is not None:
                self._add(story, noted)
        elif kind is Tick:
            self._note_tick(noted, fired)
        else:
            self._note_wide(noted)

    def ended(self, handle: int, now: float, *, failed: bool, releasable: bool) -> None:
        """A hand-off was reported ended. A story that ended well is forgotten; a failed one is kept for a while."""
        story = self._named.get(handle)
        if story is None or not releasable:
            return
        story.live.discard(handle)
        story.lingers |= failed
        if story.live:
            return
        if not story.lingers:
            self._forget(story)
            return
        self._ended[story.key] = now
        if len(self._ended) > ENDED:
            self._forget(self._stories[next(iter(self._ended))])

    def tell(self, handle: int) -> Telling | None:
        """The story of a hand-off so far; None when it was evicted."""
        story = self._named.get(handle)
        if story is None:
            return None
        wide = [*self._before.values(), *self._wide]
        return Telling(*story.key[:2], story.request_id, story.missing, list(story.steps), wide)

    # --- Whose event it is ---

    def _finder(self, kind: type[Plain]) -> Find | None:
        """How events of this type name their story; None for those that concern everybody."""
        if kind is Received:
            return lambda event: self._named.get(event.frame.attempt)
        names = set(kind.__struct_fields__)
        if "attempt" in names:
            return lambda event: self._named.get(event.attempt)
        if "handle" in names:
            return lambda event: self._named.get(event.handle)
        return None

    def _begun(self, event: Event, now: float, effects: Sequence[Effect]) -> Story | None:
        """The story that an event begins, or goes on with in its room; None for what belongs to none that is kept."""
        if isinstance(event, OpenRequest | OpenAttempt):
            story = self._at((event.room, event.sibling, event.prompt), now)
            story.request_id = event.request_id
            story.live.add(event.handle)
            self._name(story, event.handle)
            if isinstance(event, OpenAttempt):
                self._name(story, AttemptId(self._incarnation, event.handle))
            return story
        if isinstance(event, Received) and (frame := _first_word(event.frame, effects)) is not None:
            key = (frame.room, frame.sibling, frame.prompt)
            if _refused(frame, effects) and key not in self._stories:
                return None
            story = self._at(key, now)
            self._name(story, event.frame.attempt)
            story.lingers |= isinstance(event.frame, f.Abort | f.Drained)
            return story
        return None

    def _at(self, key: Key, now: float) -> Story:
        story = self._stories.get(key)
        if story is not None and now - self._ended.get(key, now) > self._keep_s:
            self._forget(story)
            story = None
        self._ended.pop(key, None)
        if story is None:
            story = self._stories[key] = Story(key)
        return story

    def _name(self, story: Story, name: Hashable) -> None:
        story.names[name] = None
        self._named[name] = story
        if len(story.names) > RING:  # a story of so many has lost the steps of the oldest
            oldest = next((known for known in story.names if known not in story.live), name)
            del story.names[oldest]
            self._unname(story, oldest)

    def _unname(self, story: Story, name: Hashable) -> None:
        if self._named.get(name) is story:
            del self._named[name]

    # --- What is kept ---

    def _add(self, story: Story, noted: Noted) -> None:
        if self._stories.get(story.key) is not story:
            return  # evicted by what the same event added to others
        story.steps.append(noted)
        weight = _weight(noted.event)
        if len(story.steps) > self._ring:
            weight -= _weight(story.steps.popleft().event)
            story.missing += 1
        story.nbytes += weight
        self._nbytes += weight
        while self._nbytes > self._max_bytes and len(self._stories) > 1:
            oldest = next(iter(self._ended), None) or next(iter(self._stories))
            self._forget(self._stories[oldest])

    def _forget(self, story: Story) -> None:
        self._nbytes -= story.nbytes
        self._ended.pop(story.key, None)
        for name in story.names:
            self._unname(story, name)
        if self._stories.get(story.key) is story:
            del self._stories[story.key]

    def _note_tick(self, noted: Noted, fired: Sequence[tuple[str, Hashable]]) -> None:
        """Each story whose timer came due gets the tick, even if nothing came of it that can be seen."""
        shares = self._shares(noted.effects)
        shared = False
        for _, key in fired:
            name = _name_of_timer(key)
            shared |= name is None
            story = self._stories.get(name) or self._named.get(name) if name is not None else None
            if story is not None:
                shares.setdefault(id(story), (story, []))
        self._add_shares(noted, shares)
        if shared:
            self._keep_wide(noted)

    def _note_wide(self, noted: Noted) -> None:
        """Keep it once, and with each story what it did there."""
        self._add_shares(noted, self._shares(noted.effects))
        self._keep_wide(noted)

    def _add_shares(self, noted: Noted, shares: Shares) -> None:
        for story, effects in shares.values():
            story.lingers |= not story.live
            self._add(story, replace(noted, effects=effects))

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
        """Effects with the story that they concern, by its identity."""
        shares: Shares = {}
        for effect in effects:
            if (story := self._of_effect(effect)) is not None:
                shares.setdefault(id(story), (story, []))[1].append(effect)
        return shares

    def _of_effect(self, effect: Effect) -> Story | None:
        if isinstance(effect, Send):
            return self._named.get(effect.frame.attempt) if isinstance(effect.frame, f.AttemptFrame) else None
        name = getattr(effect, "attempt", None) or getattr(effect, "handle", None)
        return None if name is None else self._named.get(name)


def _first_word(frame: f.AttemptFrame, effects: Sequence[Effect]) -> PartFrame | None:
    """The frame if it is the first on its attempt. One on an ended attempt that is not kept changes nothing."""
    if any(isinstance(effect, Ignored) for effect in effects):
        return None
    return frame if isinstance(frame, PartFrame) else None


def _refused(frame: f.AttemptFrame, effects: Sequence[Effect]) -> bool:
    said = [type(effect.frame) for effect in effects if isinstance(effect, Send)]
    return isinstance(frame, f.Open) and f.Drained in said


def _name_of_timer(key: Hashable) -> Any:  # noqa: ANN401 - an attempt's id, or a story's key
    """Under which name the story of a timer is kept; None for a timer of a table that all share."""
    if isinstance(key, AttemptId):
        return key
    if isinstance(key, tuple) and isinstance(key[-1], AttemptId):  # an end that is told to somebody
        return key[-1]
    room, sibling = getattr(key, "room", None), getattr(key, "sibling", None)
    return None if room is None or sibling is None else (room, sibling, getattr(key, "prompt", b""))


def _weight(event: Event) -> int:
    told = event.frame if isinstance(event, Received) else event
    if isinstance(told, f.Open | f.Computed | SendPages | OpenAttempt):
        return STEP_BYTES + len(told.pages) + len(told.state)
    return STEP_BYTES

"""The states of a hand-off on either side, and the one table that says which cue leads from which state to which.

The machines derive a cue from an event and the facts of the attempt, look the next state up here, and can go nowhere
else. Documentation and tests read the same tables.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from pdpool_connector.protocol.status import Phase


class PrefillState(StrEnum):
    """Prefill's view. The first four have the attempt's own deadline, DRAINING one of its own, HELD has none."""

    WAITING = "waiting"
    """The engine has a request, and no decode has claimed it."""
    PARKED = "parked"
    """A decode has opened an attempt, and the engine's request has not come yet."""
    READY = "ready"
    """Request and attempt have met; nothing has been written, or told to decode, yet."""
    SENDING = "sending"
    """Writes have been submitted; in READ, decode has been told of pages."""
    DRAINING = "draining"
    """It has failed; writes in flight are waited for, or, in READ, decode's word that it reads no more."""
    HELD = "held"
    """It has failed, and nobody can say whether pages are still touched: they stay back until somebody can."""
    DONE = "done"
    FAILED = "failed"


class DecodeState(StrEnum):
    """Decode's view. The first four have the attempt's own deadline, ABORTING one of its own, HELD has none."""

    CONNECTING = "connecting"
    """Prefill is not paired yet: nobody knows our pages."""
    OPENING = "opening"
    """Our pages have been offered; not every writer has answered."""
    ACCEPTED = "accepted"
    """Every writer knows the attempt."""
    RECEIVING = "receiving"
    """A writer has said that it began, and that more follows; in READ, reads have been submitted."""
    ABORTING = "aborting"
    """It has failed; not every writer has said that it is quiet, or, where no pages were offered, that it knows.

    In READ: reads of ours are in flight, or prefill could not be told because it is not paired.
    """
    HELD = "held"
    """It has failed, and a writer cannot be heard: the pages stay back until it says drained, or is fenced.

    In READ: a read of ours does not end, or nobody can say whether it has.
    """
    DONE = "done"
    FAILED = "failed"


class Trigger(StrEnum):
    """What a state machine reacts to, once event and circumstances have been weighed."""

    REQUESTED = "requested"
    """The engine opened it."""
    OPENED = "opened"
    """An attempt came from decode."""
    LINKED = "linked"
    """Prefill is paired; our pages are offered to it."""
    ACCEPTED = "accepted"
    """The last writer that had not answered knows the attempt."""
    SUBMITTED = "submitted"
    """The first pages are being moved; at prefill in READ: they may be, for decode knows them."""
    COMPLETED = "completed"
    """Everything has landed, from every writer, and none writes any more."""
    ENDED = "ended"
    """It failed, and nobody touches the pages."""
    BROKEN = "broken"
    """It failed while somebody may still touch the pages, or has yet to be told."""
    QUIET = "quiet"
    """The last one who might touch the pages, or was to be told, has stopped, by its word or by proof."""
    UNPROVEN = "unproven"
    """No proof of quiet came in time, or none can come on this way."""


FAILURES = frozenset({Trigger.ENDED, Trigger.BROKEN, Trigger.QUIET, Trigger.UNPROVEN})
"""Cues by which a hand-off does not go on."""

P, D, C = PrefillState, DecodeState, Trigger

PREFILL_TRANSITIONS: Mapping[tuple[PrefillState | None, Trigger], PrefillState] = MappingProxyType(
    {
        (None, C.REQUESTED): P.WAITING,
        (None, C.OPENED): P.PARKED,
        (P.WAITING, C.OPENED): P.READY,
        (P.WAITING, C.ENDED): P.FAILED,
        (P.PARKED, C.REQUESTED): P.READY,
        (P.PARKED, C.ENDED): P.FAILED,
        (P.READY, C.SUBMITTED): P.SENDING,
        (P.READY, C.COMPLETED): P.DONE,
        (P.READY, C.ENDED): P.FAILED,
        (P.SENDING, C.COMPLETED): P.DONE,
        (P.SENDING, C.ENDED): P.FAILED,
        (P.SENDING, C.BROKEN): P.DRAINING,
        (P.DRAINING, C.QUIET): P.FAILED,
        (P.DRAINING, C.UNPROVEN): P.HELD,
        (P.HELD, C.QUIET): P.FAILED,
    }
)

DECODE_TRANSITIONS: Mapping[tuple[DecodeState | None, Trigger], DecodeState] = MappingProxyType(
    {
        (None, C.REQUESTED): D.CONNECTING,
        (D.CONNECTING, C.LINKED): D.OPENING,
        (D.CONNECTING, C.ENDED): D.FAILED,
        (D.CONNECTING, C.BROKEN): D.ABORTING,
        (D.OPENING, C.ACCEPTED): D.ACCEPTED,
        (D.OPENING, C.SUBMITTED): D.RECEIVING,
        (D.OPENING, C.COMPLETED): D.DONE,
        (D.OPENING, C.ENDED): D.FAILED,
        (D.OPENING, C.BROKEN): D.ABORTING,
        (D.ACCEPTED, C.SUBMITTED): D.RECEIVING,
        (D.ACCEPTED, C.COMPLETED): D.DONE,
        (D.ACCEPTED, C.ENDED): D.FAILED,
        (D.ACCEPTED, C.BROKEN): D.ABORTING,
        (D.RECEIVING, C.COMPLETED): D.DONE,
        (D.RECEIVING, C.ENDED): D.FAILED,
        (D.RECEIVING, C.BROKEN): D.ABORTING,
        (D.ABORTING, C.QUIET): D.FAILED,
        (D.ABORTING, C.UNPROVEN): D.HELD,
        (D.HELD, C.QUIET): D.FAILED,
    }
)

PREFILL_READ_TRANSITIONS: Mapping[tuple[PrefillState | None, Trigger], PrefillState] = MappingProxyType(
    {
        (None, C.REQUESTED): P.WAITING,
        (None, C.OPENED): P.PARKED,
        (P.WAITING, C.OPENED): P.READY,
        (P.WAITING, C.ENDED): P.FAILED,
        (P.PARKED, C.REQUESTED): P.READY,
        (P.PARKED, C.ENDED): P.FAILED,
        (P.READY, C.SUBMITTED): P.SENDING,
        (P.READY, C.ENDED): P.FAILED,
        (P.SENDING, C.COMPLETED): P.DONE,
        (P.SENDING, C.ENDED): P.FAILED,
        (P.SENDING, C.BROKEN): P.DRAINING,
        (P.DRAINING, C.QUIET): P.FAILED,
        (P.DRAINING, C.UNPROVEN): P.HELD,
        (P.HELD, C.QUIET): P.FAILED,
    }
)

DECODE_READ_TRANSITIONS: Mapping[tuple[DecodeState | None, Trigger], DecodeState] = MappingProxyType(
    {
        (None, C.REQUESTED): D.CONNECTING,
        (D.CONNECTING, C.LINKED): D.OPENING,
        (D.CONNECTING, C.ENDED): D.FAILED,
        (D.CONNECTING, C.BROKEN): D.ABORTING,
        (D.OPENING, C.ACCEPTED): D.ACCEPTED,
        (D.OPENING, C.SUBMITTED): D.RECEIVING,
        (D.OPENING, C.ENDED): D.FAILED,
        (D.ACCEPTED, C.SUBMITTED): D.RECEIVING,
        (D.ACCEPTED, C.COMPLETED): D.DONE,
        (D.ACCEPTED, C.ENDED): D.FAILED,
        (D.RECEIVING, C.COMPLETED): D.DONE,
        (D.RECEIVING, C.ENDED): D.FAILED,
        (D.RECEIVING, C.BROKEN): D.ABORTING,
        (D.ABORTING, C.QUIET): D.FAILED,
        (D.ABORTING, C.UNPROVEN): D.HELD,
        (D.HELD, C.QUIET): D.FAILED,
    }
)

PREFILL_PHASES: Mapping[PrefillState, Phase] = MappingProxyType(
    {
        P.WAITING: Phase.WAITING,
        P.READY: Phase.READY,
        P.SENDING: Phase.TRANSFERRING,
        P.DRAINING: Phase.FAILED,
        P.HELD: Phase.FAILED,
        P.FAILED: Phase.FAILED,
        P.DONE: Phase.DONE,
    }
)
"""What the engine is told of each state; PARKED has no request, so there is nobody to tell."""

DECODE_PHASES: Mapping[DecodeState, Phase] = MappingProxyType(
    {
        D.CONNECTING: Phase.WAITING,
        D.OPENING: Phase.WAITING,
        D.ACCEPTED: Phase.WAITING,
        D.RECEIVING: Phase.TRANSFERRING,
        D.ABORTING: Phase.FAILED,
        D.HELD: Phase.FAILED,
        D.FAILED: Phase.FAILED,
        D.DONE: Phase.DONE,
    }
)


class TransitionError(Exception):
    """The code asked for a transition that the table does not have: a fault of the machine itself."""

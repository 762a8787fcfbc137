"""The states of a hand-off on either side, and the one table of transitions by trigger.

The machines derive a trigger from an event and the facts of the attempt, look the next state up here, and can enter no
other. Documentation and tests read the same tables.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from pdpool_connector.protocol.status import Phase


class PrefillState(StrEnum):
    """Prefill's view. The first five have the attempt's own deadline, QUIESCING one of its own, HELD has none."""

    WAITING = "waiting"
    """The engine has a request, and no decode has opened an attempt for it."""
    PARKED = "parked"
    """A decode has opened an attempt, and the engine's request has not come yet."""
    MATCHED = "matched"
    """Request and attempt have met; decode has not offered memory yet."""
    READY = "ready"
    """Decode has offered memory; nothing has been written yet."""
    SENDING = "sending"
    """Writes have been submitted."""
    QUIESCING = "quiescing"
    """It has failed; writes in flight are awaited."""
    HELD = "held"
    """It has failed, and a write may be in flight. The pages stay back until a proof that none is."""
    DONE = "done"
    FAILED = "failed"


class DecodeState(StrEnum):
    """Decode's view. The first three have the attempt's own deadline, ABORTING one of its own, HELD has none."""

    CONNECTING = "connecting"
    """Prefill is not paired yet. Memory may have been offered by the engine; no peer knows it."""
    OPENED = "opened"
    """Prefill has been sent the attempt; the engine has not offered memory."""
    OFFERED = "offered"
    """Prefill has been sent our memory, and may write to it."""
    ABORTING = "aborting"
    """It has failed; a writer may still write, or, where no memory was offered, prefill has not answered yet."""
    HELD = "held"
    """It has failed, and a writer cannot be reached: the pages stay back until it is settled or fenced."""
    DONE = "done"
    FAILED = "failed"


class Trigger(StrEnum):
    """What a transition reacts to, once event and circumstances have been weighed."""

    REQUESTED = "requested"
    """The engine opened it."""
    OPENED = "opened"
    """An attempt came from decode."""
    OFFERED = "offered"
    """Memory was offered: at prefill, decode's `Offer` is here; at decode, it is sent."""
    LINKED = "linked"
    """Prefill is paired; the attempt is sent to it."""
    SUBMITTED = "submitted"
    """The first pages are being written."""
    COMPLETED = "completed"
    """Everything has landed, from every writer, and none writes any more."""
    ENDED = "ended"
    """It failed, and nothing touches the pages."""
    BROKEN = "broken"
    """It failed while the pages may still be touched, or a peer has to be sent the failure."""
    SETTLED = "settled"
    """Nothing touches the pages any more, by the writers' own frames or by proof; or prefill has the failure."""
    UNPROVEN = "unproven"
    """No proof that it is settled came in time, or none can come this way."""


FAILURES = frozenset({Trigger.ENDED, Trigger.BROKEN, Trigger.SETTLED, Trigger.UNPROVEN})
"""Triggers by which a hand-off makes no progress."""

P, D, T = PrefillState, DecodeState, Trigger

PREFILL_LIVE = (P.WAITING, P.PARKED, P.MATCHED, P.READY, P.SENDING)
"""States in which a hand-off makes progress at prefill, the one that is furthest behind first."""
PREFILL_OVER = frozenset(P) - frozenset(PREFILL_LIVE)
"""States in which prefill submits no further write."""
PREFILL_ENDED = frozenset({P.DONE, P.FAILED})

DECODE_LIVE = frozenset({D.CONNECTING, D.OPENED, D.OFFERED})
DECODE_OVER = frozenset(D) - DECODE_LIVE
"""States in which decode waits for no further page."""

PREFILL_QUEUES: Mapping[PrefillState, tuple[str, ...]] = MappingProxyType(
    {
        P.WAITING: ("waiting", "prefill_bootstrap"),
        P.PARKED: ("parked",),
        P.MATCHED: ("matched", "prefill_bootstrap"),
        P.READY: ("ready", "prefill_bootstrap"),
        P.SENDING: ("sending", "prefill_inflight"),
        P.QUIESCING: ("quiescing",),
        P.HELD: ("held",),
    }
)
"""The labels of each state in the queue counts: its own, and the public queue that it belongs to."""

DECODE_QUEUES: Mapping[DecodeState, tuple[str, ...]] = MappingProxyType(
    {
        D.CONNECTING: ("connecting", "decode_transfer"),
        D.OPENED: ("opened",),
        D.OFFERED: ("offered", "decode_transfer"),
        D.ABORTING: ("aborting",),
        D.HELD: ("held",),
    }
)


def is_public_queue(label: str) -> bool:
    """Whether a label names a public queue, which has a side in its name, and not a state."""
    return "_" in label


PREFILL_TRANSITIONS: Mapping[tuple[PrefillState | None, Trigger], PrefillState] = MappingProxyType(
    {
        (None, T.REQUESTED): P.WAITING,
        (None, T.OPENED): P.PARKED,
        (P.WAITING, T.OPENED): P.MATCHED,
        (P.WAITING, T.ENDED): P.FAILED,
        (P.PARKED, T.REQUESTED): P.MATCHED,
        (P.PARKED, T.ENDED): P.FAILED,
        (P.MATCHED, T.OFFERED): P.READY,
        (P.MATCHED, T.ENDED): P.FAILED,
        (P.READY, T.SUBMITTED): P.SENDING,
        (P.READY, T.COMPLETED): P.DONE,
        (P.READY, T.ENDED): P.FAILED,
        (P.SENDING, T.COMPLETED): P.DONE,
        (P.SENDING, T.ENDED): P.FAILED,
        (P.SENDING, T.BROKEN): P.QUIESCING,
        (P.QUIESCING, T.SETTLED): P.FAILED,
        (P.QUIESCING, T.UNPROVEN): P.HELD,
        (P.HELD, T.SETTLED): P.FAILED,
    }
)

DECODE_TRANSITIONS: Mapping[tuple[DecodeState | None, Trigger], DecodeState] = MappingProxyType(
    {
        (None, T.REQUESTED): D.CONNECTING,
        (D.CONNECTING, T.LINKED): D.OPENED,
        (D.CONNECTING, T.ENDED): D.FAILED,
        (D.CONNECTING, T.BROKEN): D.ABORTING,
        (D.OPENED, T.OFFERED): D.OFFERED,
        (D.OPENED, T.ENDED): D.FAILED,
        (D.OPENED, T.BROKEN): D.ABORTING,
        (D.OFFERED, T.COMPLETED): D.DONE,
        (D.OFFERED, T.ENDED): D.FAILED,
        (D.OFFERED, T.BROKEN): D.ABORTING,
        (D.ABORTING, T.SETTLED): D.FAILED,
        (D.ABORTING, T.UNPROVEN): D.HELD,
        (D.HELD, T.SETTLED): D.FAILED,
    }
)

PREFILL_PHASES: Mapping[PrefillState, Phase] = MappingProxyType(
    {
        P.WAITING: Phase.WAITING,
        P.MATCHED: Phase.WAITING,
        P.READY: Phase.READY,
        P.SENDING: Phase.TRANSFERRING,
        P.QUIESCING: Phase.FAILED,
        P.HELD: Phase.FAILED,
        P.FAILED: Phase.FAILED,
        P.DONE: Phase.DONE,
    }
)
"""The phase that the engine sees in each state; PARKED has no request, so no status."""

DECODE_PHASES: Mapping[DecodeState, Phase] = MappingProxyType(
    {
        D.CONNECTING: Phase.WAITING,
        D.OPENED: Phase.WAITING,
        D.OFFERED: Phase.TRANSFERRING,
        D.ABORTING: Phase.FAILED,
        D.HELD: Phase.FAILED,
        D.FAILED: Phase.FAILED,
        D.DONE: Phase.DONE,
    }
)


class TransitionError(Exception):
    """The code asked for a transition that the table does not have: a fault of the machine itself."""

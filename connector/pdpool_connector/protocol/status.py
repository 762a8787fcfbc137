"""What an engine sees of a hand-off: its phase, why it failed, and whether the pages may be given back."""

from enum import StrEnum
from typing import Final

import msgspec


class Phase(StrEnum):
    """Where a hand-off stands, as the engine sees it.

    Prefill: WAITING (decode has not offered memory), READY (destination known), TRANSFERRING, then DONE or FAILED.
    Decode: WAITING (no memory was offered to prefill), TRANSFERRING (prefill may write to it), then DONE or FAILED.
    DONE: all pages have landed, and the aux row if prefill sent one. DONE and FAILED never change again.
    """

    WAITING = "waiting"
    READY = "ready"
    TRANSFERRING = "transferring"
    DONE = "done"
    FAILED = "failed"


class Cause(StrEnum):
    """Root cause of a failed hand-off, one word that labels status, logs and metrics alike."""

    ABORTED = "aborted"
    """The engine on this side aborted it."""
    PEER_ABORTED = "peer_aborted"
    """The engine on the other side aborted it."""
    PURGED = "purged"
    """A purge of one of the sides ended it."""
    REFUSED = "refused"
    """A side would not take it: draining, full, network not allowed."""
    TOO_LONG = "too_long"
    """A side can never take it: prompt and answer are longer than its cache, or its model, has room for."""
    INVALID = "invalid"
    """The two sides do not fit: geometry, protocol version, page ranges."""
    TIMED_OUT = "timed_out"
    """Its deadline passed on one of the sides."""
    PEER_LOST = "peer_lost"
    """The other process ended, restarted, or could not be reached at all."""
    TRANSFER_FAILED = "transfer_failed"
    """The transfer backend reported an error."""
    CORRUPT = "corrupt"
    """The transfer backend reported success, and the checksum of what landed is not that of what was sent."""
    SHUTDOWN = "shutdown"
    """This side's connector was closed."""
    FORGOTTEN = "forgotten"
    """The other side, alive, knows nothing of this attempt any more."""
    INTERNAL = "internal"
    """A fault in the connector itself; it ended this attempt only."""

    def seen_by_peer(self) -> "Cause":
        """The cause that the other side reports when this side failed with this one."""
        return _SEEN_BY_PEER.get(self, self)


_SEEN_BY_PEER = {Cause.ABORTED: Cause.PEER_ABORTED, Cause.SHUTDOWN: Cause.PEER_LOST}


def cause_from_peer(text: str, otherwise: Cause) -> Cause:
    """The cause that this side reports for the one in a peer's frame. `otherwise`: for causes that are unknown here."""
    try:
        return Cause(text).seen_by_peer()
    except ValueError:
        return otherwise


class TransferStatus(msgspec.Struct, frozen=True, gc=False):
    """Immutable snapshot of one hand-off.

    `prefix_pages`: logical pages that decode already holds and prefill need not send (known from READY on).
    `bytes_moved`: bytes that this side knows to have landed. `releasable`: no peer can write (at decode) or read
    (at prefill) the pages and the aux row any more. Only then may the engine give them back. A failed hand-off that is
    not releasable yet still quiesces, or is held. It becomes releasable later, or when the peer is fenced.
    """

    phase: Phase
    cause: Cause | None = None
    message: str = ""
    prefix_pages: int = 0
    bytes_moved: int = 0
    releasable: bool = False

    @property
    def ended(self) -> bool:
        """True for DONE and FAILED."""
        return self.phase is Phase.DONE or self.phase is Phase.FAILED

    @property
    def over(self) -> bool:
        """Whether it has ended, and its pages may be given back."""
        return self.ended and self.releasable


ABORTS: Final = frozenset({Cause.ABORTED, Cause.PEER_ABORTED})
"""Causes for which nothing is at fault: a client has gone."""
JUST_OPENED: Final = TransferStatus(Phase.WAITING)
"""The status of a transfer when `open` returns. The machines report what differs from it."""

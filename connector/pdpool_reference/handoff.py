"""What the scheduler needs of a connector and its transfers, be it one rank's own or those of all ranks together."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import TransferStatus


class Handoff(Protocol):
    """One hand-off; see `Transfer` for what the members mean."""

    @property
    def status(self) -> TransferStatus:
        """How it stands."""

    def abort(self, message: str = "") -> None:
        """Give it up."""


@runtime_checkable
class PrefillHandoff(Handoff, Protocol):
    """One of prefill's; see `PrefillTransfer`."""

    def send(self, pages: NDArray[np.int32], *, start: int, last: bool = False, aux_slot: int | None = None) -> None:
        """Send pages."""


class PrefillHandoffs(Protocol):
    """See `PrefillConnector`."""

    def open(
        self,
        room: int,
        request_id: str,
        *,
        sibling: int = 0,
        prompt: bytes = b"",
        deadline_s: float | None = None,
        traceparent: str | None = None,
    ) -> PrefillHandoff:
        """Announce a request."""

    def beat(self) -> None:
        """The scheduler lives."""

    def drain(self) -> None:
        """Take no new hand-offs."""


class DecodeHandoffs(Protocol):
    """See `DecodeConnector`."""

    def open(
        self,
        prefill: str,
        room: int,
        request_id: str,
        *,
        pages: NDArray[np.int32],
        aux_slot: int,
        sibling: int = 0,
        prompt: bytes = b"",
        deadline_s: float | None = None,
        traceparent: str | None = None,
    ) -> Handoff:
        """Offer memory for the cache of a request."""

    def refuse(
        self, prefill: str, room: int, request_id: str, message: str, *, sibling: int = 0, prompt: bytes = b""
    ) -> None:
        """Say that a request will not be opened."""

    def beat(self) -> None:
        """The scheduler lives."""

    def drain(self) -> None:
        """Take no new hand-offs."""

    def set_queue(self, name: str, reqs: int, oldest_s: float | None, moved_total: int) -> None:
        """Show a queue of the engine's own."""

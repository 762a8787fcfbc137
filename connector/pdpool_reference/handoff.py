"""What the engine needs of a connector and its transfers: of one rank's own, or of all ranks together."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pdpool_connector import Cause, TransferStatus
from pdpool_connector.runtime.validation import AbortCause


class Transfer(Protocol):
    """One hand-off. Members mean what they mean for the connector's transfers."""

    @property
    def status(self) -> TransferStatus:
        """A snapshot of where it stands."""

    def abort(self, message: str, cause: AbortCause = Cause.ABORTED) -> None:
        """Give it up."""


@runtime_checkable
class PrefillSends(Transfer, Protocol):
    """See `PrefillTransfer`."""

    def send(self, pages: NDArray[np.int32], *, start: int, last: bool, aux_slot: int | None = None) -> None:
        """Send pages."""


@runtime_checkable
class DecodeOffers(Transfer, Protocol):
    """See `DecodeTransfer`."""

    def offer(self, pages: NDArray[np.int32], *, aux_slot: int) -> None:
        """Offer memory for the cache."""


class PrefillHandoffs(Protocol):
    """See `PrefillConnector`."""

    def open(
        self, room: int, request_id: str, *, prompt: bytes, deadline_s: float, traceparent: str | None = None
    ) -> PrefillSends:
        """Open a hand-off."""


class DecodeHandoffs(Protocol):
    """See `DecodeConnector`."""

    def open(
        self,
        prefill: str,
        room: int,
        request_id: str,
        *,
        prompt: bytes,
        deadline_s: float,
        traceparent: str | None = None,
    ) -> DecodeOffers:
        """Open a hand-off."""


class Monitor(Protocol):
    """What the scheduler reports to its connector."""

    def beat(self) -> None:
        """The scheduler lives."""

    def set_queue(self, name: str, reqs: int, oldest_s: float | None, moved_total: int) -> None:
        """Show a queue of the engine's own."""


Transfers = Sequence[Transfer | None]
"""The hand-off of each sequence of a request; None for all of a unified engine."""

"""The hand-offs that a connector knows, and which of them have news for the engine."""

import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from pdpool_connector.protocol.status import TransferStatus
from pdpool_connector.runtime.arguments import OnChange
from pdpool_connector.runtime.transfer import Transfer

AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)


class TransferTable(Generic[AnyTransfer]):
    """Hand-offs by handle, until they have ended and their pages are releasable.

    `settle` and `notify` are for the thread whose turn it is, or after the last turn. All else is for any thread.

    Args:
        on_change: Called by `notify` when a status has changed.
    """

    def __init__(self, on_change: OnChange) -> None:
        self._on_change = on_change
        self._has_news = False
        self._known: dict[int, AnyTransfer] = {}
        self._changed: weakref.WeakValueDictionary[int, AnyTransfer] = weakref.WeakValueDictionary()
        self._changed_lock = threading.Lock()

    def __iter__(self) -> Iterator[AnyTransfer]:
        """A copy, for other threads add while this one reads."""
        return iter(list(self._known.values()))

    def get(self, handle: int) -> AnyTransfer | None:
        """The hand-off with a handle; None when it is over."""
        return self._known.get(handle)

    def add(self, transfer: AnyTransfer) -> None:
        """Keep a hand-off that was opened."""
        self._known[transfer._handle] = transfer

    def remove(self, transfer: AnyTransfer) -> bool:
        """Forget a hand-off; False when it was not known."""
        return self._known.pop(transfer._handle, None) is not None

    def settle(self, transfer: AnyTransfer, status: TransferStatus) -> None:
        """Give a hand-off a new status, and forget it if nothing follows."""
        transfer._settle(status)
        with self._changed_lock:
            if not transfer._in_poll:
                transfer._in_poll = True
                self._changed[transfer._handle] = transfer
        self._has_news = True
        if status.over:
            self._known.pop(transfer._handle, None)

    def notify(self) -> None:
        """Call the engine, if there is something new."""
        if self._has_news:
            self._has_news = False
            self._on_change()

    def poll(self) -> list[AnyTransfer]:
        """What changed since the last call, each hand-off once, in order of their changes."""
        with self._changed_lock:
            changed = list(self._changed.values())
            # In this order, so that an interrupt in between loses no later change.
            for transfer in changed:
                transfer._in_poll = False
            self._changed = weakref.WeakValueDictionary()
        return changed

"""One worker's hand-offs: does what the scheduler decided, and reports what is over.

A request is reported once nothing can touch its blocks any more, and never before.
"""

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from pdpool_connector import DecodeConnector, DecodeTransfer, Phase, PrefillConnector, PrefillTransfer

from .scheduler import Step

log = logging.getLogger(__name__)

MAX_ID: Final = 256
"""Longest id of a request that the connector takes. vLLM puts the client's `X-Request-Id` before its own suffix."""


class Results(NamedTuple):
    """Ids of requests that are over. Those that failed are among `received` too."""

    sent: set[str]
    received: set[str]
    failed: set[str]


class PrefillWorker:
    """Sends the pages of requests that are computed.

    Args:
        connector: started.
    """

    def __init__(self, connector: PrefillConnector) -> None:
        self._connector = connector
        self._opened: dict[str, PrefillTransfer] = {}
        self._unanswered: set[str] = set()
        """Requests that are opened, and of whose memory at decode nothing is known."""
        self._sending: dict[str, PrefillTransfer] = {}

    def do(self, step: Step) -> None:
        """Begin what the scheduler decided, and give up what it gave up."""
        self._connector.beat(idle=not (step.requests or step.sends or self._sending))
        for request_id, wanted in step.opens.items():
            self._opened[request_id] = self._connector.open(wanted.room, request_id[-MAX_ID:], prompt=wanted.prompt)
            self._unanswered.add(request_id)
        for request_id, why in step.aborts.items():
            if (given_up := self._opened.pop(request_id, None)) is not None:
                given_up.abort(why)
            self._unanswered.discard(request_id)
        for request_id, send in step.sends.items():
            transfer = self._opened.pop(request_id, None) or self._connector.open(
                send.room, request_id[-MAX_ID:], prompt=send.prompt
            )
            self._sending[request_id] = transfer
            self._unanswered.discard(request_id)
            try:
                transfer.send(send.pages, start=0, last=True)
            except (ValueError, RuntimeError) as error:
                log.exception("the pages of request %s cannot be sent", request_id)
                transfer.abort(f"prefill cannot send: {error}")

    def answered(self) -> set[str]:
        """Return the requests for which decode has memory, or never will, since the last call."""
        found = {one for one in self._unanswered if self._opened[one].status.phase is not Phase.WAITING}
        self._unanswered -= found
        return found

    def results(self) -> Results:
        """Return what is over since the last call."""
        over = {one for one, transfer in self._sending.items() if transfer.status.over}
        for request_id in over:
            _log_failure(request_id, self._sending.pop(request_id))
        return Results(over, set(), set())


class DecodeWorker:
    """Receives the pages of requests that a prefill has computed.

    Args:
        connector: started.
    """

    def __init__(self, connector: DecodeConnector) -> None:
        self._connector = connector
        self._opened: dict[str, DecodeTransfer] = {}
        self._refused: dict[str, str] = {}
        """Why a request that has no transfer cannot have its cache."""
        self._receiving: dict[str, DecodeTransfer | None] = {}
        """Requests that wait for their cache. None: it cannot come."""

    def do(self, step: Step) -> None:
        """Begin what the scheduler decided, and give up what it gave up."""
        self._connector.beat(idle=not (step.requests or self._receiving))
        for request_id, wanted in step.opens.items():
            try:
                transfer = self._connector.open(
                    wanted.bootstrap, wanted.room, request_id[-MAX_ID:], prompt=wanted.prompt
                )
            except ValueError as error:
                self._refused[request_id] = str(error)
            else:
                self._opened[request_id] = transfer
        for request_id, offer in step.offers.items():
            self._receiving[request_id] = self._offered(request_id, offer.pages, offer.prefix_pages)
        for request_id, why in step.aborts.items():
            self._refused.pop(request_id, None)
            given_up = self._opened.pop(request_id, None) or self._receiving.get(request_id)
            if given_up is not None:
                given_up.abort(why)

    def _offered(self, request_id: str, pages: Sequence[int], prefix_pages: int) -> DecodeTransfer | None:
        transfer = self._opened.pop(request_id, None)
        if transfer is None:
            log.warning("request %s has no hand-off: %s", request_id, self._refused.pop(request_id, "none was opened"))
            return None
        try:
            transfer.offer(pages, prefix_pages=prefix_pages)
        except (ValueError, RuntimeError) as error:
            log.exception("memory for request %s cannot be offered", request_id)
            transfer.abort(f"decode cannot offer memory: {error}")
            return None
        return transfer

    def answered(self) -> set[str]:
        """Decode waits for nothing before it has memory."""
        return set()

    def results(self) -> Results:
        """Return what is over since the last call."""
        received, failed = set(), set()
        for request_id, transfer in self._receiving.items():
            if transfer is None:
                failed.add(request_id)
            elif transfer.status.over:
                received.add(request_id)
                if _log_failure(request_id, transfer):
                    failed.add(request_id)
        received |= failed
        for request_id in received:
            del self._receiving[request_id]
        return Results(set(), received, failed)


def _log_failure(request_id: str, transfer: PrefillTransfer | DecodeTransfer) -> bool:
    """Return whether a hand-off that is over has failed."""
    status = transfer.status
    if status.phase is not Phase.FAILED:
        return False
    log.warning("hand-off of request %s failed: %s: %s", request_id, status.cause, status.message)
    return True

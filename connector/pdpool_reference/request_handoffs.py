"""Opens the hand-offs of requests as they arrive, on the HTTP side.

The scheduler may be frozen or in a long step. The other engine must learn of the request nevertheless: its half waits
for ours for a short time only (`Timeouts.match_s`).
"""

import contextlib
from collections.abc import Iterator

from pdpool_connector import Cause
from pdpool_connector.runtime.validation import AbortCause

from pdpool_reference.handoff import DecodeHandoffs, PrefillHandoffs, Transfer, Transfers
from pdpool_reference.request import DEFAULT_DEADLINE_S, Handoff, RequestError, TooLongError
from pdpool_reference.request_body import Job, first_handoff

REFUSAL_S = 60.0
"""Deadline of a half that is opened only to be refused."""


class RequestHandoffs:
    """The hand-offs of one engine's requests. All methods are called on the HTTP side's thread.

    Args:
        prefill: the connector of a prefill engine, else None.
        decode: the connector of a decode engine, else None.
    """

    def __init__(self, prefill: PrefillHandoffs | None, decode: DecodeHandoffs | None) -> None:
        self._prefill = prefill
        self._decode = decode

    def open(self, job: Job, traceparent: str | None) -> Transfers:
        """Open a hand-off for each sequence of a job; all or none.

        Raises:
            RequestError: the connector refused an argument.
        """
        opened: list[Transfer | None] = []
        try:
            for rid, handoff in zip(job.rids, job.handoffs, strict=True):
                opened.append(self._open(rid, handoff, DEFAULT_DEADLINE_S, traceparent) if handoff else None)
        except ValueError as error:
            abort_all(opened, str(error), Cause.INVALID)
            raise RequestError(str(error), code="invalid_handoff") from None
        return opened

    @contextlib.contextmanager
    def refusing(self, raw: bytes) -> Iterator[None]:
        """Send the other engine the reason when the block raises: `raw` is the body of a request not opened yet."""
        try:
            yield
        except RequestError as error:
            self._refuse(raw, error.message, cause_of(error))
            raise
        except BaseException:
            self._refuse(raw, "the request ended before the engine had read it", Cause.ABORTED)
            raise

    def _refuse(self, raw: bytes, message: str, cause: AbortCause) -> None:
        if (first := first_handoff(raw)) is None:
            return
        rid, handoff = first
        # ValueError: the address or the id is wrong, so that no other engine has it. RuntimeError: this engine ends.
        with contextlib.suppress(ValueError, RuntimeError):
            if (transfer := self._open(rid, handoff, REFUSAL_S)) is not None:
                transfer.abort(message, cause)

    def _open(self, rid: str, handoff: Handoff, deadline_s: float, traceparent: str | None = None) -> Transfer | None:
        prompt, room = handoff.prompt, handoff.room
        if self._prefill is not None:
            return self._prefill.open(room, rid, prompt=prompt, deadline_s=deadline_s, traceparent=traceparent)
        if self._decode is not None:
            prefill = handoff.prefill
            return self._decode.open(prefill, room, rid, prompt=prompt, deadline_s=deadline_s, traceparent=traceparent)
        return None


def cause_of(error: RequestError) -> AbortCause:
    """Return the cause for the other engine. Only `REFUSED` says something against this engine."""
    if isinstance(error, TooLongError):
        return Cause.TOO_LONG
    return Cause.REFUSED if error.status >= 500 else Cause.INVALID


def abort_all(transfers: Transfers, message: str, cause: AbortCause) -> None:
    """Abort the hand-offs of a request that the scheduler has not taken."""
    for transfer in transfers:
        if transfer is not None:
            transfer.abort(message, cause)

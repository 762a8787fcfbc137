"""One half of a hand-off as SGLang's scheduler holds it: what sender and receiver have in common."""

from typing import Any, Final

from pdpool_connector import Cause, DecodeTransfer, Phase, PrefillTransfer, TransferStatus, client_answer, prompt_digest

from . import surface

ROOM_RANGE: Final = range(1, 1 << 63)


class HandoffFailed(RuntimeError):  # noqa: N818 - SGLang's scheduler puts its text into the answer
    """What `failure_exception` raises. `is_from_another_rank`: this rank's own half has not failed."""

    def __init__(self, status: TransferStatus) -> None:
        answer = client_answer(status)
        super().__init__(f"[{answer.status} {answer.code}] {answer.message}")
        self.status = answer.status
        self.failure_reason = answer.message
        self.is_from_another_rank = status.cause is None


class Half:
    """The transfer of one request, its status, and how its failure reaches the client.

    Attributes:
        room: None if the request has none, or one that is refused.
        transfer: None as long as nothing was opened.
        concluded: the scheduler has aborted the request or asked why it failed. It does so on all ranks alike.
    """

    def __init__(self, room: object, request: Any) -> None:  # noqa: ANN401 - SGLang's Req
        # A client may send a list. `in` would compare it with every number of the range.
        self.room = room if isinstance(room, int) and room in ROOM_RANGE else None
        self.transfer: PrefillTransfer | DecodeTransfer | None = None
        self.concluded = False
        self._request = request
        self._unopened = TransferStatus(Phase.WAITING)
        if self.room is None:
            self.refuse(f"bootstrap_room is {room}, must be 1 to 2**63 - 1: SGLang takes 0 for 'not written'")

    @property
    def status(self) -> TransferStatus:
        """The transfer's, or that of a request for which none was opened."""
        return self.transfer.status if self.transfer is not None else self._unopened

    def refuse(self, message: str) -> None:
        """Fail as invalid, before a transfer is opened."""
        self._unopened = TransferStatus(Phase.FAILED, Cause.INVALID, message, releasable=True)

    def give_up(self, message: str) -> None:
        """Abort the hand-off. One that has ended stays as it ended."""
        if self.transfer is not None:
            self.transfer.abort(message)
        elif not self._unopened.ended:
            self._unopened = TransferStatus(Phase.FAILED, Cause.ABORTED, message, releasable=True)

    @property
    def request_id(self) -> str:
        """The name that this engine has for the request."""
        return surface.rid_of(self._request)

    def conclude(self, message: str) -> None:
        """The scheduler gives the request up."""
        self.concluded = True
        self.give_up(message)

    def failure(self) -> HandoffFailed:
        """Why the request failed; the client's answer gets its HTTP status."""
        self.concluded = True
        error = HandoffFailed(self.status)
        self.give_up("the request failed on another rank of this instance")
        if self._request is not None:
            surface.set_answer(self._request, error.status)
        return error

    def end(self) -> None:
        """SGLang has no more use for this half."""
        if self.transfer is not None and not self.status.ended:
            self.give_up("the engine has dropped the request")
        self._request = None

    def digest(self, *, recomputed: bool = False) -> bytes:
        """Digest of the request's prompt, the same on both sides.

        Args:
            recomputed: prefill is asked to compute prompt and output; its prompt is both.
        """
        tokens = surface.recomputed_tokens(self._request) if recomputed else surface.prompt_tokens(self._request)
        return prompt_digest(tokens)

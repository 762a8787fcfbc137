"""What the client of a failed hand-off gets: one table from cause to HTTP status and code, for both sides' engines."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pdpool_connector.protocol.status import Cause, TransferStatus


class Answer(NamedTuple):
    """An HTTP status, a word for programs, and a text for people.

    Before the first byte of a response it is the response: `status`, and a body that names `code` and `message`. Once a
    stream has begun it is an event of the same body, and the stream ends after it without its usual end (`[DONE]`), so
    that it does not look whole.
    """

    status: int
    code: str
    message: str


ANSWERS: Mapping[Cause, tuple[int, str]] = MappingProxyType(
    {
        Cause.ABORTED: (503, "aborted"),
        Cause.PEER_ABORTED: (502, "peer_aborted"),
        Cause.SUPERSEDED: (409, "superseded"),
        Cause.REFUSED: (503, "refused"),
        Cause.TOO_LONG: (400, "context_length_exceeded"),
        Cause.CONFLICT: (409, "room_in_use"),
        Cause.INVALID: (502, "handoff_invalid"),
        Cause.TIMED_OUT: (504, "timed_out"),
        Cause.PEER_LOST: (502, "peer_lost"),
        Cause.TRANSFER_FAILED: (502, "transfer_failed"),
        Cause.CORRUPT: (502, "transfer_corrupt"),
        Cause.SHUTDOWN: (503, "shutting_down"),
        Cause.FORGOTTEN: (502, "peer_forgot"),
        Cause.INTERNAL: (500, "connector_fault"),
    }
)
"""Status and code by cause. SGLang's router tries 500, 502, 503 and 504 again with another pair; 400 and 409 it hands
on: then the request is the client's to change, or alive elsewhere."""


def client_answer(status: TransferStatus) -> Answer:
    """What to tell the client of a hand-off that has failed. Raises ValueError for one that has not."""
    if status.cause is None:
        raise ValueError(f"the hand-off is {status.phase}, it has not failed: there is nothing to answer")
    return answer_for(status.cause, status.message)


def answer_for(cause: Cause, message: str) -> Answer:
    """The same for a failure that the engine itself has found."""
    number, code = ANSWERS[cause]
    return Answer(number, code, f"the hand-off failed: {message or code}")

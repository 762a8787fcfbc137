"""The HTTP answer to the client of a failed hand-off: one table from cause to status and code, for both sides."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pdpool_connector.protocol.status import Cause, TransferStatus


class Answer(NamedTuple):
    """An HTTP status, a code for programs, and a message for people.

    Before the first byte of a response it is the response: `status`, and a body with `code` and `message`. In a stream
    that has begun it is an event with the same body. The stream then ends without `[DONE]`, so that it does not look
    complete.
    """

    status: int
    code: str
    message: str


ANSWERS: Mapping[Cause, tuple[int, str]] = MappingProxyType(
    {
        Cause.ABORTED: (503, "aborted"),
        Cause.PEER_ABORTED: (502, "peer_aborted"),
        Cause.PURGED: (503, "purged"),
        Cause.REFUSED: (503, "refused"),
        Cause.TOO_LONG: (400, "context_length_exceeded"),
        Cause.INVALID: (400, "handoff_invalid"),
        Cause.TIMED_OUT: (504, "timed_out"),
        Cause.PEER_LOST: (502, "peer_lost"),
        Cause.TRANSFER_FAILED: (502, "transfer_failed"),
        Cause.CORRUPT: (502, "transfer_corrupt"),
        Cause.SHUTDOWN: (503, "shutting_down"),
        Cause.FORGOTTEN: (502, "peer_forgot"),
        Cause.INTERNAL: (500, "connector_fault"),
    }
)
"""Status and code by cause. SGLang's router passes 400 on to the client: the request has to change, or the two pools do
not fit, and another pair of them does not fit either. It tries every other failure again with another pair."""

PEER_RANK_FAILED = (502, "peer_rank_failed")


def client_answer(status: TransferStatus) -> Answer:
    """The answer to the client of a failed hand-off.

    A status without a cause is that of a rank which has not failed itself: the request failed on another rank.
    """
    if status.cause is None:
        number, code = PEER_RANK_FAILED
        return Answer(number, code, "the hand-off failed on another rank of this instance")
    return answer_for(status.cause, status.message)


def answer_for(cause: Cause, message: str) -> Answer:
    """The answer for a failure that the engine itself has found."""
    number, code = ANSWERS[cause]
    return Answer(number, code, f"the hand-off failed: {message or code}")

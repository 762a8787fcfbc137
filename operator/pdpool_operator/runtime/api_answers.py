"""Reads answers of the API server: an object, an event of a watch, or an error by its type. Pure.

Content that the API server never sends comes from a proxy, and counts as no answer.
"""

import json

from .api_errors import (
    ApiError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from .resources import Object

NOT_OF_THE_SCHEMA = ("failed to create typed patch object", "failed to convert new ")
"""Prefixes of the messages of a 500 by which the API server rejects an object that server-side apply cannot read.

Such an object has an unknown field, or a number in place of a string (apimachinery,
managedfields/internal/structuredmerge.go).
"""

ERRORS: dict[int, type[ApiError]] = {
    400: InvalidError,
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    422: InvalidError,
    429: UnavailableError,
}


def error_of(status: int, body: bytes, what: str) -> ApiError:
    """Return the error of an answer to the call `what`. The body is a `Status`, or any text."""
    try:
        answer = json.loads(body)
        reason, message = str(answer.get("reason", "")), str(answer.get("message", ""))
    except (ValueError, AttributeError):
        reason, message = "", body[:200].decode(errors="replace")
    kind = ERRORS.get(status, UnavailableError if status >= 500 else ApiError)
    if status == 500 and message.startswith(NOT_OF_THE_SCHEMA):
        kind = InvalidError
    return kind(status, reason, message, what)


def object_of(body: bytes, what: str) -> Object:
    """Return the object in an answer.

    Raises:
        UnavailableError: there is none.
    """
    try:
        parsed = json.loads(body)
    except ValueError as error:
        raise UnavailableError(0, "NoJSON", str(error), what) from error
    if not isinstance(parsed, dict):
        raise UnavailableError(0, "NoObject", f"{type(parsed).__name__} instead of an object", what)
    return parsed


def event_of(line: bytes, what: str) -> Object:
    """Return an event of a watch.

    Raises:
        GoneError: it is an error, after which the watch cannot go on.
        UnavailableError: it is no event.
    """
    event = object_of(line, what)
    match event:
        case {"type": "ERROR", "object": status}:
            message = status.get("message", "") if isinstance(status, dict) else str(status)
            raise GoneError(410, "WatchError", message, what)
        case {"type": str(), "object": {"metadata": {"resourceVersion": str()}}}:
            return event
    raise UnavailableError(0, "NoEvent", f"not an event of a watch: {line[:100]!r}", what)

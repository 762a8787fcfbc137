"""Errors of calls to the API server, by what the caller can do about them."""


class ApiError(Exception):
    """The API server answered with an error. `message` is in its own words."""

    def __init__(self, status: int, reason: str, message: str, what: str) -> None:
        super().__init__(f"{what}: {message or reason} ({status})")
        self.status = status
        self.reason = reason
        self.message = message


class NotFoundError(ApiError):
    """404: no such object."""


class ConflictError(ApiError):
    """409: a precondition failed, or another writer was faster."""


class GoneError(ApiError):
    """410: the history of the API server does not reach back that far."""


class InvalidError(ApiError):
    """400 or 422: the object is rejected."""


class ForbiddenError(ApiError):
    """401 or 403: not allowed, possibly by quota or an admission policy."""


class UnavailableError(ApiError):
    """The server is busy, unreachable or too slow. The outcome of a write is unknown."""


class NameConflictError(Exception):
    """A foreign object exists under a name that we need."""

    def __init__(self, kind: str, name: str, owner: str) -> None:
        super().__init__(f"{kind} {name} exists and belongs to {owner}; rename or delete one of the two")

"""The leader Lease in the API server."""

from collections.abc import Mapping
from typing import Any

from .api import Api
from .api_errors import ApiError, ConflictError
from .lease import LeaseConflictError, LeaseUnavailableError
from .resources import LEASES

CALL_TIMEOUT_S = 3.0
"""Deadline of one call. It is short enough that a renewal can be repeated before the leader must stop."""


class ApiLease:
    """A LeaseStore in the API server.

    Its `api` has no leader guard and has its own connections, so that nothing delays a renewal.
    """

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name

    async def read(self) -> Mapping[str, Any] | None:
        """Return the Lease object, or None; raises LeaseUnavailableError."""
        try:
            return await self._api.get(LEASES, self._namespace, self._name)
        except ApiError as error:
            raise LeaseUnavailableError(str(error)) from error

    async def write(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace or create; raises LeaseConflictError or LeaseUnavailableError."""
        write = self._api.replace if body["metadata"].get("resourceVersion") else self._api.create
        try:
            return await write(LEASES, body)
        except ConflictError as error:
            raise LeaseConflictError(str(error)) from error
        except ApiError as error:
            raise LeaseUnavailableError(str(error)) from error

"""How observation reads objects: the interface that the API client and the watched objects share."""

from collections.abc import AsyncIterator
from typing import Protocol

from ..runtime.resources import Object, Resource


class Reads(Protocol):
    """Reads objects."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return the object, or None."""

    def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: str = "",
        fields: str = "",
        *,
        metadata_only: bool = False,
    ) -> AsyncIterator[Object]:
        """Yield all objects that match the selectors."""


async def listed(
    reads: Reads, resource: Resource, namespace: str, labels: str = "", fields: str = "", *, metadata_only: bool = False
) -> list[Object]:
    """Return all objects that match the selectors."""
    return [obj async for obj in reads.list(resource, namespace, labels, fields, metadata_only=metadata_only)]

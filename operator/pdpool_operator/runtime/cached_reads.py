"""Reads watched objects from the store, and everything else from the API server.

The store answers while its feed was confirmed within `TRUSTED_S`. What it does not watch is read live: events, other
objects without our labels, and all objects while a watch is down for longer.
"""

from collections.abc import AsyncIterator, Callable, Collection

from .api import Api
from .resources import Object, Resource
from .store import Store
from .watch_feeds import NOTICED_S

TRUSTED_S = NOTICED_S
"""Age up to which the store answers. A feed that fails is older than that only while the API server is out of reach."""


class CachedReads:
    """`get` and `list` as `Api` has them.

    Args:
        age_s: returns how old the known objects of a resource in a namespace may be.
        whole: resources of which all objects are watched. Of the others, only those with `group` labels are.
        group: prefix of the labels that only watched objects have.
    """

    def __init__(
        self,
        api: Api,
        store: Store,
        age_s: Callable[[Resource, str | None], float],
        whole: Collection[Resource],
        group: str,
    ) -> None:
        self._api, self._store, self._age_s = api, store, age_s
        self._whole, self._group = frozenset(whole), group

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return the object, or None. Foreign objects are not seen here: the API client finds them when it applies."""
        if self._age_s(resource, namespace) > TRUSTED_S:
            return await self._api.get(resource, namespace, name)
        return self._store.get(resource, namespace, name)

    async def list(
        self,
        resource: Resource,
        namespace: str | None,
        labels: str = "",
        fields: str = "",
        *,
        metadata_only: bool = False,
    ) -> AsyncIterator[Object]:
        """Yield all objects that match the selectors. They belong to the store: do not change them."""
        wanted = dict(part.split("=", 1) for part in labels.split(",") if part)
        watched = resource in self._whole or any(key.startswith(self._group) for key in wanted)
        if fields or not watched or self._age_s(resource, namespace) > TRUSTED_S:
            async for obj in self._api.list(resource, namespace, labels, fields, metadata_only=metadata_only):
                yield obj
        else:
            for obj in self._store.all(resource, namespace, wanted):
                yield obj

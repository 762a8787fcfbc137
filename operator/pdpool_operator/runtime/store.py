"""The newest known state of all watched objects: what lists and watches showed, and the operator's own writes.

An object is replaced only by a newer one. Versions of one resource are whole numbers and may be compared (Kubernetes
1.35, KEP-5504). Earlier API servers follow the same rule.
"""

from collections.abc import Callable, Mapping, Sequence

from ..api.names import has_labels
from .bounded_map import BoundedMap
from .resources import PODS, Object, Resource

DELETED_LIMIT = 4096
"""UIDs of deleted objects that are remembered. A late answer to a write must not bring one of them back."""

WITHOUT_OWNERS = frozenset({PODS})
"""Resources whose field owners are not used. `managedFields` are more than half of a pod's memory (63 KB)."""

Place = tuple[str, str]
"""Namespace and name."""


class Store:
    """Watched objects by resource, namespace and name. `on_gone` gets each object that a list shows as deleted.

    Objects belong to the store: readers must not change them.
    """

    def __init__(self, on_gone: Callable[[Object], None] = lambda _: None) -> None:
        self._objects: dict[Resource, dict[str, dict[str, Object]]] = {}
        self._deleted = BoundedMap[str, None](DELETED_LIMIT)
        self._on_gone = on_gone

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return an object, or None."""
        return self._objects.get(resource, {}).get(namespace, {}).get(name)

    def all(self, resource: Resource, namespace: str | None, labels: Mapping[str, str]) -> list[Object]:
        """Return the objects that have all of these labels."""
        spaces = self._objects.get(resource, {})
        some = spaces.values() if namespace is None else [spaces.get(namespace, {})]
        return [obj for space in some for obj in space.values() if has_labels(obj, labels)]

    def put(self, resource: Resource, obj: Object) -> None:
        """Take in a state, unless a newer one is known or the object is deleted."""
        meta = obj["metadata"]
        known = self.get(resource, meta["namespace"], meta["name"])
        if meta["uid"] in self._deleted or (known is not None and not _newer(obj, known)):
            return
        space = self._objects.setdefault(resource, {}).setdefault(meta["namespace"], {})
        if resource in WITHOUT_OWNERS:
            obj = obj | {"metadata": {field: value for field, value in meta.items() if field != "managedFields"}}
        space[meta["name"]] = obj | {"apiVersion": resource.api_version, "kind": resource.kind}

    def drop(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Forget an object that was deleted, if it has this UID."""
        self._deleted[uid] = None
        known = self.get(resource, namespace, name)
        if known is not None and known["metadata"]["uid"] == uid:
            del self._objects[resource][namespace][name]

    def listed(self, resource: Resource, namespace: str | None, objects: Sequence[Object], version: str) -> None:
        """Take in a complete list. An older object that is not in it was deleted."""
        there = {obj["metadata"]["uid"] for obj in objects}
        for obj in self.all(resource, namespace, {}):
            meta = obj["metadata"]
            if meta["uid"] not in there and int(meta["resourceVersion"]) <= int(version):
                self.drop(resource, meta["namespace"], meta["name"], meta["uid"])
                self._on_gone(obj)
        for obj in objects:
            self.put(resource, obj)

    def changed(self, resource: Resource, type_: str, obj: Object) -> None:
        """Take in a change from a watch."""
        meta = obj["metadata"]
        if type_ == "DELETED":
            self.drop(resource, meta["namespace"], meta["name"], meta["uid"])
        else:
            self.put(resource, obj)


def _newer(obj: Object, known: Object) -> bool:
    return int(obj["metadata"]["resourceVersion"]) > int(known["metadata"]["resourceVersion"])

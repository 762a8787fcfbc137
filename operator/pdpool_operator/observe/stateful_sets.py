"""Finds the StatefulSets of a pool: those that it owns, that carry its labels, or that occupy a name that it needs.

A StatefulSet whose labels were removed is still the pool's. So all of the namespace are looked at. Pure.
"""

from collections.abc import Iterable

from ..api import names
from ..api.pools import Pool
from ..runtime.resources import Object
from . import parse


def pool_stateful_sets(pool: Pool, stateful_sets: Iterable[Object]) -> list[tuple[int, Object]]:
    """Return the pool's, each with the index of its instance."""
    name, role = pool.metadata.name, pool.role
    selector, all_labels = names.pool_selector(name, role), names.pool_labels(name, role)
    indexed = [(index, sts) for sts in stateful_sets if (index := _index(sts, name, role)) is not None]
    owned = {
        index: sts
        for index, sts in indexed
        if (owner := parse.controller_uid(sts)) == pool.metadata.uid
        or (not owner and names.has_labels(sts, all_labels))
    }
    present = [sts for sts in owned.values() if "deletionTimestamp" not in sts["metadata"]]
    needed = names.free_indexes(owned, pool.spec.replicas - len(present))
    return [
        (index, sts) for index, sts in indexed if index in owned or index in needed or names.has_labels(sts, selector)
    ]


def pods_by_owner(pods: Iterable[Object]) -> dict[str, Object]:
    """Return one pod of each StatefulSet, by UID: one that does not terminate goes first, else the newest."""
    return {parse.controller_uid(pod): pod for pod in sorted(pods, key=_age)}


def _index(sts: Object, pool: str, role: names.Role) -> int | None:
    """Return the instance's number if the object's name follows our scheme."""
    prefix, name = names.instance(pool, role, 0).removesuffix("0"), str(sts["metadata"]["name"])
    number = name.removeprefix(prefix)
    return int(number) if name.startswith(prefix) and number.isdecimal() and number == str(int(number)) else None


def _age(pod: Object) -> tuple[bool, str]:
    return "deletionTimestamp" not in pod["metadata"], pod["metadata"]["creationTimestamp"]

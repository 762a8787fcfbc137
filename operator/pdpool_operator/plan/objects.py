"""Rules for the objects beside the workloads: ownership, and when they are applied."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..api.models import DisaggregatedService, Pool
from ..api.names import ANNOTATION_BUILD_HASH
from ..api.reasons import Reason
from ..observe.model import FieldOwners, ObservedObject
from .model import Delete, Fault, Plan, Progress

TAKEN_POLL_S = 10.0
"""How often to check while a name is taken. No event announces the deletion of an object that is not ours."""


@dataclass(frozen=True, slots=True)
class Standing:
    """An existing object under one of our names."""

    kind: str
    name: str
    controller_uid: str
    controller: str
    """As `kind/name`."""


def blocked(owner: Pool | DisaggregatedService, standing: Iterable[Standing]) -> Plan | None:
    """Return a plan that does nothing but report the conflict while names of ours are taken; None if none is.

    An object of an earlier owner with the same name is being deleted, so the plan waits for that. Any other object is
    an error that the user must fix.
    """
    others = [one for one in standing if one.controller_uid != owner.metadata.uid]
    former = f"{owner.kind}/{owner.metadata.name}"
    foreign = [one for one in others if one.controller != former]
    if foreign:
        faults = (
            f"{one.kind} {one.name} exists and belongs to another owner; rename or delete one of the two"
            for one in foreign
        )
        return Plan(
            faults=tuple(Fault(Reason.NAME_CONFLICT, message) for message in faults), requeue_after_s=TAKEN_POLL_S
        )
    if others:
        what = ", ".join(f"{one.kind} {one.name}" for one in others[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        message = f"Waiting for {what}{more} of an earlier {owner.kind} {owner.metadata.name} to be deleted"
        return Plan(progress=Progress(Reason.STARTING, message), requeue_after_s=TAKEN_POLL_S)
    return None


def missing_or_changed(
    wanted: Iterable[dict[str, Any]], present: Iterable[ObservedObject]
) -> tuple[dict[str, Any], ...]:
    """Return the desired objects that are missing, built differently, or edited by others."""
    found = {(one.kind, one.name): one for one in present}

    def stands(obj: dict[str, Any]) -> bool:
        one = found.get((obj["kind"], obj["metadata"]["name"]))
        if one is None or one.build_hash != obj["metadata"]["annotations"][ANNOTATION_BUILD_HASH]:
            return False
        return not edited(obj, one.owners)

    return tuple(obj for obj in wanted if not stands(obj))


def surplus_policies(wanted: Iterable[dict[str, Any]], present: Iterable[ObservedObject]) -> tuple[Delete, ...]:
    """Delete the NetworkPolicies of ours that are no longer wanted: the operator's settings have turned them off."""
    names = {obj["metadata"]["name"] for obj in wanted if obj["kind"] == "NetworkPolicy"}
    return tuple(
        Delete(one.kind, one.name, one.uid) for one in present if one.kind == "NetworkPolicy" and one.name not in names
    )


def edited(obj: Mapping[str, Any], owners: FieldOwners) -> bool:
    """Whether another manager has set a field that we set in `obj`, which takes it from us.

    Applying takes the field back. Fields that we do not set do not count. Fields without an owner do not count either:
    an older API server drops some.
    """
    return any(_overridden(obj, owners.ours, theirs) for theirs in owners.others)


def _overridden(value: object, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Compare field owners below `value`. `ours` and `theirs` are the owned fields, under fieldsV1 names."""
    return any(
        name in theirs and (name not in ours or _overridden(below, ours[name], theirs[name]))
        for name, below in _named(value, theirs)
    )


def _named(value: object, fields: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Items below `value` by fieldsV1 names: `f:KEY` in a map, `k:{KEYS}` in a list whose items have keys."""
    if isinstance(value, Mapping):
        yield from ((f"f:{key}", below) for key, below in value.items())
    elif isinstance(value, list | tuple):
        for name in fields:
            keys = json.loads(name.removeprefix("k:")) if name.startswith("k:") else None
            if keys is not None:
                same = (one for one in value if all(one.get(key, keys[key]) == keys[key] for key in keys))
                yield from ((name, one) for one in same)

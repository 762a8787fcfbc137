"""Rules for the objects beside the workloads: ownership, and when they are applied."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..api import names
from ..api.names import ANNOTATION_BUILD_HASH
from ..api.pools import Pool
from ..api.reasons import Reason
from ..api.services import DisaggregatedService
from ..api.wording import some
from ..build.common import owner_reference
from ..observe.model import FieldOwners, ObservedObject
from .model import Adopt, Delete, Event, EventType, Fault, Plan, Progress

TAKEN_POLL_S = 10.0
"""How often to check while a name is taken. No event announces the deletion of an object that is not ours."""

EDITED, LOST, UNLABELLED = "another client had changed it", "it was missing", "it had lost labels"
"""Why an object was restored."""

ADOPTED_POLL_S = 1.0
"""Delay after an adoption, before the next steps."""


class ExistingObject(Protocol):
    """An existing object under one of our names."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def uid(self) -> str: ...  # noqa: D102

    @property
    def controller_uid(self) -> str: ...  # noqa: D102

    @property
    def controller(self) -> str:
        """As `kind/name`."""

    @property
    def labelled(self) -> bool:
        """It carries our labels."""


def blocked(owner: Pool | DisaggregatedService, standing: Iterable[tuple[str, ExistingObject]]) -> Plan | None:
    """Return a plan that does nothing but report the conflict while names of ours are taken; None if none is.

    - Another controller has the object: an error that the user must fix.
    - No controller, and our labels: the object is adopted. `kubectl delete --cascade=orphan` leaves such objects.
    - No controller, and other labels: an error, with the command that hands the object over.
    - An object of an earlier owner with the same name is being deleted: the plan waits for that.

    The Secret with the keys has no owner, because all pools and services of the namespace share it.

    Args:
        owner: the pool or service.
        standing: the existing objects with their kinds.
    """
    owned = [(kind, one) for kind, one in standing if kind != "Secret"]
    others = [(kind, one) for kind, one in owned if one.controller_uid != owner.metadata.uid]
    faults = tuple(fault for kind, one in others if (fault := _fault(owner, kind, one)) is not None)
    if faults:
        return Plan(faults=faults, requeue_after_s=TAKEN_POLL_S)
    orphans = [(kind, one) for kind, one in others if not one.controller_uid]
    if orphans:
        return _adopt(owner, orphans)
    if others:
        what = some([f"{kind} {one.name}" for kind, one in others])
        message = f"Waiting for {what} of an earlier {owner.kind} {owner.metadata.name} to be deleted"
        return Plan(progress=Progress(Reason.STARTING, message), requeue_after_s=TAKEN_POLL_S)
    return None


def _fault(owner: Pool | DisaggregatedService, kind: str, one: ExistingObject) -> Fault | None:
    """Return why an object of another or no controller cannot be ours."""
    if one.controller_uid:
        if one.controller == f"{owner.kind}/{owner.metadata.name}":
            return None
        other = " ".join(one.controller.split("/"))
        message = f"{kind} {one.name} belongs to {other}; rename or delete one of the two"
        return Fault(Reason.NAME_CONFLICT, message)
    if one.labelled:
        return None
    labels = " ".join(f"{key}={value}" for key, value in _labels(owner).items())
    hand_over = f"kubectl label --overwrite -n {owner.metadata.namespace} {kind.lower()} {one.name} {labels}"
    message = f"{kind} {one.name} exists and has no controller; delete it, or hand it over with: {hand_over}"
    return Fault(Reason.NO_CONTROLLER, message)


def _labels(owner: Pool | DisaggregatedService) -> dict[str, str]:
    if isinstance(owner, Pool):
        return names.pool_labels(owner.metadata.name, owner.role)
    return names.router_labels(owner.metadata.name)


def _adopt(owner: Pool | DisaggregatedService, orphans: Sequence[tuple[str, ExistingObject]]) -> Plan:
    reference = owner_reference(owner)
    what = some([f"{kind} {one.name}" for kind, one in orphans])
    return Plan(
        adopt=tuple(Adopt(kind, one.name, one.uid, reference) for kind, one in orphans),
        events=(Event(EventType.NORMAL, Reason.OBJECT_ADOPTED, f"Adopted {what}, which had no controller"),),
        progress=Progress(Reason.ADOPTING, f"Adopting {what}, which had no controller"),
        requeue_after_s=ADOPTED_POLL_S,
    )


def restored(wanted: Iterable[dict[str, Any]], present: Iterable[ObservedObject], *, set_up: bool) -> tuple[Event, ...]:
    """Return an event for objects that were edited, or that are missing although the owner was set up before."""
    found = {(one.kind, one.name): one for one in present}
    edits: list[str] = []
    unlabelled: list[str] = []
    lost: list[str] = []
    for obj in wanted:
        what = f"{obj['kind']} {obj['metadata']['name']}"
        one = found.get((obj["kind"], obj["metadata"]["name"]))
        if one is None and set_up and obj["kind"] != "Secret":  # nothing shows whether a Secret exists
            lost.append(what)
        elif one is not None and lost_labels(obj["metadata"]["labels"], one.labels):
            unlabelled.append(what)
        elif one is not None and _build_hash(obj) == one.build_hash and edited(obj, one.owners):
            edits.append(what)
    return (*restored_events(edits, EDITED), *restored_events(unlabelled, UNLABELLED), *restored_events(lost, LOST))


def restored_events(objects: Sequence[str], why: str) -> tuple[Event, ...]:
    """Return the event for restored objects, if there are any."""
    if not objects:
        return ()
    return (Event(EventType.NORMAL, Reason.OBJECT_RESTORED, f"Restored {some(objects)}: {why}"),)


def _build_hash(obj: Mapping[str, Any]) -> str:
    return str(obj["metadata"]["annotations"][ANNOTATION_BUILD_HASH])


def missing_or_changed(
    wanted: Iterable[dict[str, Any]], present: Iterable[ObservedObject]
) -> tuple[dict[str, Any], ...]:
    """Return the desired objects that are missing, built differently, or edited by others."""
    found = {(one.kind, one.name): one for one in present}

    def stands(obj: dict[str, Any]) -> bool:
        one = found.get((obj["kind"], obj["metadata"]["name"]))
        if one is None or one.build_hash != _build_hash(obj):
            return False
        return not (edited(obj, one.owners) or lost_labels(obj["metadata"]["labels"], one.labels))

    return tuple(obj for obj in wanted if not stands(obj))


def lost_labels(wanted: Mapping[str, str], present: Mapping[str, str] | None) -> dict[str, str]:
    """Return the labels that an object should have and does not have.

    The owners of fields do not show a removed label: it has no owner. `present` is None if it was not observed.
    """
    return {} if present is None else {key: value for key, value in wanted.items() if present.get(key) != value}


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

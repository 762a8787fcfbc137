"""Rules for the objects beside the workloads: whose they are, and when they are applied."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..api.models import DisaggregatedService, Pool
from ..api.names import ANNOTATION_BUILD_HASH
from ..api.reasons import Reason
from ..observe.model import FieldOwners, ObservedObject
from .model import Fault, Plan, Progress

TAKEN_POLL_S = 10.0
"""How often to look while a name is taken: nobody announces to us when an object goes that is not ours."""


@dataclass(frozen=True, slots=True)
class Standing:
    """An object that stands under a name of ours."""

    kind: str
    name: str
    controller_uid: str
    controller: str
    """As `kind/name`."""


def blocked(owner: Pool | DisaggregatedService, standing: Iterable[Standing]) -> Plan | None:
    """What there is to do while names of ours are taken: nothing, but to say by whom; None when none is.

    What belonged to an earlier object of the owner's name is on its way out, and waited for. Anything else is a fault
    that people have to mend.
    """
    others = [one for one in standing if one.controller_uid != owner.metadata.uid]
    former = f"{owner.kind}/{owner.metadata.name}"
    foreign = [one for one in others if one.controller != former]
    if foreign:
        faults = (
            f"{one.kind} {one.name} exists and belongs to somebody else; rename one of the two, or delete it"
            for one in foreign
        )
        return Plan(
            faults=tuple(Fault(Reason.NAME_CONFLICT, message) for message in faults), requeue_after_s=TAKEN_POLL_S
        )
    if others:
        what = ", ".join(f"{one.kind} {one.name}" for one in others[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        message = f"Waiting for {what}{more} of an earlier {owner.kind} {owner.metadata.name} to be gone"
        return Plan(progress=Progress(Reason.STARTING, message), requeue_after_s=TAKEN_POLL_S)
    return None


def missing_or_changed(
    wanted: Iterable[dict[str, Any]], present: Iterable[ObservedObject]
) -> tuple[dict[str, Any], ...]:
    """The wanted objects that do not exist as the builder makes them now, or in which somebody has changed that."""
    found = {(one.kind, one.name): one for one in present}

    def stands(obj: dict[str, Any]) -> bool:
        one = found.get((obj["kind"], obj["metadata"]["name"]))
        if one is None or one.build_hash != obj["metadata"]["annotations"][ANNOTATION_BUILD_HASH]:
            return False
        return not edited(obj, one.owners)

    return tuple(obj for obj in wanted if not stands(obj))


def edited(obj: Mapping[str, Any], owners: FieldOwners) -> bool:
    """Whether somebody else has set a field that we set in `obj`, which takes it from us; applying takes it back.

    Fields that we do not set are not ours to judge, nor are those that nobody has: an older API server drops some.
    """
    return any(_overridden(obj, owners.ours, theirs) for theirs in owners.others)


def _overridden(value: object, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """`ours`, `theirs`: the fields below `value` that are owned, by fieldsV1's names."""
    return any(
        name in theirs and (name not in ours or _overridden(below, ours[name], theirs[name]))
        for name, below in _named(value, theirs)
    )


def _named(value: object, fields: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """What is below `value`, by fieldsV1's names: `f:KEY` in a map, `k:{KEYS}` in a list whose items have keys."""
    if isinstance(value, Mapping):
        yield from ((f"f:{key}", below) for key, below in value.items())
    elif isinstance(value, list | tuple):
        for name in fields:
            keys = json.loads(name.removeprefix("k:")) if name.startswith("k:") else None
            if keys is not None:
                same = (one for one in value if all(one.get(key, keys[key]) == keys[key] for key in keys))
                yield from ((name, one) for one in same)

"""Rules for the objects beside the workloads: whose they are, and when they are applied."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..api.models import DisaggregatedService, Pool
from ..api.names import ANNOTATION_BUILD_HASH
from ..api.reasons import Reason
from ..observe.model import ObservedObject
from .model import Fault, Plan, Progress

TAKEN_POLL_S = 10.0
"""Backstop while a name is taken: the cluster announces when it is free."""


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
    """The wanted objects that do not exist as the builder makes them now."""
    hashes = {(obj.kind, obj.name): obj.build_hash for obj in present}
    return tuple(
        obj
        for obj in wanted
        if hashes.get((obj["kind"], obj["metadata"]["name"])) != obj["metadata"]["annotations"][ANNOTATION_BUILD_HASH]
    )

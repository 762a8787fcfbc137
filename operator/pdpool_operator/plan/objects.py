"""Rules for the objects beside the workloads: whose they are, and when they are applied."""

from collections.abc import Iterable
from typing import Any

from ..api.names import ANNOTATION_BUILD_HASH
from ..api.reasons import Reason
from ..observe.model import ObservedObject
from .model import Fault


def conflicts(owner_uid: str, present: Iterable[tuple[str, str, str]]) -> tuple[Fault, ...]:
    """A fault for every object, given as (kind, name, UID of its controller), that has a name of ours and is not
    ours.
    """
    return tuple(
        Fault(
            Reason.NAME_CONFLICT,
            f"{kind} {name} exists and belongs to somebody else; rename one of the two, or delete it",
        )
        for kind, name, controller_uid in present
        if controller_uid != owner_uid
    )


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

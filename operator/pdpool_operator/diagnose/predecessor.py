"""Reads from the status which instances the predecessor of a new operator took out of the rotation.

Without it, an instance that is Stuck would get requests again until its queue has stood still for stuckAfter once more.
"""

from collections.abc import Iterable
from datetime import datetime

from ..api.pools import InstanceStatus
from .ejection import Ejection
from .model import Verdict
from .standing import Phase, Standing


def ejections_in(instances: Iterable[InstanceStatus]) -> dict[str, Ejection]:
    """Return the ejections of stuck instances, by UID of the pod."""
    return {uid: Ejection() for one in instances if one.verdict == Verdict.STUCK and (uid := one.pod_uid)}


def standings_in(instances: Iterable[InstanceStatus], now: datetime) -> dict[str, Standing]:
    """Return the standings of failing instances, by UID of the pod. Each is out, and is tried after the pause."""
    return {
        uid: Standing("", Phase.OUT, now, times=1, evidence=one.message.partition(": ")[2])
        for one in instances
        if one.verdict == Verdict.FAILING and (uid := one.pod_uid)
    }

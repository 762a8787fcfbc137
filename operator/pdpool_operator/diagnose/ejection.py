"""Takes stuck instances out of the rotation, and brings them back when they work again.

Every request that goes to a stuck instance waits there. So its pod is *ejected* at once, and returns late:

    in  -> out    when it is judged Stuck

    out -> in     when every verdict for `RETURN_AFTER` says that it works. That time doubles for each ejection in a
                  row, up to `LONGEST_RETURN`

A queue that ends by deadlines looks like one that moves. The doubling limits how often such an instance returns. A pod
that was not stuck for `FORGIVEN_AFTER` starts from the shortest time again. A new pod has no ejection.

Which instances the routers list is decided in `plan.rotation`: the last serving instance of a side always stays.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from .model import Diagnosis, Verdict
from .trials import FORGIVEN_AFTER

RETURN_AFTER = timedelta(seconds=10)
"""Three samples in which the instance works."""
LONGEST_RETURN = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Ejection:
    """What is remembered of one pod that was judged Stuck."""

    times: int = 1
    """How often it was ejected in a row."""
    works_since: datetime | None = None
    """Since when every verdict says that it works. `None` if the newest one does not."""
    returned_at: datetime | None = None
    """When it came back. `None` while it is out."""

    @property
    def out(self) -> bool:
        """Whether routers must not list the instance while a sibling serves."""
        return self.returned_at is None


def eject(diagnoses: Iterable[Diagnosis], before: Mapping[str, Ejection], now: datetime) -> dict[str, Ejection]:
    """Return the ejections of a pool after a look, by UID of the pod.

    Args:
        diagnoses: Of all instances of the pool.
        before: Result of the last look.
        now: Time of the clock that stamped the samples.
    """
    after = {
        diagnosis.subject.pod.uid: _step(diagnosis.verdict, before.get(diagnosis.subject.pod.uid), now)
        for diagnosis in diagnoses
        if diagnosis.subject.pod is not None
    }
    return {uid: ejection for uid, ejection in after.items() if ejection is not None}


def with_ejections(diagnoses: Iterable[Diagnosis], ejections: Mapping[str, Ejection]) -> tuple[Diagnosis, ...]:
    """Return the diagnoses with those marked whose instance is out."""
    out = {uid for uid, ejection in ejections.items() if ejection.out}
    return tuple(replace(d, ejected=d.subject.pod is not None and d.subject.pod.uid in out) for d in diagnoses)


def _step(verdict: Verdict, before: Ejection | None, now: datetime) -> Ejection | None:
    if verdict is Verdict.STUCK:
        if before is None or (before.returned_at and now - before.returned_at > FORGIVEN_AFTER):
            return Ejection()
        return Ejection(before.times if before.out else before.times + 1)
    if before is None:
        return None
    if before.returned_at is not None:
        return before if now - before.returned_at <= FORGIVEN_AFTER else None
    if not verdict.works:
        return replace(before, works_since=None)
    since = before.works_since or now
    enough = now - since >= min(RETURN_AFTER * 2 ** (before.times - 1), LONGEST_RETURN)
    return replace(before, works_since=since, returned_at=now if enough else None)

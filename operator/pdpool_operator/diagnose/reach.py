"""Finds pairs of engines that cannot reach each other, and decides which of them leave the rotation for it. Pure.

A *cut* is a decode instance that gets no answer from a prefill instance, while the operator gets answers from both. So
none of the two is at fault: the network between them is. Each request to such a pair costs its client `match_s` of the
connector, and then fails.

Instances leave the rotation until no cut has both ends in it. The one with the most cuts leaves first. Of equal ones it
is a decode, and the last by name. The last instance of a side stays. If a cut would remain, no instance leaves: the
cause is then a common one. An instance that is out for another cause counts as gone.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from ..api.names import Role
from .evidence import STALE
from .model import Cut, Diagnosis, Subject


def with_cuts(
    diagnoses: Sequence[Diagnosis], others: Sequence[Subject], out: Iterable[str], now: datetime
) -> tuple[Diagnosis, ...]:
    """Return the diagnoses of one pool with each instance's cuts, and whether it leaves the rotation for them.

    Args:
        diagnoses: of the instances of one pool.
        others: instances of the other role that work with them.
        out: UIDs of the pods of both that leave the rotation for other causes. Read only if there is a cut.
        now: the present time.
    """
    subjects = (*(diagnosis.subject for diagnosis in diagnoses), *others)
    if not any(track.answer is not None and track.answer.silent for one in subjects for track in one.tracks):
        return tuple(diagnoses)  # each pool is judged every second, and this is nearly always so
    there = [one for one in subjects if _is_in_service(one, now)]
    cuts = tuple(sorted(set(_cuts(there))))
    if not cuts:
        return tuple(diagnoses)
    gone = frozenset(out)
    leaving = _leaving(cuts, [*_serving(there, Role.PREFILL, gone), *_serving(there, Role.DECODE, gone)])
    return tuple(
        replace(
            diagnosis,
            cuts=tuple(cut for cut in cuts if diagnosis.subject.name in cut.ends),
            avoided=diagnosis.subject.name in leaving,
        )
        for diagnosis in diagnoses
    )


def _is_in_service(subject: Subject, now: datetime) -> bool:
    """Whether the instance could serve, and all its connectors answered lately."""
    pod = subject.pod
    if pod is None or not pod.takes_requests or subject.leaving or subject.out:
        return False
    answers = [track.answered_at for track in subject.tracks]
    return bool(answers) and all(at is not None and now - at <= STALE for at in answers)


def _cuts(subjects: Sequence[Subject]) -> Iterator[Cut]:
    prefills = {s.pod.ip: s for s in subjects if s.role is Role.PREFILL and s.pod is not None and s.pod.ip}
    for subject in subjects:
        if subject.role is not Role.DECODE:
            continue
        for track in subject.tracks:
            for address in track.answer.silent if track.answer is not None else ():
                if (prefill := prefills.get(address.rpartition(":")[0].strip("[]"))) is not None:
                    yield Cut(subject.name, prefill.name, _node(subject), _node(prefill))


def _node(subject: Subject) -> str:
    return subject.pod.node if subject.pod is not None and subject.pod.node else "unknown node"


def _serving(subjects: Sequence[Subject], role: Role, out: frozenset[str]) -> list[Subject]:
    """Return the instances of one side that are not out, or all of them: `plan.rotation` lists them all then."""
    side = [subject for subject in subjects if subject.role is role]
    return [one for one in side if one.pod is not None and one.pod.uid not in out] or side


def _leaving(cuts: Sequence[Cut], serving: Sequence[Subject]) -> frozenset[str]:
    role = {subject.name: subject.role for subject in serving}
    left = Counter(role.values())
    leaving: set[str] = set()
    while open_cuts := [cut for cut in cuts if cut.ends <= role.keys() - leaving]:
        counts = Counter(name for cut in open_cuts for name in cut.ends if left[role[name]] > 1)
        if not counts:
            return frozenset()
        chosen = max(counts, key=lambda name: (counts[name], role[name] is Role.DECODE, name))
        left[role[chosen]] -= 1
        leaving.add(chosen)
    return frozenset(leaving)

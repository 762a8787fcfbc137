"""Judges the instances of a prefill pool and a decode pool that work together."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType

from ..api import names
from ..observe.model import ObservedPod, ObservedPool
from .departures import Departures
from .evidence import STALE_S, is_overdue, oldest_waiting_since
from .failing import finishes_nothing
from .model import Diagnosis, Finding, Subject, Verdict
from .outcomes import OutcomeTrack
from .rank import judge_rank
from .standing import Standing
from .surroundings import Surroundings
from .track import RankTrack


def subjects_of(
    observed: ObservedPool,
    tracks: Mapping[str, Mapping[int, RankTrack]],
    routers: Iterable[Mapping[str, OutcomeTrack]] = (),
    standings: Mapping[str, Standing] = MappingProxyType({}),
) -> tuple[Subject, ...]:
    """Return the instances of a pool as subjects.

    Args:
        observed: The pool.
        tracks: By UID of the pod, then by rank.
        routers: Counters of the routers that send requests to the pool.
        standings: By UID of the pod.
    """
    pool, routers = observed.pool, tuple(routers)
    return tuple(
        Subject(
            pool=pool.metadata.name,
            role=pool.role,
            index=instance.index,
            pod=instance.pod,
            leaving=instance.deleting or instance.drain_started is not None,
            tracks=tuple(tracks.get(instance.pod.uid, {}).values()) if instance.pod is not None else (),
            routers=_counted(instance.pod, routers),
            standing=standings.get(instance.pod.uid) if instance.pod is not None else None,
            watched_pod=instance.name if observed.watched else "",
        )
        for instance in observed.own
    )


def _counted(pod: ObservedPod | None, routers: Iterable[Mapping[str, OutcomeTrack]]) -> tuple[OutcomeTrack, ...]:
    url = names.engine_url(pod.ip) if pod is not None and pod.ip else None
    return tuple(track for router in routers if url and (track := router.get(url)) is not None)


def diagnose(
    own: Sequence[Subject],
    others: Sequence[Subject],
    *,
    stuck_after_s: float,
    now: datetime,
    departures: Sequence[Departures] = (),
) -> tuple[Diagnosis, ...]:
    """Judge each instance of one side, given the other side.

    Args:
        own: Instances of one pool, or of several pools of one role.
        others: Instances of the other role that work with them. Empty if no service binds the pool.
        stuck_after_s: How long requests may wait without any movement.
        now: Time of the clock that stamped the samples.
        departures: What is remembered of the other side's processes, one for each of its pools.
    """
    stuck_after = timedelta(seconds=stuck_after_s)
    overdue = any(is_overdue(track, now, stuck_after) for s in (*own, *others) for track in s.tracks)
    around = Surroundings(others, stuck_after, stuck_after / 2 if overdue else stuck_after, now, tuple(departures))
    return tuple(_diagnose(subject, around) for subject in own)


def _diagnose(subject: Subject, around: Surroundings) -> Diagnosis:
    finding = _from_kubernetes(subject, around.now) or _from_evidence(subject, around)
    moments = [moment for track in subject.tracks if (moment := oldest_waiting_since(track, around.now)) is not None]
    since = min(moments, default=None)
    return Diagnosis(
        subject=subject,
        verdict=finding.verdict,
        message=finding.message,
        blames=finding.blames,
        waiting_since=since if since is not None and around.now - since >= around.stuck_after else None,
    )


def _from_kubernetes(subject: Subject, now: datetime) -> Finding | None:
    """Return what Kubernetes or the operator's own intent says. It outranks the queues."""
    who, pod = f"{subject.role} {subject.name}", subject.pod
    if subject.leaving or (pod is not None and pod.terminating):
        return Finding(Verdict.DRAINING, f"{who} is being removed")
    if pod is None:
        return Finding(Verdict.STARTING, f"{who} has no pod yet")
    if pod.ended:
        return Finding(Verdict.GONE, f"{who}: pod {pod.name} is {pod.phase}")
    if not subject.came_up:
        return Finding(Verdict.STARTING, f"{who} is not Ready yet")
    if not any(track.answered for track in subject.tracks) and _just_ready(pod, now):
        return Finding(Verdict.STARTING, f"{who} has just become Ready")
    if not subject.tracks:
        return Finding(Verdict.UNKNOWN, f"{who} has not been sampled yet")
    return None


def _just_ready(pod: ObservedPod, now: datetime) -> bool:
    """Whether the pod became Ready within the time of a few samples, so that it need not have answered one yet."""
    return pod.ready_since is not None and now - pod.ready_since < timedelta(seconds=STALE_S)


def _serves(pod: ObservedPod) -> bool:
    """Whether the pod is Ready, or only its node's silence makes it not Ready."""
    return pod.ready or pod.node_silent


def _from_evidence(subject: Subject, around: Surroundings) -> Finding:
    """Return the more severe one of the findings about queues and about how requests end."""
    found = (_from_ranks(subject, around), _from_outcomes(subject, around))
    return max((finding for finding in found if finding is not None), key=lambda finding: finding.verdict.severity)


def _from_outcomes(subject: Subject, around: Surroundings) -> Finding | None:
    who, standing = f"{subject.role} {subject.name}", subject.standing
    if standing is not None and standing.failing:
        now = "is out of the rotation" if standing.out else "is on trial in the rotation"
        return Finding(Verdict.FAILING, f"{who} {'fails' if subject.watched_pod else now}: {standing.evidence}")
    if any(other.standing is not None and other.standing.failing for other in around.others):
        return None
    if not finishes_nothing(subject, around.now):
        return None
    side = "prefill" if subject.role is names.Role.DECODE else "decode"
    message = f"{who}: requests fail and none finishes. It may be the instance or every {side} instance it works with"
    return Finding(Verdict.NOTHING_FINISHES, message)


def _from_ranks(subject: Subject, around: Surroundings) -> Finding:
    shared = subject.tracks[0].latest.engine  # ranks that share a scheduler are counted at the first one
    findings = [(track.latest.rank, judge_rank(track, around, shared)) for track in subject.tracks]
    rank, finding = max(findings, key=lambda found: (found[1].verdict.severity, -found[0]))
    if finding.verdict is Verdict.IDLE and subject.pod is not None and not _serves(subject.pod):
        return Finding(Verdict.STARTING, f"{subject.role} {subject.name} is not Ready")
    message = f"{subject.role} {subject.name} rank {rank}: {finding.message}"
    return Finding(finding.verdict, message, finding.blames)

"""Takes instances that are suspected to fail requests out of the rotation, and decides when they are tried again.

An instance that is suspected leaves the rotation (OUT). After a pause it serves again on TRIAL:

    OUT    -> TRIAL     after PAUSE, doubled for each time in a row, at most LONGEST_PAUSE

    TRIAL  -> OUT       after TRIAL_FAILED failures without a success, while a sibling succeeds

    TRIAL  -> SERVING   after TRIAL_DONE successes with a share <= SIBLING_SHARE, or after TRIAL_LASTS without a failure

    any    -> SERVING   when another process or another pod takes the instance's place

Failures of a process that Kubernetes counted as not ready do not count once it is ready again. Nor do those that a
sample shows within LATE after that, or after a new process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from .departures import Departures
from .failing import Evidence, does_well, siblings_of, suspects
from .model import SOURCES, Subject
from .outcomes import WINDOW
from .standing import Phase, Standing

LATE = timedelta(seconds=5)
"""A router's sample may be this old: its interval and its deadline."""

PAUSE = timedelta(seconds=30)
LONGEST_PAUSE = timedelta(minutes=8)
TRIAL_FAILED = 2
TRIAL_DONE = 3
TRIAL_LASTS = timedelta(minutes=5)
FORGIVEN_AFTER = timedelta(minutes=10)
"""Pauses begin from the shortest again after so long without a suspicion."""


def advance(
    own: Sequence[Subject],
    others: Sequence[Subject],
    standings: Mapping[str, Standing],
    now: datetime,
    departures: Sequence[Departures] = (),
) -> dict[str, Standing]:
    """Return the standing of each pod of one side after a look, by UID of the pod.

    Args:
        own: Instances of one pool.
        others: Instances of the other role that work with them.
        standings: Result of the last look.
        now: Time of the clock that stamped the samples.
        departures: What is remembered of the other side's processes, one for each of its pools.
    """
    excused = any(pool.within(WINDOW, now) for pool in departures)
    suspected = suspects(own, others, now) if not excused else {}
    return {
        subject.pod.uid: _step(subject, own, standings.get(subject.pod.uid), suspected.get(subject.name), now)
        for subject in own
        if subject.pod is not None
    }


def _step(
    subject: Subject, own: Sequence[Subject], before: Standing | None, evidence: Evidence | None, now: datetime
) -> Standing:
    assert subject.pod is not None
    incarnation = next((track.incarnation for track in subject.tracks if track.incarnation), "")
    if before is None:
        return Standing(incarnation, Phase.SERVING, subject.pod.created_at)
    if before.incarnation and incarnation and before.incarnation != incarnation:
        return Standing(incarnation, Phase.SERVING, now + LATE)
    if incarnation and not before.incarnation:
        before = replace(before, incarnation=incarnation)
    match before.phase:
        case Phase.OUT:
            pause = min(PAUSE * 2 ** (before.times - 1), LONGEST_PAUSE)
            return replace(before, phase=Phase.TRIAL, since=now) if now - before.since >= pause else before
        case Phase.TRIAL:
            return _tried(subject, own, before, now)
        case Phase.SERVING:
            if not subject.pod.ready:
                return replace(before, since=now + LATE)
            if evidence is None:
                return before
            times = 1 if now - before.since > FORGIVEN_AFTER else before.times + 1
            return replace(before, phase=Phase.OUT, since=now, times=times, evidence=str(evidence))


def _tried(subject: Subject, own: Sequence[Subject], before: Standing, now: datetime) -> Standing:
    """Return the standing after a look at an instance on trial."""
    tallies = [subject.tally(source, before.since) for source in SOURCES]
    siblings = [s.tally(source, before.since) for s in siblings_of(subject, own) for source in SOURCES]
    if any(t.failed >= TRIAL_FAILED and not t.done for t in tallies) and any(does_well(t, 1) for t in siblings):
        return replace(before, phase=Phase.OUT, since=now, times=before.times + 1)
    passed = any(does_well(t, TRIAL_DONE) for t in tallies)
    quiet = now - before.since >= TRIAL_LASTS and not any(t.failed for t in tallies)
    return replace(before, phase=Phase.SERVING, since=now, evidence="") if passed or quiet else before

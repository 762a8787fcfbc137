"""Finds instances that fail requests while their siblings serve.

A router counts each try at both engines of its pair. So an innocent prefill engine that is paired with a failing decode
engine has failures too. Per instance and source, within the last minute, with  share = failed / (done + failed):

    fails by itself  <=>  since its last success: failed >= MIN_FAILED, and
                          a sibling has done >= SIBLING_DONE with a share <= SIBLING_SHARE,
                          or done >= FEW_DONE and failed = 0

                     or   since its last success, which was HANGS ago, or in the whole minute: done = 0, failed >= FEW,
                          a sibling has done >= 1 and failed = 0, and its successes and the failures are >= FEW_ENDED

                     or   in the whole minute: failed >= MANY_FAILED, share >= MANY_SHARE, and
                          a sibling has done >= SIBLING_DONE with a share <= FAR_LESS * share

                     If the instance waited, only what the sibling has done within GOES_ON before the instance's last
                     failure counts. Both may have waited for the same prefill engine, and samples may show the begin
                     and the end of that wait at different times

    waited           <=>  within the last minute a request waited in its queues for WAITED_S

    suspected        <=>  it fails by itself, and has more failures than each instance of the other side that does too.
                          It has more failures in the minute than each that fails far more than its sibling (FAR_LESS).
                          With equally many, the network between the two may be cut.
                          It is not overloaded, was not paused within the minute, and no instance of the other side
                          excuses it

    overloaded       <=>  it waited, and its connector finished hand-offs within GOES_ON or its prefill engine computes.
                          Requests that wait for so long end at their deadlines

    excuses          <=>  within the last minute its engine's loop was silent for SILENT_S, its process or its
                          pod ended, or it was taken out or put on trial. Requests that waited for it end at their
                          deadlines

What follows from a suspicion stands in `trials`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ..api.names import Role
from ..observe.samples import Tally
from .evidence import ran_lately
from .model import SOURCES, Subject
from .outcomes import WINDOW
from .standing import Phase
from .track import RankTrack

MIN_FAILED = 3
"""Fewer failures may be the client's bad luck."""
SIBLING_DONE = 5
SIBLING_SHARE = 0.25
FEW_DONE = 3
FEW = 2
FEW_ENDED = 5
"""With few clients, a try that fails may last 15 s. So few outcomes must be enough if they leave no doubt.

Suppose that the instance makes no difference. Random routing may still send all failures to one of two instances, and
all successes to the other. The probability of that is at most 2^-5 = 3 %."""
HANGS = timedelta(seconds=25)
"""An instance that has not succeeded for so long while its sibling did gets few requests because they hang there."""
LATELY = timedelta(seconds=45)
"""Failures without a sibling must be this recent. A single burst is then forgotten before an alert fires."""
MANY_FAILED = 10
MANY_SHARE = 0.5
FAR_LESS = 0.2

SILENT_S = 15.0
"""Seconds without a run of the loop, after which requests that wait for the engine may end at their deadlines."""

GOES_ON = timedelta(seconds=30)
"""An instance that finished no hand-off for so long is not overloaded, unless its prefill engine computes."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why an instance is suspected."""

    tally: Tally
    sibling: str
    siblings: Tally
    """What the sibling has done and failed."""

    def __str__(self) -> str:
        return (
            f"{self.tally.failed} of its last {self.tally.ended} requests failed, "
            f"while {self.sibling} finished {self.siblings.done} of {self.siblings.ended}"
        )


def finishes_nothing(subject: Subject, now: datetime) -> bool:
    """Whether requests fail at an instance and none finishes."""
    start = _start(subject, now)
    return any(
        subject.tally(source, max(start, now - LATELY)).failed >= MIN_FAILED and not subject.tally(source, start).done
        for source in SOURCES
    )


def suspects(own: Sequence[Subject], others: Sequence[Subject], now: datetime) -> dict[str, Evidence]:
    """Return the evidence against each suspected instance of one side, by its name."""
    found: dict[str, Evidence] = {}
    if any(_excuses(subject, now) for subject in others):
        return found
    for source in SOURCES:
        failing = _failing_by_themselves(own, source, now)
        if not failing:
            continue
        most = max((e.tally.failed for e in _failing_by_themselves(others, source, now).values()), default=0)
        explained = max(_far_more_failures(others, source, now), default=0)
        for subject in own:
            evidence = failing.get(subject.name)
            if evidence is None or evidence.tally.failed <= most:
                continue
            if _is_overloaded(subject, now) or _was_paused(subject, now):
                continue
            if subject.tally(source, _start(subject, now)).failed > explained:
                found.setdefault(subject.name, evidence)
    return found


def _excuses(subject: Subject, now: datetime) -> bool:
    """Whether requests that waited for the instance's engine may fail at the other side now."""
    standing = subject.standing
    if standing is not None and standing.failing and now - standing.since <= WINDOW:
        return True
    return any(_was_silent(track, now) or _has_ended(track, now) for track in subject.tracks)


def _has_ended(track: RankTrack, now: datetime) -> bool:
    """Whether the process that answered lately refuses connections now."""
    answered = track.answered_at is not None and now - track.answered_at <= WINDOW
    return answered and track.latest.connector_error == "refused"


def _far_more_failures(own: Sequence[Subject], source: str, now: datetime) -> Iterator[int]:
    """Yield the failures of each instance that fails far more than a sibling, although some of its requests succeed.

    They may explain as many failures of the other side.
    """
    tallies = {s.name: s.tally(source, _start(s, now)) for s in own if _serves(s)}
    for name, tally in tallies.items():
        siblings = (t for other, t in tallies.items() if other != name)
        if any(t.done >= FEW_DONE and t.share <= FAR_LESS * tally.share for t in siblings):
            yield tally.failed


def _is_overloaded(subject: Subject, now: datetime) -> bool:
    """Whether requests waited so long at the instance that they may end at their deadlines, while others go on."""
    if not _waited(subject, now):
        return False
    computes = subject.role is Role.PREFILL and any(ran_lately(track, now) for track in subject.tracks)
    return computes or subject.tally("connector", now - GOES_ON).done > 0


def _was_paused(subject: Subject, now: datetime) -> bool:
    """Whether the engine is paused on request, so that its requests end at their deadlines."""
    return any(track.paused_at is not None and now - track.paused_at <= WINDOW for track in subject.tracks)


def _waited(subject: Subject, now: datetime) -> bool:
    return any(track.waited_at is not None and now - track.waited_at <= WINDOW for track in subject.tracks)


def _was_silent(track: RankTrack, now: datetime) -> bool:
    if track.beat_age_s >= SILENT_S:
        return True
    return track.resumed_at is not None and track.gap_s >= SILENT_S and now - track.resumed_at <= WINDOW


def _failing_by_themselves(own: Iterable[Subject], source: str, now: datetime) -> dict[str, Evidence]:
    serving = [subject for subject in own if _serves(subject)]
    found = {}
    for subject in serving:
        start = _start(subject, now)
        if subject.tally(source, start).failed < FEW:
            continue
        siblings = [sibling for sibling in serving if sibling is not subject]
        succeeded = subject.last_done(source) or start
        failed_at = subject.last_failed(source) if _waited(subject, now) else None
        rules = [(max(start, succeeded), _run), (start, _few), (start, _many)]
        if now - succeeded >= HANGS:
            rules.append((max(start, succeeded), _few))
        for since, suffices in rules:
            tally = subject.tally(source, since)
            well = [(s.name, t) for s in siblings if suffices(tally, t := _beside(s, source, since, failed_at, now))]
            if well:
                found[subject.name] = Evidence(tally, *max(well, key=lambda one: one[1].done))
                break
    return found


def _run(own: Tally, sibling: Tally) -> bool:
    """Whether all requests since the last success failed, while a sibling served."""
    if own.failed < MIN_FAILED or own.done:
        return False
    return _serves_well(sibling, SIBLING_SHARE) or _only_serves(sibling)


def _few(own: Tally, sibling: Tally) -> bool:
    """Whether all of a few requests failed, while none failed at a sibling."""
    if own.done or sibling.failed:
        return False
    return own.failed >= FEW and sibling.done >= 1 and own.failed + sibling.done >= FEW_ENDED


def _many(own: Tally, sibling: Tally) -> bool:
    """Whether most of many requests failed, and far fewer at a sibling."""
    return own.failed >= MANY_FAILED and own.share >= MANY_SHARE and _serves_well(sibling, FAR_LESS * own.share)


def _only_serves(sibling: Tally) -> bool:
    return sibling.done >= FEW_DONE and not sibling.failed


def _serves_well(sibling: Tally, share: float) -> bool:
    return sibling.done >= SIBLING_DONE and sibling.share <= share


def does_well(tally: Tally, at_least: int) -> bool:
    """Whether enough requests succeeded, and few failed."""
    return tally.done >= at_least and tally.share <= SIBLING_SHARE


def _start(subject: Subject, now: datetime) -> datetime:
    """Return the moment from which the subject's outcomes count."""
    window = now - WINDOW
    return window if subject.standing is None else max(window, subject.standing.since)


def _beside(sibling: Subject, source: str, moment: datetime, failed_at: datetime | None, now: datetime) -> Tally:
    """Return how requests ended at a sibling. `failed_at`: the last failure of an instance that waited."""
    start = max(moment, _start(sibling, now))
    tally = sibling.tally(source, start)
    if failed_at is None:
        return tally
    return replace(tally, done=sibling.tally(source, max(start, failed_at - GOES_ON), failed_at).done)


def _serves(subject: Subject) -> bool:
    """Whether the instance takes new requests, as far as Kubernetes and the operator are concerned."""
    pod = subject.pod
    if pod is None or not pod.takes_requests or subject.leaving:
        return False
    return subject.standing is None or subject.standing.phase is Phase.SERVING


def siblings_of(subject: Subject, own: Sequence[Subject]) -> list[Subject]:
    """Return the other instances of its pool that take requests."""
    return [other for other in own if other.name != subject.name and _serves(other)]

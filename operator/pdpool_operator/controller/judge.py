"""Judges every pool from its samples, and requests a reconcile where a judgement changed.

It makes no API calls. Pods are as the last reconcile saw them. Queues are as the sampler sees them now.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ..diagnose.departures import Departures, follow_departures
from ..diagnose.ejection import Ejection, eject, with_ejections
from ..diagnose.model import Diagnosis, Subject
from ..diagnose.outcomes import OutcomeTrack, count_router
from ..diagnose.pools import diagnose, subjects_of
from ..diagnose.predecessor import ejections_in, standings_in
from ..diagnose.reach import with_cuts
from ..diagnose.standing import Standing
from ..diagnose.track import RankTrack, follow
from ..diagnose.transport import with_transports
from ..diagnose.trials import advance
from ..observe.keys import POOL_KIND_OF_ROLE, Bindings, Key
from ..observe.model import ObservedPool
from ..observe.router_outcomes import RouterSample
from ..observe.samples import RankSample
from ..observe.targets import Target
from ..status.transition import REFRESH

JUDGE_EVERY_S = 1.0
ASK_AGAIN = timedelta(seconds=1)
ASK_AGAIN_AT_LATEST = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class _Shown:
    """The inputs of a pool's last reconcile."""

    news: tuple[tuple[int, str, tuple[str, ...], bool], ...]
    """Verdicts whose change the status must show at once."""
    detail: tuple[object, ...]
    """Verdicts and whether requests wait long, which change while requests come and go."""
    at: datetime


class Judge:
    """Holds the tracks of all ranks and the last observation of each pool. Both serve only judgement."""

    def __init__(self, bindings: Bindings, now: Callable[[], datetime], enqueue: Callable[[Key], object]) -> None:
        self._bindings = bindings
        self._now = now
        self._enqueue = enqueue
        self._pools: dict[Key, ObservedPool] = {}
        self._tracks: dict[Key, dict[str, dict[int, RankTrack]]] = {}
        """By pool, then by UID of the pod and rank."""
        self._routers: dict[Key, dict[str, Mapping[str, OutcomeTrack]]] = {}
        """By service, then by UID of the router's pod, then by URL of the engine."""
        self._standings: dict[Key, dict[str, Standing]] = {}
        """By pool, then by UID of the pod."""
        self._ejections: dict[Key, dict[str, Ejection]] = {}
        """By pool, then by UID of the pod."""
        self._departures: dict[Key, Departures] = {}
        """By pool."""
        self._shown: dict[Key, _Shown] = {}
        self._diagnoses: dict[Key, tuple[Diagnosis, ...]] = {}
        self._asked: dict[Key, tuple[datetime, timedelta]] = {}
        """When a reconcile was requested, and after what time to request it again. Removed when a reconcile ends."""
        self.fences_due: Callable[[Mapping[Key, ObservedPool]], Collection[Key]] = lambda _: ()
        """The pools for which fences or reports about lost peers are due."""

    def on_samples(self, target: Target, samples: Sequence[RankSample]) -> None:
        """Take in one sample of all ranks of one pod."""
        key = Key(POOL_KIND_OF_ROLE[target.role], target.namespace, target.pool)
        tracks = self._tracks.setdefault(key, {})
        before = tracks.get(target.pod_uid, {})
        tracks[target.pod_uid] = {sample.rank: follow(before.get(sample.rank), sample, samples) for sample in samples}

    def on_router(self, service: Key, sample: RouterSample) -> None:
        """Take in one sample of a router's counters."""
        tracks = self._routers.setdefault(service, {})
        tracks[sample.pod_uid] = count_router(tracks.get(sample.pod_uid), sample.engines, sample.at)

    def observed_routers(self, service: Key, uids: Collection[str]) -> None:
        """Forget the routers of a service that are no longer there."""
        self._routers[service] = {uid: track for uid, track in self._routers.get(service, {}).items() if uid in uids}
        if not uids:
            del self._routers[service]

    def marked(self, key: Key, pool: ObservedPool) -> ObservedPool:
        """Return the pool with the instances marked that are to be out of the rotation, or have leaked requests."""
        standings, ejections = self._standings.get(key, {}), self._ejections.get(key, {})
        if key not in self._pools:
            standings, ejections = self._from_status(pool)
        out = {uid for uid, standing in standings.items() if standing.out}
        out |= {uid for uid, ejection in ejections.items() if ejection.out}
        out |= {
            d.subject.pod.uid
            for d in self._diagnoses.get(key, ())
            if (d.unfit or d.avoided) and d.subject.pod is not None
        }
        tracks = self._tracks.get(key, {})
        marked = (
            replace(i, out=i.pod.uid in out, leaked={rank: t.leaked for rank, t in tracks.get(i.pod.uid, {}).items()})
            if i.pod is not None
            else i
            for i in pool.instances
        )
        return replace(pool, instances=tuple(marked))

    def observed(self, key: Key, pool: ObservedPool) -> None:
        """Store the observation of the pool. At the first one, its status says which instances are out."""
        if key not in self._pools:
            self._standings[key], self._ejections[key] = self._from_status(pool)
        self._pools[key] = pool
        there = {i.pod.uid for i in pool.instances if i.pod is not None}
        for uid in self._tracks.get(key, {}).keys() - there:
            del self._tracks[key][uid]

    def _from_status(self, pool: ObservedPool) -> tuple[dict[str, Standing], dict[str, Ejection]]:
        instances = pool.pool.status.instances
        return standings_in(instances, self._now()), ejections_in(instances)

    def gone(self, key: Key) -> None:
        """Forget a pool that was deleted."""
        self._pools.pop(key, None)
        self._tracks.pop(key, None)
        self._standings.pop(key, None)
        self._ejections.pop(key, None)
        self._departures.pop(key, None)
        self._shown.pop(key, None)
        self._asked.pop(key, None)
        self._diagnoses.pop(key, None)

    def judge(self, key: Key) -> tuple[Diagnosis, ...]:
        """Return the judgement on each instance of a pool, given the pools that services bind to it."""
        pool = self._pools.get(key)
        if pool is None:
            return ()
        subjects = {other: self.subjects(other) for other in (key, *self._bindings.partners(key))}
        # A process may have gone since the last look, and its pod with what was known of it.
        self._departures |= self._followed(subjects)
        return with_ejections(self._diagnose(key, pool, subjects), self._ejections.get(key, {}))

    def _diagnose(
        self, key: Key, pool: ObservedPool, subjects: Mapping[Key, tuple[Subject, ...]]
    ) -> tuple[Diagnosis, ...]:
        others = self._others(key, subjects)
        diagnoses = diagnose(
            subjects[key],
            others,
            stuck_after_s=pool.stuck_after_s,
            now=self._now(),
            departures=self._departures_of_partners(key),
        )
        fitted = with_transports(diagnoses, others, pool.pool.spec.rdma)
        out = (uid for one in (key, *self._bindings.partners(key)) for uid in self._out(one))
        return with_cuts(fitted, others, out, self._now())

    def _out(self, key: Key) -> Iterator[str]:
        """Return the UIDs of pods that were out at the last look, but for those that cannot reach an engine."""
        yield from (uid for uid, ejection in self._ejections.get(key, {}).items() if ejection.out)
        yield from (d.subject.pod.uid for d in self._diagnoses.get(key, ()) if d.unfit and d.subject.pod is not None)

    def shown(self, key: Key, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Remember that the pool's status shows these diagnoses."""
        self._diagnoses[key] = diagnoses
        self._asked.pop(key, None)
        self._shown[key] = _Shown(_news(diagnoses), _detail(diagnoses), self._now())

    async def run(self) -> None:
        """Judge all pools every second, for ever."""
        while True:
            await asyncio.sleep(JUDGE_EVERY_S)
            self.tick()

    def tick(self) -> None:
        """Request a reconcile of every pool whose status is out of date, and of its services."""
        for key in self.fences_due({key: pool for key, pool in self._pools.items() if not pool.watched}):
            self._ask(key)
        for key, diagnoses in self.look().items():
            shown = self._shown.get(key)
            if shown is None:
                continue  # its first reconcile has not ended yet
            changed = shown.news != _news(diagnoses)
            stale = self._now() - shown.at >= REFRESH and shown.detail != _detail(diagnoses)
            self._diagnoses[key] = diagnoses
            if (changed or stale) and self._ask(key):
                for service in self._bindings.services(key):
                    self._enqueue(service)

    def look(self) -> Mapping[Key, tuple[Diagnosis, ...]]:
        """Decide which instances are out of the rotation, and return the judgement on every pool."""
        self._look_at_outcomes()
        subjects = {key: self.subjects(key) for key in self._pools}
        found = {key: self._diagnose(key, pool, subjects) for key, pool in self._pools.items()}
        self._ejections = {key: eject(some, self._ejections.get(key, {}), self._now()) for key, some in found.items()}
        return {key: with_ejections(some, self._ejections[key]) for key, some in found.items()}

    def _look_at_outcomes(self) -> None:
        """Decide for every pool which of its instances are failing. Both sides are judged by the same standings."""
        subjects = {key: self.subjects(key) for key in self._pools}
        self._departures = self._followed(subjects)
        self._standings = {
            key: advance(
                own,
                self._others(key, subjects),
                self._standings.get(key, {}),
                self._now(),
                self._departures_of_partners(key),
            )
            for key, own in subjects.items()
        }

    def _followed(self, subjects: Mapping[Key, tuple[Subject, ...]]) -> dict[Key, Departures]:
        """Return the departures of each pool, as of now."""
        return {
            key: follow_departures(self._departures.get(key, Departures()), own, self._now())
            for key, own in subjects.items()
        }

    def _ask(self, key: Key) -> bool:
        """Request a reconcile of a pool; return whether it was requested.

        Nothing is requested while an earlier request has not led to a completed reconcile. It is repeated after a delay
        that doubles, because an API server that fails every call must not get more of them.
        """
        now, (at, wait) = self._now(), self._asked.get(key, (None, ASK_AGAIN / 2))
        if at is not None and now - at < wait:
            return False
        self._asked[key] = now, min(2 * wait, ASK_AGAIN_AT_LATEST)
        self._enqueue(key.to_reconcile)
        return True

    def pools(self) -> Mapping[Key, ObservedPool]:
        """Return the last observation of every pool."""
        return self._pools

    def diagnoses(self) -> Mapping[Key, tuple[Diagnosis, ...]]:
        """Return the last judgement on every pool that a reconcile or a look has judged."""
        return self._diagnoses

    def subjects(self, key: Key) -> tuple[Subject, ...]:
        """Return the instances of a pool with all that is known of them. Empty for an unknown pool."""
        pool = self._pools.get(key)
        if pool is None:
            return ()
        routers = [r for service in self._bindings.services(key) for r in self._routers.get(service, {}).values()]
        return subjects_of(pool, self._tracks.get(key, {}), routers, self._standings.get(key, {}))

    def _others(self, key: Key, subjects: Mapping[Key, tuple[Subject, ...]]) -> list[Subject]:
        return [subject for partner in self._bindings.partners(key) for subject in subjects.get(partner, ())]

    def _departures_of_partners(self, key: Key) -> list[Departures]:
        return [self._departures[partner] for partner in self._bindings.partners(key) if partner in self._departures]


def _news(diagnoses: Sequence[Diagnosis]) -> tuple[tuple[int, str, tuple[str, ...], bool], ...]:
    return tuple(
        (
            d.subject.index,
            "" if d.verdict.well else str(d.verdict),
            (*d.blames, d.unfit, *d.transports, *map(str, d.cuts)),
            d.out,
        )
        for d in diagnoses
    )


def _detail(diagnoses: Sequence[Diagnosis]) -> tuple[object, ...]:
    return tuple((d.verdict, d.waiting_since is None) for d in diagnoses)

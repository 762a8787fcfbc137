"""Keeps judging every pool from what was sampled, and says which objects need a reconcile because a judgement changed.

No call of the API is made here: pods are as the last reconcile saw them, queues as the sampler sees them now.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from .diagnose.model import Diagnosis, Subject
from .diagnose.pools import diagnose, subjects
from .diagnose.rank import is_current
from .diagnose.track import RankTrack, follow
from .observe.keys import POOL_KIND_OF_ROLE, Bindings, Key
from .observe.model import ObservedPool, RankSample
from .observe.sampler import Target
from .runtime.metrics import HoldReading, QueueReading
from .status.transition import REFRESH

JUDGE_EVERY_S = 1.0
ASK_AGAIN = timedelta(seconds=1)
ASK_AGAIN_AT_LATEST = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the last reconcile of a pool was based on."""

    news: tuple[tuple[int, str, tuple[str, ...]], ...]
    """Verdicts, as far as a change of them is to be shown at once."""
    detail: tuple[object, ...]
    """Verdicts and lengths, which change while requests come and go."""
    at: datetime


class Judge:
    """Owns what is remembered of ranks (tracks) and the last observation of each pool; both only to judge from."""

    def __init__(self, bindings: Bindings, now: Callable[[], datetime], enqueue: Callable[[Key], object]) -> None:
        self._bindings = bindings
        self._now = now
        self._enqueue = enqueue
        self._pools: dict[Key, ObservedPool] = {}
        self._tracks: dict[Key, dict[str, dict[int, RankTrack]]] = {}
        """By pool, then by UID of the pod and rank."""
        self._shown: dict[Key, _Shown] = {}
        self._diagnoses: dict[Key, tuple[Diagnosis, ...]] = {}
        self._asked: dict[Key, tuple[datetime, timedelta]] = {}
        """When a reconcile was asked for, and after what time to ask again; gone when one has come to its end."""
        self.words_due: Callable[[Mapping[Key, ObservedPool]], Collection[Key]] = lambda _: ()
        """Of which of the pools something is to be told about lost peers."""

    def on_samples(self, target: Target, samples: Sequence[RankSample]) -> None:
        """Take in a look at all ranks of one pod."""
        key = Key(POOL_KIND_OF_ROLE[target.role], target.namespace, target.pool)
        tracks = self._tracks.setdefault(key, {})
        before = tracks.get(target.pod_uid, {})
        tracks[target.pod_uid] = {sample.rank: follow(before.get(sample.rank), sample) for sample in samples}

    def observed(self, key: Key, pool: ObservedPool) -> None:
        """The pool is like this now."""
        self._pools[key] = pool
        there = {i.pod.uid for i in pool.instances if i.pod is not None}
        for uid in self._tracks.get(key, {}).keys() - there:
            del self._tracks[key][uid]

    def gone(self, key: Key) -> None:
        """There is no such pool any more."""
        self._pools.pop(key, None)
        self._tracks.pop(key, None)
        self._shown.pop(key, None)
        self._asked.pop(key, None)
        self._diagnoses.pop(key, None)

    def judge(self, key: Key) -> tuple[Diagnosis, ...]:
        """The judgement on each instance of a pool, given the pools that services bind to it."""
        pool = self._pools.get(key)
        if pool is None:
            return ()
        others = [s for other in self._partners(key) for s in self._subjects(other)]
        return diagnose(self._subjects(key), others, stuck_after_s=pool.stuck_after_s, now=self._now())

    def shown(self, key: Key, diagnoses: tuple[Diagnosis, ...]) -> None:
        """These diagnoses are what the pool's status now says."""
        self._diagnoses[key] = diagnoses
        self._asked.pop(key, None)
        self._shown[key] = _Shown(_news(diagnoses), _detail(diagnoses), self._now())

    async def run(self) -> None:
        """Judge all pools every second, for ever."""
        while True:
            await asyncio.sleep(JUDGE_EVERY_S)
            self.tick()

    def tick(self) -> None:
        """Ask for a reconcile of every pool (and its services) whose status does not say what is so now."""
        for key in self.words_due(self._pools):
            self._ask(key)
        for key in list(self._pools):
            diagnoses = self.judge(key)
            shown = self._shown.get(key)
            if shown is None:
                continue  # its first reconcile is still under way
            changed = shown.news != _news(diagnoses)
            stale = self._now() - shown.at >= REFRESH and shown.detail != _detail(diagnoses)
            self._diagnoses[key] = diagnoses
            if (changed or stale) and self._ask(key):
                for service in self._bindings.services(key):
                    self._enqueue(service)

    def _ask(self, key: Key) -> bool:
        """Ask for a reconcile of a pool, unless one was asked for and none has come to its end since; whether it was.

        Then it is asked for again after a while that doubles: an API server that fails all is not to be asked more.
        """
        now, (at, wait) = self._now(), self._asked.get(key, (None, ASK_AGAIN / 2))
        if at is not None and now - at < wait:
            return False
        self._asked[key] = now, min(2 * wait, ASK_AGAIN_AT_LATEST)
        self._enqueue(key)
        return True

    def verdicts(self) -> Mapping[tuple[str, str, str, str], str]:
        """Verdict by (namespace, pool, role, instance): for metrics."""
        return {
            (key.namespace, d.subject.pool, str(d.subject.role), str(d.subject.index)): str(d.verdict)
            for key, diagnoses in self._diagnoses.items()
            for d in diagnoses
        }

    def queues(self) -> Iterator[QueueReading]:
        """The hand-off queues as last seen: for metrics. A rank that did not answer last time has none."""
        for labels, latest in self._ranks():
            if latest.connector is not None:
                for name, queue in latest.connector.queues.items():
                    yield QueueReading((*labels, name), queue.reqs, queue.oldest_s, queue.moved_total)
            elif latest.engine is not None:
                for name, reqs in latest.engine.queues.items():
                    yield QueueReading((*labels, name), reqs, None, None)

    def holds(self) -> Iterator[HoldReading]:
        """What ranks keep back, as last seen: for metrics. A rank that did not answer last time has none."""
        for labels, latest in self._ranks():
            if (connector := latest.connector) is not None:
                yield HoldReading(labels, connector.held_bytes, connector.held_oldest_s or 0.0)

    def _ranks(self) -> Iterator[tuple[tuple[str, str, str, str, str], RankSample]]:
        """The last look at every rank of all pools that says something about now, with its labels."""
        for key in self._pools:
            for subject in self._subjects(key):
                where = (key.namespace, subject.pool, str(subject.role), str(subject.index))
                for track in subject.tracks:
                    if is_current(track, self._now()):
                        yield (*where, str(track.latest.rank)), track.latest

    def _subjects(self, key: Key) -> tuple[Subject, ...]:
        pool = self._pools.get(key)
        return subjects(pool, self._tracks.get(key, {})) if pool else ()

    def _partners(self, key: Key) -> set[Key]:
        pools = {pool for service in self._bindings.services(key) for pool in self._bindings.pools(service)}
        return {pool for pool in pools if pool.kind != key.kind}


def _news(diagnoses: Sequence[Diagnosis]) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    return tuple((d.subject.index, "" if d.verdict.well else str(d.verdict), d.blames) for d in diagnoses)


def _detail(diagnoses: Sequence[Diagnosis]) -> tuple[object, ...]:
    return tuple(d.verdict for d in diagnoses), _lengths(diagnoses)


def _lengths(diagnoses: Sequence[Diagnosis]) -> tuple[tuple[int, int, str, int], ...]:
    return tuple(
        (d.subject.index, track.latest.rank, name, queue.reqs)
        for d in diagnoses
        for track in d.subject.tracks
        if track.latest.connector is not None
        for name, queue in track.latest.connector.queues.items()
    )

"""What each scrape shows of the judge: queues, memory held, verdicts, rotation and demand."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from ..diagnose.demand import demand
from ..diagnose.evidence import is_current
from ..diagnose.track import RankTrack
from ..plan.rotation import receiving
from ..runtime.live_metrics import DemandReading, HoldReading, QueueReading
from .judge import Judge


class Readings:
    """Computes the readings of a scrape from the present state of the judge."""

    def __init__(self, judge: Judge, now: Callable[[], datetime]) -> None:
        self._judge, self._now = judge, now

    def verdicts(self) -> Mapping[tuple[str, str, str, str], str]:
        """Return the verdict by (namespace, pool, role, instance)."""
        return {
            (key.namespace, d.subject.pool, str(d.subject.role), d.subject.label): str(d.verdict)
            for key, diagnoses in self._judge.diagnoses().items()
            for d in diagnoses
        }

    def rotation(self) -> Mapping[tuple[str, str, str, str], bool]:
        """Return whether routers should list each instance by (namespace, pool, role, instance)."""
        found = {}
        for key, pool in self._judge.pools().items():
            if pool.watched:
                continue  # its routers are not ours
            listed = receiving(self._judge.marked(key, pool))
            for subject in self._judge.subjects(key):
                ip = subject.pod.ip if subject.pod is not None else None
                found[key.namespace, subject.pool, str(subject.role), subject.label] = ip in listed
        return found

    def demands(self) -> Iterator[DemandReading]:
        """Return the hand-off queues of each pool to scale it by."""
        for key, observed in self._judge.pools().items():
            for one in demand(self._judge.diagnoses().get(key, ()), self._now()) if not observed.watched else ():
                labels = (key.namespace, key.name, str(observed.pool.role), one.queue)
                yield DemandReading(labels, one.reqs, one.oldest_s)

    def queues(self) -> Iterator[QueueReading]:
        """Return the hand-off queues as last seen. Ranks without a last answer have none."""
        for labels, track in self._ranks():
            shown = track.latest.connector.engine_queues if track.latest.connector is not None else {}
            for name, queue in (track.latest.seen_queues or {}).items():
                leaked = track.leaked.get(name, 0) if name in shown else None
                yield QueueReading((*labels, name), queue.reqs, queue.oldest_s, queue.moved_total, leaked)

    def holds(self) -> Iterator[HoldReading]:
        """Return the memory that ranks hold, as last seen. Ranks without a last answer have none."""
        for labels, track in self._ranks():
            if (connector := track.latest.connector) is not None:
                yield HoldReading(labels, connector.held_bytes, connector.held_oldest_s or 0.0)

    def _ranks(self) -> Iterator[tuple[tuple[str, str, str, str, str], RankTrack]]:
        """Return the track of every rank of all pools, with its labels, if its last sample is still current."""
        for key in self._judge.pools():
            for subject in self._judge.subjects(key):
                where = (key.namespace, subject.pool, str(subject.role), subject.label)
                for track in subject.tracks:
                    if is_current(track, self._now()):
                        yield (*where, str(track.latest.rank)), track

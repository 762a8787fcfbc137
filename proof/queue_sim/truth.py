"""Derives from a world what is true of it, so that verdicts can be scored."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdpool_operator.api.names import Role
from pdpool_operator.controller.judge import JUDGE_EVERY_S
from pdpool_operator.diagnose.model import Diagnosis
from pdpool_operator.diagnose.orphans import LAG, LEAKED_AFTER
from pdpool_operator.observe.sampler import INTERVAL_S, JITTER

from proof.queue_sim.faults import FAULTS, Incident, Kind
from proof.queue_sim.observe import STUCK_AFTER_S
from proof.queue_sim.score import NAMES, Truth
from proof.queue_sim.world import BOOTSTRAP, TRANSFER, Engine, World

LIMIT_S = 36.0
"""Time to a verdict: stuckAfter, the longest interval of samples, and two looks of the judge."""
GRACE_S = 75.0
"""A verdict may be late by the window of outcomes and a few samples after a fault has ended."""
LATE_S = 75.0
"""So long after it came back, an instance may be named as what others wait for."""
SAMPLED_S = INTERVAL_S * (1 + JITTER) + 2 * JUDGE_EVERY_S
"""So long a hand-off that has finished may be unknown to the judge."""
LEAK_LIMIT_S = LEAKED_AFTER.total_seconds() + 2 * SAMPLED_S
"""Time to the verdict Leaked, once samples show the request."""
ACCUSED = frozenset({Kind.FROZEN, Kind.RANK_FROZEN, Kind.FAILS_ALL, Kind.PEER_FAILING, Kind.RESTART})
"""Incidents in which an instance may be judged Stuck or Failing."""
BACKLOG_S = 20.0
FAILED, SIBLINGS_DONE = 8, 12
"""Failures of an instance, and successes of its sibling, of the last 50 s, that must be enough evidence."""
EVIDENCE_S = 10.0
GOES_ON_S = 30.0
"""So long after its last hand-off, an instance with a backlog may have failures because requests reach their deadlines.
The counters do not show how long a failed request waited.
"""


@dataclass
class _Active:
    incident: Incident
    began_s: float
    process: int
    ended_s: float | None = None
    found: bool = False
    was_due: bool = False
    quiet_s: float | None = None
    """When nothing had finished at the instance for `STUCK_AFTER_S` at last."""
    evident_s: float | None = None
    """Since when samples show the fault: enough failed requests, or a request that is older than all hand-offs."""


class Truths:
    """Follows the incidents of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._active: list[_Active] = []
        self._operator_s = 0.0
        self._late: dict[str, float] = {}
        """Until when an instance without a fault may be named, by name."""
        self.found_faults = 0

    @property
    def calm(self) -> bool:
        """Whether no incident is under way or has just ended."""
        return not self._active

    def operator_started(self, now: float) -> None:
        """The operator knows nothing of what happened before."""
        self._operator_s = now

    def began(self, incident: Incident) -> None:
        """Take in the start of an incident."""
        engine = self._world.engines[incident.role][incident.index]
        self._active.append(_Active(incident, self._world.now, engine.process))

    def ended(self, incident: Incident) -> None:
        """Take in the end of an incident."""
        for active in self._active:
            if active.incident is incident:
                active.ended_s = self._world.now

    def found(self, diagnoses: Iterable[Diagnosis]) -> None:
        """Remember which faults have been named."""
        accused = {d.subject.name for d in diagnoses if d.verdict in NAMES}
        for active in self._active:
            if not active.found and active.incident.kind in FAULTS and accused & self._names(active):
                active.found = True
                self.found_faults += 1

    def at(self, now: float) -> Truth:
        """Return what is true now."""
        self._active = [a for a in self._active if a.ended_s is None or now - a.ended_s < GRACE_S]
        self._forgive(now)
        guilty, due = set(), {}
        for active in self._active:
            if self._may_be_accused(active, now):
                guilty |= self._names(active)
            if (active.found and active.was_due) or not self._is_due(active, now):
                continue
            active.was_due = True
            if not active.found:
                due[self._engine(active).name] = str(active.incident)
        leaks = frozenset(self._engine(active).name for active in self._active if active.incident.kind is Kind.LEAKED)
        suspect = frozenset(name for name, until in self._late.items() if now < until)
        return Truth(frozenset(guilty), due, leaks, suspect)

    def _engine(self, active: _Active) -> Engine:
        return self._world.engines[active.incident.role][active.incident.index]

    def _names(self, active: _Active) -> set[str]:
        names = {self._engine(active).name}
        if active.incident.kind is Kind.PEER_FAILING:
            other = Role.DECODE if active.incident.role is Role.PREFILL else Role.PREFILL
            names.add(self._world.engines[other][active.incident.index].name)
        return names

    def _may_be_accused(self, active: _Active, now: float) -> bool:
        if active.incident.kind is Kind.GAUGE_FROZEN:
            # Without traffic, the numbers are all that there is to see.
            if now - self._engine(active).done_s >= STUCK_AFTER_S:
                active.quiet_s = now
            return active.quiet_s is not None and now - active.quiet_s <= SAMPLED_S
        return active.incident.kind in ACCUSED

    def _is_due(self, active: _Active, now: float) -> bool:
        engine, kind = self._engine(active), active.incident.kind
        if active.ended_s is not None or not engine.ready or engine.leaving or not engine.reachable:
            return False
        since = max(active.began_s, self._operator_s)
        match kind:
            case Kind.FROZEN | Kind.RANK_FROZEN:
                return engine.frozen_s is not None and now - max(since, engine.frozen_s) >= LIMIT_S
            case Kind.FAILS_ALL:
                return self._is_evident(active, engine, now)
            case Kind.LEAKED:
                return self._is_plain(active, engine, now)
            case _:
                return False

    def _is_evident(self, active: _Active, engine: Engine, now: float) -> bool:
        """Whether enough requests failed while a sibling served, for long enough that samples show it."""
        since = max(active.began_s, self._operator_s)
        siblings = [e for e in self._world.engines[engine.role] if e is not engine and e.ready and not e.leaving]
        counts = [sibling.ended_lately(now) for sibling in siblings]
        well = any(done >= SIBLINGS_DONE and failed * 10 <= done for done, failed in counts)
        failures = sum(not ok for at, ok in engine.recent if at > since and now - at < 50)
        at_deadlines = now < self._late.get(engine.name, 0.0) and now - engine.done_s <= GOES_ON_S
        if at_deadlines or not (well and failures >= FAILED and now - since > 50):
            active.evident_s = None
            return False
        active.evident_s = now if active.evident_s is None else active.evident_s
        return now - active.evident_s >= EVIDENCE_S

    def _is_plain(self, active: _Active, engine: Engine, now: float) -> bool:
        """Whether the leaked request has been older than all hand-offs for so long that it must be known."""
        name = BOOTSTRAP if engine.role is Role.PREFILL else TRANSFER
        entered = dict(engine.queues[name].entered)
        leaked_s = entered.pop(engine.leaked, now) if engine.leaked is not None else now
        older = min(entered.values(), default=now) - leaked_s > LAG.total_seconds() + SAMPLED_S
        if not older or engine.frozen_s is not None or engine.frozen_gauge is not None:
            active.evident_s = None
            return False
        active.evident_s = now if active.evident_s is None else active.evident_s
        return now - max(active.evident_s, self._operator_s) >= LEAK_LIMIT_S

    def _forgive(self, now: float) -> None:
        for engine in self._world.all():
            oldest = max((queue.oldest_s(now) or 0.0 for queue in engine.queues.values()), default=0.0)
            if oldest >= BACKLOG_S or not engine.ready or not engine.reachable or engine.leaving:
                self._late[engine.name] = now + LATE_S
        self._late = {name: until for name, until in self._late.items() if until > now - LATE_S}

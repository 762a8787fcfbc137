"""Runs one world under the operator's own judgement, at the operator's cadence."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from pdpool_operator.api import names
from pdpool_operator.api.names import Role
from pdpool_operator.api.services import DisaggregatedService
from pdpool_operator.controller.judge import JUDGE_EVERY_S, Judge
from pdpool_operator.diagnose.model import Diagnosis
from pdpool_operator.observe.keys import POOL_KIND_OF_ROLE, Bindings, Key
from pdpool_operator.observe.model import ObservedPool
from pdpool_operator.observe.router_outcomes import INTERVAL_S as ROUTER_EVERY_S
from pdpool_operator.observe.router_outcomes import RouterSample
from pdpool_operator.observe.sampler import INTERVAL_S, JITTER
from pdpool_operator.observe.samples import Tally
from pdpool_operator.observe.targets import Target
from pdpool_operator.plan.rotation import receiving

from proof.queue_sim import observe
from proof.queue_sim.apply import APPLY
from proof.queue_sim.faults import HOUR_S, Incident
from proof.queue_sim.score import Score, Scorer
from proof.queue_sim.truth import Truths
from proof.queue_sim.world import Engine, World

ROLES = (Role.PREFILL, Role.DECODE)
SERVICE = Key(DisaggregatedService.kind, "llm", "chat")
KEYS = {role: Key(POOL_KIND_OF_ROLE[role], "llm", "chat") for role in ROLES}

CALM = 3
"""While there is no incident and all verdicts are well, the judge looks at every third second, as the sampler does."""


@dataclass
class Picture:
    """What a plot of a run shows: every `every_s` one moment."""

    every_s: float
    moments: list[tuple[float, float, dict[str, int], dict[str, str]]] = field(default_factory=list)
    """Seconds, arrivals per second, lengths by `instance queue`, and verdicts by instance."""


class Run:
    """One world, one operator."""

    def __init__(self, seed: int, incidents: Iterable[Incident], picture: Picture | None = None) -> None:
        self.world = World(seed)
        self.seed = seed
        self.scorer = Scorer()
        self.diagnoses: tuple[Diagnosis, ...] = ()
        self.incidents = tuple(incidents)
        self._rng = random.Random(f"run {seed}")
        self._skew_s = self._rng.uniform(-60, 60)
        self._step_s = 0.0
        self._pools = {role: observe.pool(role) for role in ROLES}
        self._bindings = Bindings()
        self._bindings.bind(SERVICE, "chat", "chat")
        self._picture = picture
        self._truths = Truths(self.world)
        self._observed: dict[Role, ObservedPool] = {}
        self._start_operator()
        for incident in self.incidents:
            self.world.after(incident.at_s, lambda incident=incident: self._begin(incident))  # type: ignore[misc]
        for engine in self.world.all():
            self._sample_later(engine)
        self.world.after(ROUTER_EVERY_S, self._sample_router)

    def play(self, hours: float) -> Score:
        """Play so many hours and return their score."""
        ticks = int(hours * HOUR_S / JUDGE_EVERY_S)
        for tick in range(1, ticks + 1):
            self.world.run_until(tick * JUDGE_EVERY_S)
            self._reconcile_pods()
            if tick % CALM == 0 or not self._truths.calm or not all(d.verdict.well for d in self.diagnoses):
                self._judge()
        self.scorer.score.hours = hours
        self.scorer.score.faults = self._truths.found_faults
        return self.scorer.score

    def _now(self) -> datetime:
        return observe.moment(self.world.now + self._step_s)

    def _start_operator(self) -> None:
        self._judge_of_all = Judge(self._bindings, self._now, lambda _: None)
        self.world.pods_changed = True
        self._truths.operator_started(self.world.now)

    def _reconcile_pods(self) -> None:
        if self.world.pods_changed:
            self.world.pods_changed = False
            for role, key in KEYS.items():
                observed = observe.observed_pool(self._pools[role], self.world.engines[role], self._skew_s)
                self._judge_of_all.observed(key, observed)
                self._observed[role] = observed

    def _judge(self) -> None:
        judge, now = self._judge_of_all, self.world.now
        found = judge.look()
        self.diagnoses = self.said(tuple(diagnosis for key in KEYS.values() for diagnosis in found[key]))
        for role, key in KEYS.items():
            self.world.listed[role] = receiving(judge.marked(key, self._observed[role]))
        truth = self._truths.at(now)
        self._truths.found(self.diagnoses)
        self.scorer.see(now, self.diagnoses, truth, f"seed {self.seed}, hour {now / HOUR_S:.3f}")
        if self._picture is not None and now % self._picture.every_s < JUDGE_EVERY_S:
            self._draw(self._picture)

    @staticmethod
    def said(diagnoses: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
        """Return the verdicts to score. A mutant returns others."""
        return diagnoses

    def _draw(self, picture: Picture) -> None:
        lengths = {f"{e.name} {name}": len(q.entered) for e in self.world.all() for name, q in e.queues.items()}
        verdicts = {d.subject.name: str(d.verdict) for d in self.diagnoses}
        picture.moments.append((self.world.now, self.world.rate(), lengths, verdicts))

    def _sample_later(self, engine: Engine) -> None:
        delay = INTERVAL_S * (1 + JITTER * self._rng.uniform(-1, 1))
        self.world.after(delay, lambda: self._sample(engine))

    def _sample(self, engine: Engine) -> None:
        target = Target("llm", "chat", engine.role, engine.index, engine.pod_uid, engine.ip)
        self._judge_of_all.on_samples(target, observe.samples(engine, self.world.now, self._now()))
        self._sample_later(engine)

    def _sample_router(self) -> None:
        totals = {names.engine_url(e.ip): Tally(*e.routed) for e in self.world.all()}
        self._judge_of_all.on_router(SERVICE, RouterSample("router-0", self._now(), totals))
        self.world.after(ROUTER_EVERY_S, self._sample_router)

    def _begin(self, incident: Incident) -> None:
        undo = APPLY[incident.kind](self, incident)
        self._truths.began(incident)
        self.world.after(incident.lasts_s, lambda: self._over(incident, undo))

    def _over(self, incident: Incident, undo: Callable[[], None]) -> None:
        undo()
        self._truths.ended(incident)

    def restart_operator(self) -> None:
        """Forget everything that the operator remembered."""
        self._start_operator()

    def step_clock(self, seconds: float) -> None:
        """Set the operator's clock."""
        self._step_s += seconds

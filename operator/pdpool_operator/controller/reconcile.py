"""One reconcile for pools and one for services: get, observe, diagnose, plan, apply, status, events.

Reconciles are level-triggered: a decision depends on the state that was read, not on the event that started it. All
state is in the cluster. An operator that is killed between any two steps continues from there after its restart.
"""

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import product

from ..api.base import SpecInvalid
from ..api.key_epochs import KeyEpochs
from ..api.names import Role
from ..api.operations import PoolOperation
from ..api.pools import POOL_KINDS, Pool, RepairAction
from ..api.reasons import Reason
from ..api.services import DisaggregatedService
from ..build.settings import BuildSettings
from ..observe.cluster import Cluster
from ..observe.keys import FLEET_PREFIX, Bindings, Key
from ..observe.model import ObservedRouter, ObservedService
from ..observe.router_outcomes import RouterOutcomes
from ..observe.routers import RouterClient
from ..plan.model import Event, Fault, Plan
from ..plan.pool import plan_pool
from ..plan.repair_model import RepairPlan
from ..plan.selection import AT_FAULT
from ..plan.service import plan_service, worker_events
from ..runtime.api import Api
from ..runtime.api_errors import ApiError, ConflictError, NotFoundError
from ..runtime.manager import Result
from ..runtime.metrics import Metrics
from ..runtime.resources import POOL_RESOURCES, SERVICES_PD, Object, Resource
from ..status.fleet import fleet_status
from ..status.pool import PoolFacts, pool_status
from ..status.service import ServiceFacts, service_status
from ..status.transition import Status
from .again import (
    FIRST_VERDICTS_AGAIN_S,
    FLEET_AGAIN_S,
    ROTATION_AGAIN_S,
    SERVICE_RESYNC_S,
    events_again_s,
    repairs_again_s,
    result,
)
from .apply import ApplyResult, carry_out
from .counts import fleet_parts, pool_counts, service_parts
from .fences import Fencer, fence_events
from .judge import Judge
from .node_fences import NodeFences
from .operations import Operations
from .repairs import Repairer
from .reporter import Reporter

FIRST_VERDICTS = timedelta(seconds=10)
"""How long the status of a service stays as it is while this process has no verdicts on its pools yet. Otherwise each
restart of the operator would write that they are not judged."""
REPAIR_OUTCOMES = {
    Reason.REPAIR_PROPOSED: "proposed",
    Reason.REPAIR_DONE: "done",
    Reason.REPAIR_WITHDRAWN: "withdrawn",
}
KINDS: dict[str, type[Pool]] = {kind.kind: kind for kind in POOL_KINDS}

log = logging.getLogger(__name__)


@dataclass
class Controller:
    """Dependencies of a reconcile. Its only state: since when each service is known, and which calls keep failing."""

    api: Api
    cluster: Cluster
    routers: RouterClient
    router_outcomes: RouterOutcomes
    judge: Judge
    fencer: Fencer
    repairs: Repairer
    operations: Operations
    node_fences: NodeFences
    bindings: Bindings
    reporter: Reporter
    metrics: Metrics
    engine_settings: Callable[[str], BuildSettings]
    """Settings for the engines of a namespace."""
    router_key: Callable[[str, int], str]
    """Key of a namespace's routers of one epoch."""
    enqueue: Callable[[Key], object]
    now: Callable[[], datetime]
    rng: random.Random = field(default_factory=random.Random)
    first_seen: dict[Key, datetime] = field(default_factory=dict)
    failures: dict[Key, int] = field(default_factory=dict)
    """Reconciles of an object that failed in a row because calls of the API failed."""

    async def reconcile(self, key: Key) -> Result:
        """Bring one object closer to its desired state."""
        try:
            if key.kind == PoolOperation.kind:
                ended = await self.node_fences.reconcile(key)
            elif key.kind == DisaggregatedService.kind:
                ended = await self.reconcile_service(key)
            else:
                ended = await self.reconcile_pool(key, KINDS[key.kind])
        except (ConflictError, NotFoundError):
            raise  # another writer was faster: this heals at once
        except ApiError:
            self.failures[key] = self.failures.get(key, 0) + 1
            raise
        self.failures.pop(key, None)
        return ended

    async def reconcile_pool(self, key: Key, kind: type[Pool]) -> Result:
        """Reconcile one pool. A plan that cannot be undone is made again from live state, and only then carried out."""
        return await self._pool(key, kind, self.cluster) or await self._pool(key, kind, self.cluster.live) or Result()

    async def _pool(self, key: Key, kind: type[Pool], cluster: Cluster) -> Result | None:
        """Reconcile one pool from what `cluster` reads. Return None, and do nothing, if that must be live state."""
        resource = POOL_RESOURCES[kind]
        body = await cluster.body(resource, key.namespace, key.name)
        if body is None:
            return await self._absent_pool(key, kind, cluster)
        try:
            pool = kind.parse(body)
        except SpecInvalid as invalid:
            return await self._refuse_pool(key, kind, body, str(invalid), cluster)
        try:
            observed = await cluster.pool(pool)
        except ApiError as error:
            await self._report_failing(key, resource, body, error)
            raise
        self.judge.observed(key, observed)
        observed = self.judge.marked(key, observed)
        diagnoses = self.judge.judge(key)
        at_fault = {d.subject.index for d in diagnoses if d.verdict in AT_FAULT or d.unfit}
        settings = self.engine_settings(key.namespace)
        now = self.now()  # one moment, so that both plans agree on which repairs still count
        plan = plan_pool(observed, settings, now, at_fault)
        repair = await self.repairs.look(key, body, observed, diagnoses, now, cluster)
        operations = self.operations.plan(observed, diagnoses)
        if (plan.needs_live_state or repair.acts or operations.acts) and not cluster.is_live:
            return None
        rotates = None if observed.keys == KeyEpochs(settings.key_epoch) else ROTATION_AGAIN_S
        outcome, failure = await self._carry_out(key, plan)
        fencing = self.fencer.take(key, observed)
        fenced = fence_events(await self.fencer.send(fencing.fences))
        status = pool_status(
            PoolFacts(
                observed, plan, diagnoses, self.now(), outcome.faults, fencing.unproven, repair.records, repair.stops
            )
        )
        self.metrics.states.show_pool(key, pool_counts(observed, diagnoses, status, repair))
        pending = await self.reporter.write_status(key, resource, body, pool.status, status)
        self.judge.shown(key, diagnoses)
        events = (*completed(plan, outcome), *fenced, *repair.events)
        await self.reporter.record_events(resource, body, events, pool.status, status)
        self._count_repairs(key, pool, repair)
        await self.operations.carry_out(key.namespace, operations)
        if failure is not None:
            raise failure
        events_again = events_again_s(observed, self.now())
        return result(plan, outcome, pending, events_again, rotates, repairs_again_s(repair), operations.again_s)

    def _count_repairs(self, key: Key, pool: Pool, repair: RepairPlan) -> None:
        """Count repairs. Each counter of a pool begins at 0, because `increase()` does not see the first value."""
        for labels in repair_labels(key, pool.role):
            self.metrics.repairs.labels(*labels)
        for one in repair.repair_events:
            outcome = REPAIR_OUTCOMES[one.event.reason]
            self.metrics.repairs.labels(key.namespace, key.name, str(pool.role), one.action.lower(), outcome).inc()

    async def reconcile_service(self, key: Key) -> Result:
        """Reconcile one service, as a pool."""
        return await self._service(key, self.cluster) or await self._service(key, self.cluster.live) or Result()

    async def _service(self, key: Key, cluster: Cluster) -> Result | None:
        body = await cluster.body(SERVICES_PD, key.namespace, key.name)
        if body is None:
            await self._forget_fleet(key)
            self.bindings.drop(key)
            self._watch_routers(key, ())
            self._forget(key)
            return Result()
        try:
            service = DisaggregatedService.parse(body)
        except SpecInvalid as invalid:
            return await self._refuse(key, SERVICES_PD, body, str(invalid))
        if service.spec.watches:
            return await self._fleet(key, body, service)
        await self._forget_fleet(key)
        if self.bindings.bind(key, service.spec.prefill.pool_name, service.spec.decode.pool_name):
            for pool in self.bindings.pools(key):
                self.enqueue(pool)
        try:
            observed = await cluster.service(service)
        except SpecInvalid as invalid:
            return await self._refuse(key, SERVICES_PD, body, str(invalid))
        except ApiError as error:
            await self._report_failing(key, SERVICES_PD, body, error)
            raise
        self._watch_routers(key, observed.routers)
        observed = self._marked(observed)
        plan = plan_service(observed, self.engine_settings(key.namespace))
        if plan.needs_live_state and not cluster.is_live:
            return None
        outcome, failure = await self._carry_out(key, plan)
        diagnoses = tuple(d for pool in sorted(self.bindings.pools(key)) for d in self.judge.judge(pool))
        self.metrics.states.show_service(key, service_parts(observed, diagnoses))
        status = service_status(ServiceFacts(observed, plan, diagnoses, outcome.faults, outcome.unsettled), self.now())
        if service.status.conditions and self._lacks_first_verdicts(key, status):
            status, verdicts_due = service.status, FIRST_VERDICTS_AGAIN_S
        else:
            verdicts_due = None
        pending = await self.reporter.write_status(key, SERVICES_PD, body, service.status, status)
        await self.reporter.record_events(SERVICES_PD, body, completed(plan, outcome), service.status, status)
        for words in outcome.unsettled:
            log.info("worker list: %s", words, extra={"kind": key.kind, "namespace": key.namespace, "object": key.name})
        if failure is not None:
            raise failure
        return result(plan, outcome, pending, verdicts_due, SERVICE_RESYNC_S * self.rng.uniform(0.9, 1.1))

    async def _fleet(self, key: Key, body: Object, service: DisaggregatedService) -> Result:
        """Judge a service that only watches pods. Nothing is written but its status."""
        name = f"{FLEET_PREFIX}{key.name}"
        self.bindings.bind(key, name, name)
        self._watch_routers(key, ())
        try:
            observed = await self.cluster.fleet(service)
        except ApiError as error:
            await self._report_failing(key, SERVICES_PD, body, error)
            raise
        sides = {Key(side.pool.kind, key.namespace, name): side for side in observed.sides}
        for side_key, side in sides.items():
            self.judge.observed(side_key, side)
        judged = {side_key: self.judge.judge(side_key) for side_key in sides}
        diagnoses = tuple(d for some in judged.values() for d in some)
        self.metrics.states.show_service(key, fleet_parts(observed, diagnoses))
        status = fleet_status(observed, diagnoses, self.now())
        pending = await self.reporter.write_status(key, SERVICES_PD, body, service.status, status)
        for side_key, some in judged.items():
            self.judge.shown(side_key, some)
        await self.reporter.record_events(SERVICES_PD, body, (), service.status, status)
        return result(Plan(), ApplyResult(), pending, FLEET_AGAIN_S * self.rng.uniform(0.9, 1.1))

    async def _forget_fleet(self, key: Key) -> None:
        """Remove the sides of a service that only watched."""
        sides = [side for side in self.bindings.pools(key) if side.to_reconcile == key]
        for side in sides:
            self.judge.gone(side)
        if sides:
            await self.cluster.forget_fleet(key.namespace, key.name)

    def _lacks_first_verdicts(self, key: Key, status: Status) -> bool:
        first = self.first_seen.setdefault(key, self.now())
        unjudged = any(condition.reason == Reason.NOT_JUDGED for condition in status.conditions)
        return unjudged and self.now() - first < FIRST_VERDICTS

    def _watch_routers(self, service: Key, routers: Iterable[ObservedRouter]) -> None:
        pods = {r.pod.uid: r.pod.ip for r in routers if r.pod.ip and r.pod.phase == "Running"}
        self.router_outcomes.watch(service, pods.items())
        self.judge.observed_routers(service, pods.keys())

    def _marked(self, observed: ObservedService) -> ObservedService:
        """Return the service with the instances that are to be out of the rotation and the reachable routers marked."""
        prefill, decode = (
            self.judge.marked(Key(pool.pool.kind, pool.pool.metadata.namespace, pool.pool.metadata.name), pool)
            if pool is not None
            else None
            for pool in (observed.prefill, observed.decode)
        )
        routers = (replace(r, reachable=self.router_outcomes.reachable(r.pod.uid)) for r in observed.routers)
        return replace(observed, prefill=prefill, decode=decode, routers=tuple(routers))

    async def _carry_out(self, key: Key, plan: Plan) -> tuple[ApplyResult, ApiError | None]:
        """Carry out the plan. A failure that lasts becomes a fault; the caller raises it after the status is written.

        Raises:
            ApiError: the first failure in a row, which the next reconcile usually heals.
        """
        try:
            return await carry_out(plan, key.namespace, self.api, self.routers, self.router_key), None
        except (ConflictError, NotFoundError):
            raise
        except ApiError as error:
            if not self.failures.get(key):
                raise
            return ApplyResult(faults=(Fault(Reason.API_FAILING, _failing(error)),)), error

    async def _report_failing(self, key: Key, resource: Resource, body: Object, error: ApiError) -> None:
        """Show in the status that the object cannot be observed, if that has lasted for two reconciles."""
        if self.failures.get(key):
            await self.reporter.refuse(key, resource, body, Reason.API_FAILING, _failing(error))

    async def _absent_pool(self, key: Key, kind: type[Pool], cluster: Cluster) -> Result | None:
        """Remove the pool from memory, and end its operations. Owner references delete the pool's objects."""
        operations = await cluster.operations(kind, key.namespace, key.name)
        plan = self.operations.plan_without_pool(operations)
        if plan.acts and not cluster.is_live:
            return None
        self.judge.gone(key)
        await self.cluster.forget_pool(key.namespace, key.name, kind.role)
        self._forget(key)
        for labels in repair_labels(key, kind.role):
            self.metrics.repairs.remove(*labels)
        await self.operations.carry_out(key.namespace, plan)
        return Result()

    async def _refuse_pool(
        self, key: Key, kind: type[Pool], body: Object, message: str, cluster: Cluster
    ) -> Result | None:
        """Report that the pool does not fit its model. Its operations wait."""
        operations = await cluster.operations(kind, key.namespace, key.name)
        plan = self.operations.plan_without_pool(operations, message)
        if plan.acts and not cluster.is_live:
            return None
        await self._refuse(key, POOL_RESOURCES[kind], body, message)
        await self.operations.carry_out(key.namespace, plan)
        return Result(plan.again_s)

    def _forget(self, key: Key) -> None:
        self.reporter.forget(key)
        self.first_seen.pop(key, None)
        self.failures.pop(key, None)

    async def _refuse(self, key: Key, resource: Resource, body: Object, message: str) -> Result:
        """Report that the object does not fit its model. Everything that runs stays as it is."""
        await self.reporter.refuse(key, resource, body, Reason.SPEC_INVALID, message)
        return Result()


def repair_labels(pool: Key, role: Role) -> Iterator[tuple[str, ...]]:
    """Yield the labels of all series that count repairs of a pool."""
    for action, outcome in product(RepairAction, REPAIR_OUTCOMES.values()):
        yield pool.namespace, pool.name, str(role), action.lower(), outcome


def completed(plan: Plan, outcome: ApplyResult) -> tuple[Event, ...]:
    """Return the events of steps that were carried out."""
    return (*(() if outcome.faults else plan.events), *worker_events(outcome.workers))


def _failing(error: ApiError) -> str:
    return f"Calls of the API server fail and are repeated: {error}"

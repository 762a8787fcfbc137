"""Every state of pools and services, as kubectl, kstatus and people read it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from pdpool_operator.api import condition_docs
from pdpool_operator.api.base import Metadata
from pdpool_operator.api.names import ANNOTATION_RESTARTED_AT, Role
from pdpool_operator.api.pools import Pool
from pdpool_operator.api.reasons import ConditionType, Reason
from pdpool_operator.api.services import DisaggregatedService
from pdpool_operator.build.settings import BuildSettings
from pdpool_operator.controller.counts import service_parts
from pdpool_operator.diagnose.model import Cut, Diagnosis, Pair, Subject, Verdict
from pdpool_operator.diagnose.track import RankTrack
from pdpool_operator.observe.model import ObservedInstance, ObservedRouter, ObservedService
from pdpool_operator.observe.samples import HoldSample
from pdpool_operator.plan.fences import Unproven
from pdpool_operator.plan.model import Fault
from pdpool_operator.plan.pool import plan_pool
from pdpool_operator.plan.repair_model import Stop
from pdpool_operator.plan.router_reach import label_routers
from pdpool_operator.plan.service import plan_service, worker_events
from pdpool_operator.runtime.state_metrics import Serving
from pdpool_operator.status.chain import ConditionWriter, find
from pdpool_operator.status.pool import PoolFacts, pool_status
from pdpool_operator.status.service import ServiceFacts, service_status
from pdpool_operator.status.summary import STALLING, refused

from tests.unit.operator.plan.makers import (
    SETTINGS,
    T0,
    follow_all,
    make_instance,
    make_observed,
    make_pod,
    make_pool,
    make_sample,
    make_service,
    seconds,
)
from tests.unit.operator.plan.test_service import decode_instance, deployment, observe, unready
from tests.unit.operator.plan.world import World, settled
from tests.unit.operator.status.kstatus import Status, kstatus, kubectl_wait

DELETED = {"deletion_timestamp": T0}
OTHER_BUILD = replace(SETTINGS, engine_image="other", router_image="other")


@dataclass(frozen=True)
class Shown:
    """One object with its status."""

    metadata: Metadata
    status: Status

    def reason(self, kind: str) -> tuple[str, str]:
        found = find(self.status.conditions, kind)
        return (str(found.status), found.reason) if found is not None else ("", "")


def sampled(verdict: Verdict = Verdict.IDLE, index: int = 0, role: Role = Role.PREFILL, **sample: Any) -> Diagnosis:
    track = follow_all([make_sample(**sample)])
    assert isinstance(track, RankTrack)
    subject = Subject("chat", role, index, make_pod(), leaving=False, tracks=(track,))
    return Diagnosis(subject, verdict, "evidence")


RDMA_POOL = make_pool(rdma={"mode": "Required", "resource": "rdma/ib"})


def paired(*transports: str) -> Diagnosis:
    """Return a diagnosis of an instance that reaches a peer by each of these transports."""
    return replace(sampled(), pairs=tuple(Pair("chat-prefill-0", "chat-decode-0", "nixl", one) for one in transports))


def shown_pool(
    *instances: ObservedInstance,
    pool: Pool | None = None,
    verdicts: tuple[Diagnosis, ...] = (),
    settings: BuildSettings = SETTINGS,
    at: float = 0.0,
    **facts: Any,
) -> Shown:
    pool = pool or make_pool(replicas=len(instances))
    observed = make_observed(pool, *instances)
    diagnoses = verdicts or tuple(sampled(index=i.index) for i in instances)
    plan = plan_pool(observed, settings, T0)
    return Shown(pool.metadata, pool_status(PoolFacts(observed, plan, diagnoses, T0 + seconds(at), **facts)))


def shown_service(
    observed: ObservedService | None = None,
    *,
    verdicts: tuple[Diagnosis, ...] | None = None,
    settings: BuildSettings = SETTINGS,
    faults: tuple[Fault, ...] = (),
) -> Shown:
    observed = observed or observe()
    plan = plan_service(observed, settings)
    both = (sampled(), *(sampled(index=i, role=Role.DECODE) for i in (0, 1)))
    facts = ServiceFacts(observed, plan, both if verdicts is None else verdicts, faults)
    return Shown(observed.service.metadata, service_status(facts, T0))


def one(ready: bool = True, **pod: Any) -> ObservedInstance:
    instance = make_instance(make_pool(), ready=ready)
    assert instance.pod is not None
    return replace(instance, pod=replace(instance.pod, **pod), ranks={0: make_sample()})


def two(ready: bool = True, **pod: Any) -> tuple[ObservedInstance, ObservedInstance]:
    """Return two instances of a pool. The second pod has these fields."""
    second = make_instance(make_pool(replicas=2), 1, ready=ready)
    assert second.pod is not None
    return one(), replace(second, pod=replace(second.pod, **pod))


def on_silent_node(instance: ObservedInstance, *, answers: bool = True) -> ObservedInstance:
    assert instance.pod is not None
    pod = replace(instance.pod, ready=False, was_ready=True, node_silent=True, node="node-7")
    sample = make_sample() if answers else make_sample(connector_error="timeout", running=None)
    return replace(instance, pod=pod, ranks={0: sample})


def deleted_pool() -> Pool:
    pool = make_pool()
    return pool.model_copy(update={"metadata": pool.metadata.model_copy(update=DELETED)})


def updated_pool(replicas: int = 2) -> Pool:
    return make_pool(replicas=replicas, model={"path": "/models/next"})


def lingering() -> ObservedInstance:
    return one(terminating=True, ready=False, gone_by=T0, node="node-7")


def orphan(instance: ObservedInstance) -> ObservedInstance:
    return replace(instance, controller_uid="", labelled=True)


def refused_pool(reason: Reason) -> Shown:
    pool = make_pool()
    conditions = refused(ConditionWriter((), pool.metadata.generation, T0), reason, "spec.replicas: bad")
    return Shown(pool.metadata, pool.status.model_copy(update={"conditions": conditions, "observed_generation": 1}))


def service(**router: Any) -> DisaggregatedService:
    return make_service(router=router)


def deleted_service() -> ObservedService:
    meta = make_service().metadata.model_copy(update=DELETED)
    return observe(service=make_service().model_copy(update={"metadata": meta}))


def contradicting() -> ObservedService:
    pool = make_pool(transfer={"backend": "Local"})
    return replace(observe(), prefill=make_observed(pool, make_instance(pool)))


def decode_at_zero() -> ObservedService:
    routers = deployment(make_service(), ready_replicas=0)
    return replace(observe(deployment=routers), decode=make_observed(make_pool(Role.DECODE, replicas=0)))


def without_decode_pool(*, orphans: bool) -> ObservedService:
    left = {Role.DECODE: (make_pod("chat-decode-0-0", ip="10.0.2.1"),)} if orphans else {}
    return replace(observe(), decode=None, orphans=left)


def fault(reason: Reason) -> tuple[Fault, ...]:
    return (Fault(reason, "the API server's message"),)


# name: (state, kstatus, Available, reason of Ready)
State = tuple[Callable[[], Shown], str, str, str]
POOLS: dict[str, State] = {
    "at the goal": (lambda: shown_pool(one()), "Current", "True", "Ready"),
    "built by an earlier operator": (
        lambda: shown_pool(one(), settings=OTHER_BUILD),
        "Current",
        "True",
        "UpdateAvailable",
    ),
    "at zero": (lambda: shown_pool(pool=make_pool(replicas=0)), "Current", "False", "ScaledToZero"),
    "on its way to zero": (
        lambda: shown_pool(one(), pool=make_pool(replicas=0)),
        "InProgress",
        "True",
        "Draining",
    ),
    "surplus instance ends": (
        lambda: shown_pool(one(), replace(two()[1], deleting=True), pool=make_pool()),
        "InProgress",
        "True",
        "ScalingDown",
    ),
    "new": (lambda: shown_pool(pool=make_pool()), "InProgress", "False", "NoPods"),
    "second instance missing": (
        lambda: shown_pool(one(), pool=make_pool(replicas=2)),
        "InProgress",
        "True",
        "ScalingUp",
    ),
    "starting": (lambda: shown_pool(one(ready=False)), "InProgress", "False", "Starting"),
    "one of two starting": (lambda: shown_pool(*two(ready=False)), "InProgress", "True", "Starting"),
    "one of two fell": (
        lambda: shown_pool(*two(ready=False, was_ready=True)),
        "InProgress",
        "True",
        "EnginesNotReady",
    ),
    "Ready and stuck": (
        lambda: shown_pool(one(), verdicts=(sampled(Verdict.STUCK),)),
        "InProgress",
        "False",
        "EnginesNotReady",
    ),
    "roll-out": (lambda: shown_pool(*two(), pool=updated_pool()), "InProgress", "True", "Updating"),
    "scale-in drains": (
        lambda: shown_pool(
            one(), replace(two()[1], drain_started=T0, drain_reason="ScaleDown", listed_by=("r",)), pool=make_pool()
        ),
        "InProgress",
        "True",
        "Draining",
    ),
    "template refused": (
        lambda: shown_pool(one(), pool=make_pool(template={"spec": {"containers": "x"}})),
        "Failed",
        "True",
        "TemplateInvalid",
    ),
    "name taken": (
        lambda: shown_pool(one(), replace(two()[1], controller_uid="x", controller="Deployment/y")),
        "Failed",
        "True",
        "NameConflict",
    ),
    "name of an object without controller": (
        lambda: shown_pool(one(), replace(two()[1], controller_uid="")),
        "Failed",
        "True",
        "NoController",
    ),
    "orphans": (lambda: shown_pool(orphan(one())), "InProgress", "True", "Adopting"),
    "object refused": (lambda: shown_pool(one(), faults=fault(Reason.APPLY_FAILED)), "Failed", "True", "ApplyFailed"),
    "API server fails": (
        lambda: shown_pool(one(), faults=fault(Reason.API_FAILING)),
        "InProgress",
        "True",
        "ApiFailing",
    ),
    "not observed": (lambda: refused_pool(Reason.API_FAILING), "InProgress", "Unknown", "ApiFailing"),
    "spec refused": (lambda: refused_pool(Reason.SPEC_INVALID), "Failed", "Unknown", "SpecInvalid"),
    "silent kubelet": (lambda: shown_pool(on_silent_node(one())), "InProgress", "True", "NodeNotReady"),
    "lost node": (lambda: shown_pool(on_silent_node(one(), answers=False)), "InProgress", "False", "NodeNotReady"),
    "pod lingers": (lambda: shown_pool(lingering(), at=61), "InProgress", "False", "PodLingers"),
    "no image": (
        lambda: shown_pool(one(ready=False, waiting_reason="ErrImagePull")),
        "InProgress",
        "False",
        "ImagePullFailed",
    ),
    "no Secret": (
        lambda: shown_pool(one(ready=False, warnings=('secret "tls" not found',))),
        "InProgress",
        "False",
        "MissingSecret",
    ),
    "no ConfigMap": (
        lambda: shown_pool(one(ready=False, warnings=('configmap "c" not found',))),
        "InProgress",
        "False",
        "MissingReference",
    ),
    "pod refused": (
        lambda: shown_pool(replace(one(), pod=None, create_error="exceeded quota")),
        "InProgress",
        "False",
        "PodRejected",
    ),
    "bad container": (
        lambda: shown_pool(one(ready=False, waiting_reason="CreateContainerError")),
        "InProgress",
        "False",
        "ContainerConfigInvalid",
    ),
    "crash loop": (
        lambda: shown_pool(*two(ready=False, keeps_ending=True)),
        "InProgress",
        "True",
        "CrashLoop",
    ),
    "no node": (
        lambda: shown_pool(one(ready=False, unschedulable="0/2 nodes")),
        "InProgress",
        "False",
        "Unschedulable",
    ),
    "being deleted": (lambda: shown_pool(one(), pool=deleted_pool()), "Terminating", "True", "Deleting"),
}
SERVICES: dict[str, State] = {
    "at the goal": (shown_service, "Current", "True", "Ready"),
    "no router": (
        lambda: shown_service(observe(service=service(enabled=False), deployment=None, objects=(), routers=())),
        "Current",
        "True",
        "Ready",
    ),
    "built by an earlier operator": (
        lambda: shown_service(settings=OTHER_BUILD),
        "Current",
        "True",
        "UpdateAvailable",
    ),
    "decode at zero": (lambda: shown_service(decode_at_zero()), "Current", "False", "ScaledToZero"),
    "no decode pool": (
        lambda: shown_service(without_decode_pool(orphans=False)),
        "InProgress",
        "False",
        "PoolNotFound",
    ),
    "decode pool deleted, engines left": (
        lambda: shown_service(without_decode_pool(orphans=True)),
        "InProgress",
        "True",
        "PoolNotFound",
    ),
    "contradiction": (lambda: shown_service(contradicting()), "Failed", "False", "PoolsContradict"),
    "one of two decodes down": (
        lambda: shown_service(observe(decode=(decode_instance(0), unready(decode_instance(1))))),
        "Current",
        "True",
        "Ready",
    ),
    "no decode serves": (
        lambda: shown_service(observe(decode=(unready(decode_instance(0)), unready(decode_instance(1))))),
        "InProgress",
        "False",
        "PoolsNotReady",
    ),
    "the only decode is stuck": (
        lambda: shown_service(
            observe(decode=(decode_instance(0),)), verdicts=(sampled(), sampled(Verdict.STUCK, role=Role.DECODE))
        ),
        "InProgress",
        "False",
        "PoolsNotReady",
    ),
    "decodes on a silent node": (
        lambda: shown_service(observe(decode=tuple(on_silent_node(decode_instance(i)) for i in (0, 1)))),
        "Current",
        "True",
        "Ready",
    ),
    "no router Ready": (
        lambda: shown_service(observe(deployment=deployment(make_service(), ready_replicas=0))),
        "InProgress",
        "False",
        "RouterNotReady",
    ),
    "two of three routers": (
        lambda: shown_service(
            observe(
                service=service(replicas=3), deployment=deployment(service(replicas=3), replicas=3, ready_replicas=2)
            )
        ),
        "InProgress",
        "True",
        "RouterNotReady",
    ),
    "router roll-out": (
        lambda: shown_service(observe(deployment=deployment(make_service(), updated_replicas=0))),
        "InProgress",
        "True",
        "Updating",
    ),
    "a router does not answer": (
        lambda: shown_service(observe(workers=None)),
        "InProgress",
        "True",
        "RouterListOutdated",
    ),
    "router refused": (
        lambda: shown_service(observe(deployment=deployment(make_service(), failure="quota"))),
        "InProgress",
        "True",
        "PodRejected",
    ),
    "name taken": (
        lambda: shown_service(observe(deployment=deployment(make_service(), controller_uid="x"))),
        "Failed",
        "True",
        "NameConflict",
    ),
    "API server fails": (
        lambda: shown_service(faults=fault(Reason.API_FAILING)),
        "InProgress",
        "True",
        "ApiFailing",
    ),
    "being deleted": (lambda: shown_service(deleted_service()), "Terminating", "True", "Deleting"),
}
BOTH = {
    **{f"pool: {name}": state for name, state in POOLS.items()},
    **{f"service: {name}": state for name, state in SERVICES.items()},
}
OTHER_CONDITIONS: tuple[Callable[[], Shown], ...] = (
    lambda: shown_service(observe(service=service(enabled=False), deployment=None, objects=(), routers=())),
    lambda: shown_service(verdicts=()),
    lambda: shown_pool(pool=make_pool(replicas=0)),
    lambda: shown_pool(one(), unproven=(Unproven("p", 0, HoldSample("d" * 32, "gone", "run"), "no report"),)),
    *(
        lambda reason=reason: shown_pool(one(), stops=(Stop(reason, "not restarted"),))  # type: ignore[misc]
        for reason in (
            Reason.RESTART_DID_NOT_HELP,
            Reason.REPLACEMENT_DID_NOT_HELP,
            Reason.MANY_AT_FAULT,
            Reason.REPAIR_BUDGET_SPENT,
        )
    ),
    lambda: shown_pool(one(), verdicts=(replace(sampled(), cuts=(Cut("chat-decode-0", "chat-prefill-0", "a", "b"),)),)),
    *(
        lambda transports=transports: shown_pool(one(), pool=RDMA_POOL, verdicts=(paired(*transports),))  # type: ignore[misc]
        for transports in ((), ("",), ("rdma",), ("tcp",))
    ),
    *(
        lambda verdict=verdict: shown_pool(one(), verdicts=(sampled(verdict),))  # type: ignore[misc]
        for verdict in Verdict
    ),
)


@pytest.mark.parametrize("state", BOTH.values(), ids=BOTH)
def test_state_is_read_right(state: State) -> None:
    make, expected, available, reason = state
    shown = make()
    assert kstatus(shown.metadata, shown.status) == expected
    assert shown.reason("Available")[0] == available
    assert shown.reason("Ready")[1] == reason
    assert (shown.reason("Ready")[0] == "True") is (expected == "Current")


@pytest.mark.parametrize("state", BOTH.values(), ids=BOTH)
def test_abnormal_conditions_are_present_only_while_true(state: State) -> None:
    shown = state[0]()
    found = [c for c in shown.status.conditions if c.type in {"Stalled", "Reconciling"}]
    assert [c.status for c in found] in ([], ["True"])
    assert bool(found) is (shown.reason("Ready")[0] != "True")
    assert [c.type for c in found] != ["Stalled"] or found[0].reason in STALLING


@pytest.mark.parametrize("state", BOTH.values(), ids=BOTH)
def test_messages_are_single_sentences_without_repetition(state: State) -> None:
    for condition in state[0]().status.conditions:
        assert condition.message
        assert "\n" not in condition.message
        parts = condition.message.split("; ")
        assert len(parts) == len(set(parts))


def test_every_condition_and_reason_is_documented_once() -> None:
    documented = [reason for reasons in condition_docs.REASONS.values() for reason in reasons]
    assert sorted(documented) == sorted(Reason)
    assert set(condition_docs.CONDITIONS) == set(ConditionType)
    stalling = set(condition_docs.REASONS["Refused"])
    assert stalling == STALLING


def reached() -> set[str]:
    """Return the reasons of all states above."""
    shown = [make() for make, *_ in BOTH.values()] + [make() for make in OTHER_CONDITIONS]
    return {condition.reason for one in shown for condition in one.status.conditions}


def test_every_condition_reason_is_reached_by_a_state() -> None:
    for_events = set(condition_docs.REASONS["Events only"])
    of_operations = set(condition_docs.REASONS["An operation has failed"]) | {
        Reason.WAITING,
        Reason.RESTARTING,
        Reason.PURGING,
        Reason.FENCING,
        Reason.SUCCEEDED,
    }
    assert set(Reason) - for_events - of_operations == reached()


def events_of(world: World, limit: int = 60) -> set[str]:
    """Return the reasons of the events of the next seconds."""
    seen: set[str] = set()
    for _ in range(limit):
        plan = world.plan()
        seen |= {event.reason for event in plan.events}
        world.carry_out(plan)
        world.tick()
    return seen


def test_every_event_reason_is_reached() -> None:
    new = World(make_pool(replicas=1, rollout={"surge": "Never"}))
    seen = events_of(new)
    new.want(model={"path": "/models/next"})
    seen |= events_of(new)
    scaled = settled(2)
    scaled.want(replicas=1)
    scaled.carry_out(scaled.plan())
    scaled.want(replicas=2)
    seen |= events_of(scaled)
    scaled.work_per_pod = 100
    scaled.tick()
    scaled.want(replicas=1)
    seen |= events_of(scaled)
    lists = (observe(workers=()), observe(decode=(decode_instance(0),)))
    changes = tuple(change for observed in lists for change in plan_service(observed, SETTINGS).workers)
    seen |= {event.reason for event in worker_events(changes)}
    pods = {label: replace(make_pod("r"), labelled_reachable=label) for label in ("true", "false")}
    serving, lost, back = (
        ObservedRouter(pods[label], None, "", reachable)
        for label, reachable in (("true", True), ("true", False), ("false", True))
    )
    seen |= {event.reason for event in label_routers((serving, lost, back))[1]}
    orphans = make_observed(make_pool(), orphan(one()))
    seen |= {event.reason for event in plan_pool(orphans, SETTINGS, T0).events}
    pool = make_pool().model_copy(update={"status": shown_pool(one()).status})
    seen |= {event.reason for event in plan_pool(make_observed(pool, one(), objects=()), SETTINGS, T0).events}
    fences = {Reason.FENCED_PEER}  # test_fencer reaches it over HTTP
    repairs = {Reason.REPAIR_PROPOSED, Reason.REPAIR_DONE, Reason.REPAIR_WITHDRAWN}  # plan/test_repair reaches them
    assert seen | fences | repairs == set(condition_docs.REASONS["Events only"])


class Rollout:
    """A pool in a small Kubernetes, with the status that the operator writes every second."""

    def __init__(self, replicas: int) -> None:
        self.world = settled(replicas, drainTimeoutSeconds=20)
        self.look()

    def look(self) -> Shown:
        world = self.world
        observed = world.observe()
        facts = PoolFacts(observed, world.plan(), (), T0 + seconds(world.now))
        status = pool_status(facts)
        world.pool = world.pool.model_copy(update={"status": status})
        return Shown(world.pool.metadata, status)

    def run(self) -> list[Shown]:
        """Return what the status shows in each second until the goal is reached."""
        seen = [self.look()]
        while kstatus(seen[-1].metadata, seen[-1].status) != "Current":
            assert len(seen) < 400
            self.world.carry_out(self.world.plan())
            self.world.tick()
            seen.append(self.look())
        return seen

    def change(self, **metadata: Any) -> None:
        meta = self.world.pool.metadata
        self.world.pool = self.world.pool.model_copy(update={"metadata": meta.model_copy(update=metadata)})

    def annotate(self, value: str) -> None:
        self.change(annotations={ANNOTATION_RESTARTED_AT: value})


def waited_for(world: World) -> bool:
    return kubectl_wait(world.pool.metadata, world.pool.status, "Ready")


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_roll_out_stays_available_and_is_waited_for(replicas: int) -> None:
    rollout = Rollout(replicas)
    assert waited_for(rollout.world)
    rollout.change(generation=2)
    rollout.world.want(model={"path": "/models/next"})
    assert not waited_for(rollout.world)
    assert kstatus(rollout.world.pool.metadata, rollout.world.pool.status) == "InProgress"
    seen = rollout.run()
    assert len(seen) > 3
    assert {shown.reason("Available")[0] for shown in seen} == {"True"}
    assert waited_for(rollout.world)


@pytest.mark.parametrize("replicas", [0, 1, 3])
def test_a_restart_shows_its_value_only_when_it_has_ended(replicas: int) -> None:
    rollout = Rollout(replicas)
    rollout.annotate("monday")
    assert rollout.world.pool.status.restarted_at is None
    seen = rollout.run()
    assert [shown.status.restarted_at for shown in seen[:-1]] == [None] * (len(seen) - 1)
    assert seen[-1].status.restarted_at == "monday"
    rollout.annotate("tuesday")
    assert rollout.world.pool.status.restarted_at == "monday"
    assert rollout.run()[-1].status.restarted_at == "tuesday"


def test_a_restart_of_routers_shows_its_value() -> None:
    meta = make_service().metadata.model_copy(update={"annotations": {ANNOTATION_RESTARTED_AT: "monday"}})
    wanted = make_service().model_copy(update={"metadata": meta})
    before = shown_service(observe(service=wanted, deployment=deployment(make_service())))
    after = shown_service(observe(service=wanted, deployment=deployment(wanted)))
    assert (before.status.restarted_at, after.status.restarted_at) == (None, "monday")
    assert kstatus(before.metadata, before.status) == "InProgress"


def test_drain_progress_writes_no_status() -> None:
    """Running requests change every second, and the status stays the same."""
    pool = updated_pool(1)
    drains = replace(one(), drain_started=T0, drain_reason="Update", listed_by=())
    statuses = [
        shown_pool(replace(drains, ranks={0: make_sample(running=running)}), pool=pool).status for running in (7, 6, 1)
    ]
    assert statuses[0] == statuses[1] == statuses[2]
    assert Shown(pool.metadata, statuses[0]).reason("Reconciling") == ("True", "Draining")


def test_a_silent_kubelet_gives_one_steady_status() -> None:
    """Requests come and go, samples succeed and fail: nothing but the node is named."""
    verdicts = (Verdict.FLOWING, Verdict.IDLE, Verdict.STARTING, Verdict.UNKNOWN, Verdict.SATURATED)
    silent = on_silent_node(one())
    ready = {find(shown_pool(silent, verdicts=(sampled(v),)).status.conditions, "Ready") for v in verdicts}
    (condition,) = ready
    assert condition is not None
    assert condition.message == (
        "The kubelet of node node-7 does not report, so Kubernetes counts chat-prefill-0-0 as not Ready"
    )


@pytest.mark.parametrize("workers", [(), None], ids=["router answers", "router is silent"])
def test_only_router_on_a_silent_node_serves_nobody(workers: tuple[()] | None) -> None:
    """Kubernetes takes a pod that is not Ready out of its Service, also one that answers."""
    pod = make_pod("chat-router-0", ready=False, node_silent=True, node="node-7")
    observed = observe(deployment=deployment(make_service(), ready_replicas=0), routers=(ObservedRouter(pod, workers),))
    shown = shown_service(observed)
    available = find(shown.status.conditions, "Available")
    assert available is not None
    assert (available.status, available.reason) == ("False", "NodeNotReady")
    assert "node-7" in available.message
    assert shown.reason("Ready") == ("False", "NodeNotReady")
    assert service_parts(observed, ())["router"] == Serving(1, 0)


def test_other_router_serves_beside_a_silent_node() -> None:
    two = service(replicas=2)
    silent = make_pod("chat-router-0", ready=False, node_silent=True, node="node-7")
    observed = observe(
        service=two,
        deployment=deployment(two, ready_replicas=1),
        routers=(ObservedRouter(silent, ()), ObservedRouter(make_pod("chat-router-1"), ())),
    )
    shown = shown_service(observed)
    assert (shown.reason("Available")[0], shown.reason("Ready")) == ("True", ("False", "NodeNotReady"))
    assert service_parts(observed, ())["router"] == Serving(2, 1)


def test_routers_without_their_service_serve_nobody() -> None:
    observed = replace(observe(), objects=())
    assert shown_service(observed).reason("Available") == ("False", "RouterNotReady")
    assert service_parts(observed, ())["router"] == Serving(1, 0)
    assert service_parts(observe(), ())["router"] == Serving(1, 1)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ((), ("Unknown", "NotJudged")),
        ((sampled(),), ("Unknown", "NotJudged")),
        ((sampled(Verdict.STUCK),), ("False", "QueuesStuck")),
    ],
    ids=["none judged", "one judged", "one stuck"],
)
def test_pools_without_judgement_make_queues_unknown(
    verdicts: tuple[Diagnosis, ...], expected: tuple[str, str]
) -> None:
    assert shown_service(verdicts=verdicts).reason("QueuesHealthy") == expected


def test_a_pool_that_was_not_sampled_is_not_judged() -> None:
    subject = Subject("chat", Role.PREFILL, 0, make_pod(), leaving=False, tracks=())
    unsampled = Diagnosis(subject, Verdict.UNKNOWN, "not sampled")
    assert shown_pool(one(), verdicts=(unsampled,)).reason("QueuesHealthy") == ("Unknown", "NotJudged")


def test_kubelet_alternating_between_pull_and_back_off_gives_one_status() -> None:
    pulls = {"waiting_reason": "ErrImagePull", "waiting_message": "no such image"}
    waits = {
        "waiting_reason": "ImagePullBackOff",
        "waiting_message": 'Back-off pulling image "x:1": ErrImagePull: no such image',
    }
    found = [shown_pool(one(ready=False, **pod)).status for pod in (pulls, waits)]
    assert found[0] == found[1]

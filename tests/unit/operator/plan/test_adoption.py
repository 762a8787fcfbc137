"""Objects without a controller: adopted if they are labelled as ours, else named with the command that heals."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.api.reasons import Reason
from pdpool_operator.observe.model import FieldOwners, ObservedInstance, ObservedPool, ObservedService
from pdpool_operator.plan.model import Adopt, Plan
from pdpool_operator.plan.pool import plan_pool
from pdpool_operator.plan.rotation import desired_rotation
from pdpool_operator.plan.service import plan_service

from tests.unit.operator.plan.makers import SETTINGS, T0, make_instance, make_observed, make_pod, make_pool
from tests.unit.operator.plan.test_service import decode_instance, deployment, observe

ORPHANED = {"controller_uid": "", "controller": "", "labelled": True}


def orphaned_pool(instances: int = 2) -> ObservedPool:
    """Return a pool whose objects an earlier pool of the name has left."""
    pool = make_pool(replicas=instances)
    observed = make_observed(pool, *(make_instance(pool, i, **ORPHANED) for i in range(instances)))
    return replace(observed, objects=tuple(replace(obj, **ORPHANED) for obj in observed.objects))


def plan(observed: ObservedPool) -> Plan:
    return plan_pool(observed, SETTINGS, T0)


def adopted(plans: Iterable[Adopt]) -> set[tuple[str, str]]:
    return {(one.kind, one.name) for one in plans}


def test_orphans_of_a_pool_are_adopted_and_nothing_else_happens() -> None:
    observed = orphaned_pool()
    found = plan(observed)
    objects = {(obj.kind, obj.name) for obj in observed.objects if obj.kind != "Secret"}
    assert adopted(found.adopt) == {("StatefulSet", "chat-prefill-0"), ("StatefulSet", "chat-prefill-1"), *objects}
    assert {(one.owner["uid"], one.owner["controller"]) for one in found.adopt} == {(observed.pool.metadata.uid, True)}
    assert (found.apply, found.patch, found.delete, found.faults) == ((), (), (), ())
    assert [event.reason for event in found.events] == [Reason.OBJECT_ADOPTED]


def test_surplus_orphans_are_adopted_before_they_are_removed() -> None:
    observed = orphaned_pool()
    observed = replace(observed, pool=make_pool(replicas=1))
    assert ("StatefulSet", "chat-prefill-1") in adopted(plan(observed).adopt)


def test_orphans_of_a_router_are_adopted() -> None:
    observed = observe()
    observed = replace(
        observed,
        deployment=deployment(observed.service, **ORPHANED),
        objects=tuple(replace(obj, **ORPHANED) for obj in observed.objects),
    )
    found = plan_service(observed, SETTINGS)
    assert ("Deployment", "chat-router") in adopted(found.adopt)
    assert "Secret" not in {one.kind for one in found.adopt}, "all pools and services share it"
    assert len(found.adopt) == len(observed.objects)


@pytest.mark.parametrize("kind", ["StatefulSet", "Service", "PodDisruptionBudget"])
def test_foreign_objects_without_controller_come_with_a_command(kind: str) -> None:
    observed = orphaned_pool()
    if kind == "StatefulSet":
        observed = replace(observed, instances=tuple(replace(i, labelled=False) for i in observed.instances))
    else:
        objects = tuple(replace(obj, labelled=obj.kind != kind) for obj in observed.objects)
        observed = replace(observed, objects=objects)
    found = plan(observed)
    assert not found.acts
    assert {fault.reason for fault in found.faults} == {Reason.NO_CONTROLLER}
    labels = "app.kubernetes.io/managed-by=pdpool app.kubernetes.io/part-of=chat pdpool.dev/pool=chat"
    assert f"kubectl label --overwrite -n llm {kind.lower()} chat-prefill" in found.faults[0].message
    assert labels in found.faults[0].message


def serving_orphan(instance: ObservedInstance) -> ObservedInstance:
    return replace(instance, **ORPHANED)


def addresses(observed: ObservedService) -> set[str]:
    rotation = desired_rotation(observed)
    return set(rotation.prefill | rotation.decode)


def test_orphans_stay_in_rotation_until_they_are_adopted() -> None:
    before = addresses(observe())
    orphans = observe(decode=tuple(serving_orphan(decode_instance(i)) for i in (0, 1)))
    assert addresses(orphans) == before


@pytest.mark.parametrize(
    ("changes", "stays"),
    [({}, True), ({"ready": False}, False), ({"terminating": True}, False), ({"ip": "10.0.2.99"}, False)],
    ids=["serves", "not ready", "terminating", "never listed"],
)
def test_engines_of_a_deleted_pool_stay_listed_while_they_serve(changes: dict[str, object], stays: bool) -> None:
    pod = replace(make_pod("chat-decode-0-0", ip="10.0.2.1"), **changes)
    observed = replace(observe(), decode=None, orphans={Role.DECODE: (pod,)})
    assert bool(desired_rotation(observed).decode) is stays


def test_an_edited_object_is_restored_with_an_event() -> None:
    pool = make_pool()
    observed = make_observed(pool, make_instance(pool))
    foreign = FieldOwners(ours={}, others=({"f:spec": {"f:selector": {}}},))
    objects = tuple(replace(o, owners=foreign) if o.kind == "Service" else o for o in observed.objects)
    found = plan(replace(observed, objects=objects))
    assert [(event.reason, event.message) for event in found.events] == [
        (Reason.OBJECT_RESTORED, "Restored Service chat-prefill: another client had changed it")
    ]


@pytest.mark.parametrize(("generation", "told"), [(0, False), (1, True)], ids=["first set-up", "deleted later"])
def test_a_missing_object_is_told_unless_it_is_new(generation: int, told: bool) -> None:
    pool = make_pool()
    pool = pool.model_copy(update={"status": pool.status.model_copy(update={"observed_generation": generation})})
    observed = make_observed(pool, make_instance(pool))
    found = plan(replace(observed, objects=tuple(o for o in observed.objects if o.kind != "PodDisruptionBudget")))
    messages = [event.message for event in found.events if event.reason is Reason.OBJECT_RESTORED]
    assert messages == (["Restored PodDisruptionBudget chat-prefill: it was missing"] if told else [])


def test_an_edited_stateful_set_is_restored_with_an_event() -> None:
    pool = make_pool()
    foreign = FieldOwners(ours={}, others=({"f:spec": {"f:template": {}}},))
    found = plan(make_observed(pool, make_instance(pool, owners=foreign)))
    assert [event.message for event in found.events] == [
        "Restored StatefulSet chat-prefill-0: another client had changed it"
    ]

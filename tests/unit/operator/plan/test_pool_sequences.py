"""Exact sequences of actions, from event to goal."""

from dataclasses import replace

from pdpool_operator.api import names
from pdpool_operator.api.reasons import Reason
from pdpool_operator.plan.model import Plan
from pdpool_operator.plan.pool import plan_pool

from tests.unit.operator.plan.makers import SETTINGS, T0, seconds
from tests.unit.operator.plan.world import BAD_MODEL, World, settled


def test_a_new_pool_is_created_at_once() -> None:
    world = World()
    world.want(replicas=3)
    world.settle()
    assert world.trace == [
        "apply Secret",
        "apply Service",
        "apply PodDisruptionBudget",
        "create 0",
        "create 1",
        "create 2",
    ]


def test_at_the_goal_there_is_nothing_to_do() -> None:
    plan = settled(2).plan()
    assert not plan.acts
    assert plan.progress is None
    assert plan.events == ()
    assert plan.requeue_after_s is None


def test_scaling_up_creates_what_is_missing() -> None:
    world = settled(1)
    world.want(replicas=3)
    world.settle()
    assert world.trace == ["create 1", "create 2"]


def test_scaling_down_drains_and_removes_the_highest_first_one_at_a_time() -> None:
    world = settled(3)
    world.want(replicas=1)
    world.settle()
    assert world.trace == ["drain 2", "remove 2", "drain 1", "remove 1"]


def test_scaling_to_zero_removes_all() -> None:
    world = settled(2)
    world.want(replicas=0)
    world.settle()
    assert world.trace == ["drain 1", "remove 1", "drain 0", "remove 0"]
    assert world.sets == {}


def test_an_update_replaces_one_instance_after_the_other() -> None:
    world = settled(3)
    world.want(model={"path": "/models/next"})
    world.settle()
    assert world.trace == [
        "drain 2", "update 2", "kill 2", "undrain 2",
        "drain 1", "update 1", "kill 1", "undrain 1",
        "drain 0", "update 0", "kill 0", "undrain 0",
    ]  # fmt: skip


def test_scaling_down_and_updating_together_removes_before_it_replaces() -> None:
    world = settled(2)
    world.want(replicas=1, model={"path": "/models/next"})
    world.settle()
    assert world.trace == ["drain 1", "remove 1", "drain 0", "update 0", "kill 0", "undrain 0"]


def test_a_spec_that_does_not_come_up_stops_at_the_first_instance() -> None:
    world = settled(3)
    world.want(model={"path": BAD_MODEL})
    for _ in range(100):
        world.carry_out(world.plan())
        world.tick()
    assert world.trace == ["drain 2", "update 2", "kill 2", "undrain 2"]
    assert [sts.pod is not None and sts.pod.ready for sts in world.sets.values()] == [True, True, False]
    progress = world.plan().progress
    assert progress is not None
    assert progress.reason is Reason.UPDATING
    assert "chat-prefill-2" in progress.message


def test_a_spec_that_does_not_come_up_is_mended_by_the_next_one_without_a_drain() -> None:
    world = settled(2)
    world.want(model={"path": BAD_MODEL})
    for _ in range(50):
        world.carry_out(world.plan())
        world.tick()
    world.trace.clear()
    world.want(model={"path": "/models/mended"})
    world.settle()
    assert world.trace == ["update 1", "kill 1", "drain 0", "update 0", "kill 0", "undrain 0"]


def test_a_drain_whose_start_somebody_has_made_unreadable_begins_anew() -> None:
    world = settled(1)
    world.want(model={"path": "/models/next"})
    world.carry_out(world.plan())
    world.sets["chat-prefill-0"].annotations[names.ANNOTATION_DRAIN_STARTED] = "junk"
    world.settle()
    assert world.trace == ["drain 0", "drain 0", "update 0", "kill 0", "undrain 0"]


def test_an_update_taken_back_during_the_drain_brings_the_instance_back() -> None:
    world = settled(2)
    world.want(model={"path": "/models/next"})
    world.carry_out(world.plan())
    world.tick()
    world.want(model={"path": "/models/smollm2"})
    world.settle()
    assert world.trace == ["drain 1", "undrain 1"]


def test_a_scale_down_taken_back_during_the_drain_brings_the_instance_back() -> None:
    world = settled(2)
    world.want(replicas=1)
    world.carry_out(world.plan())
    world.tick()
    world.want(replicas=2)
    plan = world.plan()
    assert [event.reason for event in plan.events] == [Reason.DRAIN_CANCELLED]
    world.settle()
    assert world.trace == ["drain 1", "undrain 1"]


def test_a_scale_down_taken_back_ends_the_drain_even_if_the_instance_is_to_be_updated() -> None:
    world = settled(2)
    world.want(replicas=1)
    world.carry_out(world.plan())
    world.tick()
    world.fail("chat-prefill-0")
    world.want(replicas=2, model={"path": "/models/next"})
    world.settle()
    assert world.trace[:4] == ["drain 1", "update 0", "undrain 1", "kill 0"]
    assert world.trace[4:] == ["drain 1", "update 1", "kill 1", "undrain 1"]


def test_nothing_is_drained_for_an_update_while_an_instance_is_on_its_way_out() -> None:
    world = settled(2)
    world.want(model={"path": "/models/next"})
    observed = world.observe()
    leaving = replace(observed.instances[1], index=2, name="chat-prefill-2", deleting=True)
    plan = plan_pool(replace(observed, instances=(*observed.instances, leaving)), SETTINGS, T0)
    assert not plan.acts
    assert plan.progress is not None
    assert plan.progress.reason is Reason.SCALING_DOWN


def test_a_pod_that_has_the_wanted_spec_again_is_kept_and_only_the_template_is_mended() -> None:
    world = settled(1)
    before = world.sets["chat-prefill-0"].body
    world.want(model={"path": "/models/next"})
    world.settle()
    world.trace.clear()
    sts = world.sets["chat-prefill-0"]
    sts.body = before
    sts.annotations |= before["metadata"]["annotations"]
    world.settle()
    assert world.trace == ["update 0"]


def test_instances_that_serve_nobody_are_removed_without_a_drain() -> None:
    world = settled(4)
    world.fail("chat-prefill-2", "chat-prefill-3")
    world.want(replicas=1)
    world.settle()
    assert world.trace == ["remove 3", "remove 2", "drain 1", "remove 1"]


def test_broken_instances_are_mended_one_after_the_other() -> None:
    world = settled(3)
    world.fail(*world.sets)
    world.want(model={"path": BAD_MODEL})
    for _ in range(50):
        world.carry_out(world.plan())
        world.tick()
    assert world.trace == ["update 2", "kill 2"]


def test_an_instance_that_is_not_ready_but_has_work_is_drained_before_any_that_serves() -> None:
    world = settled(3)
    pod = world.sets["chat-prefill-1"].pod
    assert pod is not None
    pod.failing, pod.load = True, 10**6
    world.want(model={"path": "/models/next"})
    world.carry_out(world.plan())
    world.tick()
    assert world.trace == ["drain 1"]


def test_no_serving_instance_is_drained_for_an_update_while_another_is_down() -> None:
    world = settled(2)
    world.fail("chat-prefill-0")
    world.want(model={"path": "/models/next"})
    world.settle()
    assert world.trace == ["update 0", "kill 0", "drain 1", "update 1", "kill 1", "undrain 1"]


def test_a_drain_that_does_not_end_is_given_up_at_its_deadline_and_the_pod_gets_no_second_one() -> None:
    world = settled(1)
    world.want(replicas=0)
    world.carry_out(world.plan())
    started = world.now
    pod = world.sets["chat-prefill-0"].pod
    assert pod is not None
    pod.load = 10**6
    while not world.plan().delete:
        world.tick()
    assert world.now - started == 20
    plan = world.plan()
    assert [(deletion.kind, deletion.grace_period_s) for deletion in plan.delete] == [
        ("StatefulSet", None),
        ("Pod", 5),
    ]
    assert [event.reason for event in plan.events] == [Reason.DRAIN_TIMED_OUT, Reason.INSTANCE_DELETED]
    assert "running" in plan.events[0].message


def test_a_drained_instance_is_replaced_with_its_own_grace_period() -> None:
    world = settled(1)
    world.want(model={"path": "/models/next"})
    world.carry_out(world.plan())
    while not world.plan().delete:
        world.tick()
    assert [(deletion.kind, deletion.grace_period_s) for deletion in world.plan().delete] == [("Pod", None)]


def test_before_an_update_drains_anything_its_template_is_verified() -> None:
    world = settled(2)
    world.want(model={"path": "/models/next"})
    assert [obj["metadata"]["name"] for obj in world.plan().verify] == ["chat-prefill-1"]
    world.carry_out(world.plan())
    world.tick()
    assert world.plan().verify == ()


def test_another_build_of_the_same_spec_restarts_nothing_and_shows_as_available() -> None:
    world = settled(2)
    world.settings = replace(world.settings, engine_image="localhost/pdpool-engine:next")
    plan = world.plan()
    assert not plan.acts
    assert plan.progress is None
    assert plan.update_available == ("chat-prefill-0", "chat-prefill-1")


def test_users_adopt_another_build_by_asking_for_a_restart() -> None:
    world = settled(1)
    world.settings = replace(SETTINGS, engine_image="localhost/pdpool-engine:next")
    meta = world.pool.metadata.model_copy(update={"annotations": {names.ANNOTATION_RESTARTED_AT: "now"}})
    world.pool = world.pool.model_copy(update={"metadata": meta})
    world.settle()
    assert world.trace == ["drain 0", "update 0", "kill 0", "undrain 0"]
    assert world.plan().update_available == ()


def test_a_stateful_set_that_somebody_scaled_is_set_right() -> None:
    world = settled(1)
    sts = world.sets["chat-prefill-0"]
    sts.body = {**sts.body, "spec": {**sts.body["spec"], "replicas": 0}}
    world.settle()
    assert world.trace == ["resize 0"]


def test_a_lost_service_is_made_again() -> None:
    world = settled(1)
    del world.objects["Service", "chat-prefill"]
    world.settle()
    assert world.trace == ["apply Service"]


def test_an_object_of_somebody_else_under_our_name_is_a_conflict_and_nothing_is_touched() -> None:
    world = settled(2)
    key = ("Service", "chat-prefill")
    world.objects[key] = replace(world.objects[key], controller_uid="x", controller="Deployment/y")
    world.want(replicas=1)
    plan = world.plan()
    assert not plan.acts
    assert [fault.reason for fault in plan.faults] == [Reason.NAME_CONFLICT]
    assert "Service chat-prefill belongs to Deployment y; rename or delete" in plan.faults[0].message


def test_what_an_earlier_pool_of_the_name_has_left_is_waited_for_and_no_fault() -> None:
    world = settled(2)
    key = ("Service", "chat-prefill")
    world.objects[key] = replace(world.objects[key], controller_uid="earlier", controller="PrefillPool/chat")
    world.want(replicas=1)
    plan = world.plan()
    assert not plan.acts
    assert not plan.faults
    assert plan.progress is not None
    assert plan.progress.message == "Waiting for Service chat-prefill of an earlier PrefillPool chat to be deleted"
    for other in ("DecodePool/chat", "PrefillPool/other"):
        world.objects[key] = replace(world.objects[key], controller=other)
        assert [fault.reason for fault in world.plan().faults] == [Reason.NAME_CONFLICT]


def test_an_invalid_template_touches_nothing() -> None:
    world = settled(2)
    world.want(template={"spec": {"containers": "x"}}, replicas=1)
    plan = world.plan()
    assert not plan.acts
    assert [fault.reason for fault in plan.faults] == [Reason.TEMPLATE_INVALID]


def test_a_template_that_becomes_invalid_during_a_drain_puts_the_instance_back_and_once_mended_drains_it_anew() -> None:
    world = settled(1)
    world.want(model={"path": "/models/next"})
    world.carry_out(world.plan())
    world.tick()
    world.want(template={"spec": {"containers": "x"}})
    plan = world.plan()
    assert [fault.reason for fault in plan.faults] == [Reason.TEMPLATE_INVALID]
    world.carry_out(plan)
    world.tick()
    assert world.sets["chat-prefill-0"].listed
    assert not world.plan().acts
    world.want(template={})
    world.settle()
    assert world.trace == ["drain 0", "undrain 0", "drain 0", "update 0", "kill 0", "undrain 0"]


def test_a_name_that_is_taken_during_a_drain_puts_the_instance_back_and_touches_nobody_elses() -> None:
    world = settled(2)
    world.want(model={"path": "/models/next"}, replicas=3)
    world.carry_out(Plan(patch=world.plan().patch))
    world.tick()
    observed = world.observe()
    drains = observed.instances[1]
    assert drains.drain_started is not None
    foreign = replace(
        drains, index=2, name="chat-prefill-2", uid="theirs", controller_uid="x", controller="Deployment/y"
    )
    plan = plan_pool(replace(observed, instances=(*observed.instances, foreign)), SETTINGS, T0 + seconds(world.now))
    assert [fault.reason for fault in plan.faults] == [Reason.NAME_CONFLICT]
    assert [patch.name for patch in plan.patch] == [drains.name]
    world.carry_out(plan)
    world.tick()
    assert world.sets[drains.name].listed


def test_a_surplus_instance_goes_on_draining_while_the_template_is_invalid() -> None:
    world = settled(1)
    world.want(replicas=0)
    world.carry_out(world.plan())
    world.want(template={"spec": {"containers": "x"}})
    assert not world.plan().acts


def test_a_refused_object_puts_a_drained_instance_back_and_keeps_the_next_drain_from_beginning() -> None:
    world = settled(3)
    world.want(model={"path": "/models/next"})
    world.carry_out(world.plan())
    world.want(replicas=4)
    while not (plan := world.plan()).delete:
        world.tick()
    assert [obj["metadata"]["name"] for obj in plan.apply] == ["chat-prefill-3", "chat-prefill-2"]
    assert [patch.name for patch in plan.put_back] == ["chat-prefill-2"]
    world.carry_out(Plan(patch=plan.put_back))
    world.tick()
    assert world.sets["chat-prefill-2"].listed
    again = world.plan()
    assert [obj["metadata"]["name"] for obj in again.apply] == ["chat-prefill-3"], "refused again: no drain begins"
    assert again.put_back == ()


def test_a_pool_that_is_being_deleted_is_left_to_garbage_collection() -> None:
    world = settled(2)
    meta = world.pool.metadata.model_copy(update={"deletion_timestamp": T0 + seconds(1)})
    world.pool = world.pool.model_copy(update={"metadata": meta})
    world.want(replicas=0)
    assert not world.plan().acts

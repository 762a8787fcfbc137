"""Invariants of every sequence of edits, failures and operator crashes."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings
from pdpool_operator.plan.model import Plan

from tests.unit.operator.plan.world import World, settled

MODELS = ("/models/a", "/models/b", "/models/c")

EDITS = st.fixed_dictionaries({}, optional={"replicas": st.integers(0, 4), "model": st.sampled_from(MODELS)})
CRASHES = st.sets(st.integers(0, 3), max_size=2)
STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "edit": EDITS,
            "crash": CRASHES,
            "ticks": st.integers(0, 6),
            "killed_after": st.one_of(st.none(), st.integers(0, 3)),
        }
    ),
    min_size=1,
    max_size=8,
)
PROFILE = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def edit(world: World, change: dict[str, Any]) -> None:
    if "replicas" in change:
        world.want(replicas=change["replicas"])
    if "model" in change:
        world.want(model={"path": change["model"]})


def crash(world: World, indexes: set[int]) -> None:
    """The pods of these instances vanish at once. Kubernetes creates new ones."""
    for name, sts in world.sets.items():
        if world.index(name) in indexes:
            sts.pod = None
            sts.listed = False


def step(world: World, killed_after: int | None = None) -> Plan:
    """Run one reconcile, perhaps cut short, and a second one. Check what must hold at every step."""
    serving = {sts.pod.uid: sts.pod for sts in world.sets.values() if sts.pod is not None and sts.pod.ready}
    before = world.observe()
    plan = world.plan()
    for deletion in plan.delete:
        pod = serving.get(deletion.uid)
        if deletion.kind == "Pod" and pod is not None:
            instance = next(i for i in before.instances if i.pod is not None and i.pod.uid == deletion.uid)
            assert instance.drain_started is not None, "a serving pod is deleted only after a drain"
            if deletion.grace_period_s is None:
                assert pod.load == 0, "a drain that was not given up ends with an idle engine"
    world.carry_out(plan, killed_after)
    assert len(world.taken) <= 1, f"more than one instance is out of service because of us: {world.taken}"
    world.tick()
    return plan


def assert_at_goal(world: World) -> None:
    pool = world.pool
    assert len(world.sets) == pool.spec.replicas
    for sts in world.sets.values():
        assert sts.pod is not None
        assert sts.pod.ready
        assert f"--model-path={pool.spec.model.path}" in sts.pod.template["spec"]["containers"][0]["args"]
    plan = world.plan()
    assert not plan.acts
    assert plan.progress is None


def run(world: World, script: Sequence[dict[str, Any]]) -> None:
    for entry in script:
        edit(world, entry["edit"])
        crash(world, entry["crash"])
        step(world, entry["killed_after"])
        for _ in range(entry["ticks"]):
            step(world)


@PROFILE
@given(replicas=st.integers(0, 4), script=STEPS)
def test_whatever_happens_it_ends_at_the_goal_with_at_most_one_instance_out_at_a_time(
    replicas: int, script: list[dict[str, Any]]
) -> None:
    world = settled(replicas, model={"path": MODELS[0]})
    run(world, script)
    for _ in range(400):
        plan = step(world)
        if not plan.acts and plan.progress is None:
            break
    assert_at_goal(world)


@PROFILE
@given(replicas=st.integers(1, 4), wanted=st.integers(0, 4), cuts=st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_an_operator_killed_after_any_action_leads_to_the_same_end(replicas: int, wanted: int, cuts: list[int]) -> None:
    world = settled(replicas, model={"path": MODELS[0]})
    world.want(replicas=wanted, model={"path": MODELS[1]})
    for cut in cuts:
        step(world, cut)
    for _ in range(400):
        plan = step(world)
        if not plan.acts and plan.progress is None:
            break
    assert_at_goal(world)


@PROFILE
@given(replicas=st.integers(0, 4), wanted=st.integers(0, 4), model=st.sampled_from(MODELS))
def test_without_disturbance_what_is_left_to_do_never_grows(replicas: int, wanted: int, model: str) -> None:
    world = settled(replicas, model={"path": MODELS[0]})
    world.want(replicas=wanted, model={"path": model})
    left = [_left(world)]
    for _ in range(200):
        plan = step(world)
        left.append(_left(world))
        if not plan.acts and plan.progress is None:
            break
    assert left == sorted(left, reverse=True)
    assert_at_goal(world)


@PROFILE
@given(replicas=st.integers(1, 4), wanted=st.integers(1, 4))
def test_no_action_is_repeated_without_disturbance(replicas: int, wanted: int) -> None:
    world = settled(replicas, model={"path": MODELS[0]})
    world.want(replicas=wanted, model={"path": MODELS[1]})
    world.settle()
    assert len(world.trace) == len(set(world.trace))


def _left(world: World) -> int:
    """Instances that are missing, built from another spec, or of the current spec and more than wanted."""
    wanted, flag = world.pool.spec.replicas, f"--model-path={world.pool.spec.model.path}"
    old = sum(flag not in sts.body["spec"]["template"]["spec"]["containers"][0]["args"] for sts in world.sets.values())
    return max(0, wanted - len(world.sets)) + old + max(0, len(world.sets) - old - wanted)

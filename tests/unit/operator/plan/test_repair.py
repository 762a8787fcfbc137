"""Repair: a table of gates, the way of one restart step by step, and what holds for every input."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdpool_operator.api.pools import RepairAction, RepairRecord, RepairState
from pdpool_operator.api.reasons import Reason
from pdpool_operator.api.services import RepairMode, RepairSpec
from pdpool_operator.plan.model import Delete
from pdpool_operator.plan.purge import PurgeProgress
from pdpool_operator.plan.repair import GRACE_S, plan_repair
from pdpool_operator.plan.repair_gates import COOLDOWN, SETTLES
from pdpool_operator.plan.repair_model import WINDOW, AssessedInstance, Health, avoided_nodes

from .makers import T0
from .repair_makers import ENFORCE, OBSERVE, OFF, PAIR, SENT, SICK, make, record, states

GATES = {
    "open": (ENFORCE, PAIR, (), (), ""),
    "off": (OFF, PAIR, (), (), None),
    "observe": (OBSERVE, PAIR, (), (), "spec.repair.mode"),
    "mode before breaker": (OBSERVE, (SICK, make(1, Health.AT_FAULT)), (), (), "spec.repair.mode"),
    "breaker": (ENFORCE, (SICK, make(1, Health.AT_FAULT), make(2)), (), (), "2 of 3 instances"),
    "a third is no breaker": (ENFORCE, (SICK, make(1, Health.AT_FAULT), *map(make, range(2, 6))), (), (), ""),
    "alone": (ENFORCE, (SICK,), (), (), "no other instance"),
    "alone and useless": (ENFORCE, (replace(SICK, useless=True),), (), (), ""),
    "sibling does not serve": (ENFORCE, (SICK, make(1, Health.UNKNOWN)), (), (), "no other instance"),
    "budget": (ENFORCE, PAIR, (record("a"), record("b")), (), "budget of 2"),
    "budget of the service": (ENFORCE, PAIR, (record("a"),), (record("b"),), "budget of 2"),
    "withdrawn ones count": (ENFORCE, PAIR, (record("a"), record("b", RepairState.WITHDRAWN)), (), "budget of 2"),
    "proposals do not count": (ENFORCE, PAIR, (record("a"), record("b", RepairState.PROPOSED)), (), ""),
    "old ones do not count": (ENFORCE, PAIR, (record("a", age_s=3600), record("b", age_s=3601)), (), ""),
    "no budget": (RepairSpec(mode=RepairMode.ENFORCE, restarts_per_hour=0), PAIR, (), (), "budget of 0"),
    "cooldown": (ENFORCE, PAIR, (record("a", age_s=59),), (), "within 60 s"),
    "cooldown of the service": (ENFORCE, PAIR, (), (record("a", age_s=59),), "within 60 s"),
    "restart did not help": (ENFORCE, PAIR, (record("a", index=0),), (), "11:50:00Z did not help"),
    "did not help, before breaker": (
        ENFORCE,
        (SICK, make(1, Health.AT_FAULT)),
        (record("a", index=0),),
        (),
        "did not help",
    ),
    "restart of the partner's instance 0": (ENFORCE, PAIR, (), (record("a", index=0),), ""),
    "withdrawn restart is none": (ENFORCE, PAIR, (record("a", RepairState.WITHDRAWN, index=0),), (), ""),
    "restart of an hour ago": (ENFORCE, PAIR, (record("a", age_s=3600, index=0),), (), ""),
    "mode before a restart that did not help": (OBSERVE, PAIR, (record("a", index=0),), (), "spec.repair.mode"),
    "cooldown is over": (ENFORCE, PAIR, (record("a", age_s=60),), (), ""),
}


@pytest.mark.parametrize("name", GATES)
def test_first_closed_gate_is_named(name: str):
    spec, instances, records, partners, words = GATES[name]
    plan = plan_repair(spec, instances, records, partners, T0)
    mine = [one for one in plan.records if one.pod_uid == "uid-0"]
    assert plan.restarts == ()  # no deed before its intent was read back
    if words is None:
        assert mine == []
    elif words:
        assert mine[0].state is RepairState.PROPOSED
        assert words in mine[0].message
        assert "why" in mine[0].message
    else:
        assert mine[0].state is RepairState.INTENDED
        assert plan.intends


STOPS = {
    "restart did not help": Reason.RESTART_DID_NOT_HELP,
    "did not help, before breaker": Reason.RESTART_DID_NOT_HELP,
    "breaker": Reason.MANY_AT_FAULT,
    "budget": Reason.REPAIR_BUDGET_SPENT,
    "budget of the service": Reason.REPAIR_BUDGET_SPENT,
    "withdrawn ones count": Reason.REPAIR_BUDGET_SPENT,
    "no budget": Reason.REPAIR_BUDGET_SPENT,
}


@pytest.mark.parametrize("name", GATES)
def test_repair_stops_only_at_gates_that_need_a_person(name: str):
    spec, instances, records, partners, words = GATES[name]
    plan = plan_repair(spec, instances, records, partners, T0)
    stops = {stop.reason for stop in plan.stops if "Instance 0 is not restarted" in stop.message}
    assert stops == ({STOPS[name]} if name in STOPS else set())
    assert all(words in stop.message and "why" in stop.message for stop in plan.stops[:1])


def test_stop_ends_with_the_fault_and_after_an_hour():
    records = (record("a", index=0),)
    assert plan_repair(ENFORCE, (make(0), make(1)), records, (), T0).stops == ()
    later = T0 + WINDOW - timedelta(seconds=600)
    assert plan_repair(ENFORCE, PAIR, records, (), later - timedelta(seconds=1)).stops
    assert plan_repair(ENFORCE, PAIR, records, (), later).intends


def test_restart_goes_step_by_step():
    intended = plan_repair(ENFORCE, PAIR, (), (), T0)
    assert (intended.restarts, intended.intends, intended.remaining) == ((), True, 1)
    deed = plan_repair(ENFORCE, PAIR, intended.records, (), T0)
    assert deed.restarts == (Delete("Pod", "pod-0", "uid-0", GRACE_S),)
    assert deed.records == intended.records
    assert plan_repair(ENFORCE, PAIR, deed.records, (), T0) == deed  # killed before the deed: due again
    going = (replace(SICK, terminating=True), make(1))
    done = plan_repair(ENFORCE, going, deed.records, (), T0)
    assert (states(done), done.restarts) == ({"uid-0": RepairState.DONE}, ())
    assert [event.reason for event in done.events] == [Reason.REPAIR_DONE]
    after = plan_repair(ENFORCE, (make(0, pod_uid="new"), make(1)), done.records, (), T0)
    assert (after.records, after.events) == (done.records, ())


@pytest.mark.parametrize(
    ("spec", "instances", "words"),
    [
        (OBSERVE, PAIR, "no longer Enforce"),
        (ENFORCE, (make(0), make(1)), "recovered"),
        (ENFORCE, (SICK, make(1, Health.AT_FAULT)), "at fault at once"),
        (ENFORCE, (SICK,), "no other instance"),
    ],
)
def test_intent_is_withdrawn_when_no_longer_allowed(
    spec: RepairSpec, instances: tuple[AssessedInstance, ...], words: str
):
    plan = plan_repair(spec, instances, (record("uid-0", RepairState.INTENDED, 1),), (), T0)
    assert (plan.restarts, states(plan)["uid-0"]) == ((), RepairState.WITHDRAWN)
    assert words in plan.events[0].message


def test_intent_waits_for_a_verdict_ten_minutes():
    unknown = (make(0, Health.UNKNOWN), make(1))
    waits = plan_repair(ENFORCE, unknown, (record("uid-0", RepairState.INTENDED, 600),), (), T0)
    assert (waits.restarts, states(waits)) == ((), {"uid-0": RepairState.INTENDED})
    ends = plan_repair(ENFORCE, unknown, (record("uid-0", RepairState.INTENDED, 601),), (), T0)
    assert states(ends) == {"uid-0": RepairState.WITHDRAWN}


def test_intents_that_fall_due_together_are_done_one_by_one():
    """The first one has waited for a verdict, for example because the operator was killed."""
    both = (SICK, make(1, Health.AT_FAULT), *map(make, range(2, 8)))
    waited = (record("uid-0", RepairState.INTENDED, 90, index=0), record("uid-1", RepairState.INTENDED, 1, index=1))
    first = plan_repair(ENFORCE, both, waited, (), T0)
    assert [deed.uid for deed in first.restarts] == ["uid-0"]
    gone = (replace(SICK, terminating=True), *both[1:])
    second = plan_repair(ENFORCE, gone, first.records, (), T0)
    assert (second.restarts, states(second)["uid-0"]) == ((), RepairState.DONE)
    anew = (make(0, pod_uid="new"), *both[1:])
    assert plan_repair(ENFORCE, anew, second.records, (), T0 + COOLDOWN - timedelta(seconds=1)).restarts == ()
    third = plan_repair(ENFORCE, anew, second.records, (), T0 + COOLDOWN)
    assert [deed.uid for deed in third.restarts] == ["uid-1"]


def test_intent_waits_while_the_partner_cools_down():
    intent = (record("uid-0", RepairState.INTENDED, 1, index=0),)
    for age_s, deeds in ((59, []), (60, ["uid-0"])):
        plan = plan_repair(ENFORCE, PAIR, intent, (record("p", age_s=age_s),), T0)
        assert [deed.uid for deed in plan.restarts] == deeds


def test_proposal_keeps_its_time_and_is_told_once():
    first = plan_repair(OBSERVE, PAIR, (), (), T0)
    later = plan_repair(OBSERVE, PAIR, first.records, (), T0 + timedelta(minutes=5))
    assert [event.reason for event in first.events] == [Reason.REPAIR_PROPOSED]
    assert (later.records, later.events) == (first.records, ())
    assert plan_repair(OBSERVE, (make(0), make(1)), later.records, (), T0).records == ()


instances = st.lists(
    st.builds(
        AssessedInstance,
        index=st.integers(0, 9),
        pod=st.just("pod"),
        pod_uid=st.sampled_from([f"uid-{i}" for i in range(8)]),
        terminating=st.booleans(),
        health=st.sampled_from(Health),
        serves=st.booleans(),
        useless=st.booleans(),
        purgeable=st.booleans(),
        node=st.sampled_from(["", "a", "b"]),
        avoids_node=st.sampled_from(["", "a", "b"]),
    ),
    max_size=8,
    unique_by=(lambda one: one.index, lambda one: one.pod_uid),
)
specs = st.builds(RepairSpec, mode=st.sampled_from(RepairMode), restarts_per_hour=st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(specs, st.lists(st.tuples(instances, st.integers(1, 900), st.sampled_from([None, 0, 1])), max_size=12))
def test_no_history_breaks_a_rule(spec: RepairSpec, history: list[tuple[list[AssessedInstance], int, int | None]]):
    records: tuple[RepairRecord, ...] = ()
    now, restarted, purged = T0, [], []
    for seen, pause_s, ended in history:
        now += timedelta(seconds=pause_s)
        progress = {
            one.pod_uid: PurgeProgress(
                (replace(SENT, pod_uid=one.pod_uid),) if ended is None else (), ended or 0, "", ""
            )
            for one in seen
        }
        plan = plan_repair(spec, seen, records, (), now, progress)
        intents = intended_in(records)
        for uid in [deed.uid for deed in plan.restarts] + [deed.pod_uid for deed in plan.purges]:
            assert spec.mode is RepairMode.ENFORCE
            assert uid in {one.pod_uid for one in records if one.state is RepairState.INTENDED}
        for deed in plan.restarts:
            instance = next(one for one in seen if one.pod_uid == deed.uid)
            assert instance.useless or any(one.serves for one in seen if one is not instance)
            actions = {action for uid, action in intended_in(plan.records) if uid == deed.uid} - {RepairAction.PURGE}
            assert actions == {RepairAction.RESTART} or (
                actions == {RepairAction.REPLACE}
                and avoided_nodes(records, now)[instance.index] == instance.avoids_node
            )
        new = intended_in(plan.records) - intents
        restarted += [now for _, action in new if action is not RepairAction.PURGE]
        purged += [(uid, now) for uid, action in new if action is RepairAction.PURGE]
        done = {
            (one.index, one.action) for one in records if one.state is RepairState.DONE and now - one.since < WINDOW
        }
        begun = {
            (one.index, one.action)
            for one in plan.records
            if one.action is not RepairAction.PURGE and (one.pod_uid, one.action) in new and one not in records
        }
        assert not done & begun, "no restart and no replacement is repeated"
        assert all((index, RepairAction.RESTART) in done for index, action in begun if action is RepairAction.REPLACE)
        assert len([at for at in restarted if now - at < WINDOW]) <= spec.restarts_per_hour
        due = [
            (one.pod_uid, one.action) for one in plan.records if one.state in {RepairState.INTENDED, RepairState.DONE}
        ]
        assert len(set(due)) == len(due)
        records = plan.records
    assert all(later - earlier >= COOLDOWN for earlier, later in pairwise(restarted))
    assert all(later - earlier >= SETTLES for (_, earlier), (_, later) in pairwise(purged))


def intended_in(records: Iterable[RepairRecord]) -> set[tuple[str, RepairAction]]:
    return {(one.pod_uid, one.action) for one in records if one.state is RepairState.INTENDED}

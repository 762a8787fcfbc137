"""Rung after a restart that did not help: a table, and a replacement step by step."""

from dataclasses import replace
from datetime import timedelta

import pytest
from pdpool_operator.api.pools import RepairAction, RepairRecord, RepairState
from pdpool_operator.api.reasons import Reason
from pdpool_operator.plan.model import Delete
from pdpool_operator.plan.repair import GRACE_S, plan_repair
from pdpool_operator.plan.repair_gates import WAITS_AT_MOST
from pdpool_operator.plan.repair_model import WINDOW, Health, avoided_nodes

from .makers import T0
from .repair_makers import ENFORCE, OBSERVE, PAIR, SICK, make, record

ON_A = (replace(SICK, node="a"), make(1))
RESTARTED_ON_A = record("former", index=0, node="a")


def replacement_of(
    uid: str, state: RepairState = RepairState.DONE, age_s: float = 600, node: str = "a"
) -> RepairRecord:
    return record(uid, state, age_s, index=0, action=RepairAction.REPLACE, node=node)


RUNGS = {
    "never restarted": (ON_A, (), "Restart Intended", None),
    "failed on the same node": (ON_A, (RESTARTED_ON_A,), "Replace Intended", None),
    "failed on two nodes": (
        (replace(SICK, node="b"), make(1)),
        (RESTARTED_ON_A,),
        "Restart Proposed",
        Reason.RESTART_DID_NOT_HELP,
    ),
    "runs an earlier spec": (
        (replace(SICK, node="a", movable=False), make(1)),
        (RESTARTED_ON_A,),
        "Restart Proposed",
        Reason.RESTART_DID_NOT_HELP,
    ),
    "node not known": (PAIR, (record("former", index=0),), "Restart Proposed", Reason.RESTART_DID_NOT_HELP),
    "purge comes first": (
        (replace(SICK, node="a", purgeable=True), make(1)),
        (RESTARTED_ON_A,),
        "Purge Intended",
        None,
    ),
    "did not help elsewhere": (
        (replace(SICK, node="b"), make(1)),
        (RESTARTED_ON_A, replacement_of("second")),
        "Replace Proposed",
        Reason.REPLACEMENT_DID_NOT_HELP,
    ),
    "did not help, and no other node had room": (
        ON_A,
        (RESTARTED_ON_A, replacement_of("second")),
        "Replace Proposed",
        Reason.REPLACEMENT_DID_NOT_HELP,
    ),
    "restart of an hour ago": (
        ON_A,
        (record("former", index=0, node="a", age_s=3600), replacement_of("second")),
        "Replace Proposed",
        Reason.REPLACEMENT_DID_NOT_HELP,
    ),
    "both an hour ago": (
        ON_A,
        (record("former", index=0, node="a", age_s=3700), replacement_of("second", age_s=3600)),
        "Restart Intended",
        None,
    ),
    "withdrawn replacement is none": (
        ON_A,
        (RESTARTED_ON_A, replacement_of("former", RepairState.WITHDRAWN)),
        "Replace Proposed",  # both counted in the budget of 2
        Reason.REPAIR_BUDGET_SPENT,
    ),
    "breaker": (
        (replace(SICK, node="a"), make(1, Health.AT_FAULT)),
        (RESTARTED_ON_A,),
        "Replace Proposed",
        Reason.MANY_AT_FAULT,
    ),
    "alone": ((replace(SICK, node="a"),), (RESTARTED_ON_A,), "Replace Proposed", None),
    "cooldown": (
        ON_A,
        (record("former", index=0, node="a", age_s=59),),
        "Replace Proposed",
        None,
    ),
}


@pytest.mark.parametrize("name", RUNGS)
def test_next_rung_follows_from_nodes(name: str):
    instances, records, words, stops = RUNGS[name]
    plan = plan_repair(ENFORCE, instances, records, (), T0)
    new = [f"{one.action} {one.state}" for one in plan.records if one not in records and one.index == 0]
    assert new == [words]
    assert [stop.reason for stop in plan.stops[:1]] == ([stops] if stops else [])


def test_observe_proposes_no_further_rung():
    plan = plan_repair(OBSERVE, ON_A, (RESTARTED_ON_A,), (), T0)
    assert [one.state for one in plan.records if one.pod_uid == "uid-0"] == [RepairState.PROPOSED]
    assert "spec.repair.mode" in plan.events[0].message


def test_pod_is_deleted_when_its_successor_avoids_the_node():
    intended = plan_repair(ENFORCE, ON_A, (RESTARTED_ON_A,), (), T0)
    assert (intended.restarts, intended.intends, intended.remaining) == ((), True, 0)
    assert avoided_nodes(intended.records, T0) == {0: "a"}
    waits = plan_repair(ENFORCE, ON_A, intended.records, (), T0)
    assert (waits.restarts, waits.records) == ((), intended.records)
    prepared = (replace(ON_A[0], avoids_node="a"), make(1))
    deed = plan_repair(ENFORCE, prepared, waits.records, (), T0)
    assert deed.restarts == (Delete("Pod", "pod-0", "uid-0", GRACE_S),)
    done = plan_repair(ENFORCE, (replace(prepared[0], terminating=True), make(1)), deed.records, (), T0)
    assert [one.message for one in done.events] == ["Replaced instance 0, away from a: why"]
    assert avoided_nodes(done.records, T0 + WINDOW - timedelta(seconds=1)) == {0: "a"}
    assert avoided_nodes(done.records, T0 + WINDOW) == {}


def test_stateful_set_that_cannot_be_changed_ends_it():
    intent = replacement_of("uid-0", RepairState.INTENDED, WAITS_AT_MOST.seconds)
    assert plan_repair(ENFORCE, ON_A, (RESTARTED_ON_A, intent), (), T0).events == ()
    late = replacement_of("uid-0", RepairState.INTENDED, WAITS_AT_MOST.seconds + 1)
    plan = plan_repair(ENFORCE, ON_A, (RESTARTED_ON_A, late), (), T0)
    assert "StatefulSet could not be changed" in plan.events[0].message
    assert avoided_nodes(plan.records, T0) == {}

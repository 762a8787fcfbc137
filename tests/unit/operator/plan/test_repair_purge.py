"""Rung before the restart, at a stuck instance whose connector answers: a table, and a purge step by step."""

from dataclasses import replace
from typing import Any

import pytest
from pdpool_operator.api.pools import RepairAction, RepairState
from pdpool_operator.plan.purge import PurgeProgress
from pdpool_operator.plan.repair import PURGE_WITHIN, plan_repair
from pdpool_operator.plan.repair_gates import MAX_PURGES, SETTLES
from pdpool_operator.plan.repair_model import AssessedInstance, Health, RepairPlan

from .makers import T0
from .repair_makers import ENFORCE, OBSERVE, OFF, PAIR, SENT, SICK, make, purge_of, record

HANGS = replace(SICK, purgeable=True)
STUCK = (HANGS, make(1))
RUNGS = {
    "not purgeable": (ENFORCE, PAIR, (), (), "Restart Intended"),
    "purgeable": (ENFORCE, STUCK, (), (), "Purge Intended"),
    "off": (OFF, STUCK, (), (), None),
    "observe": (OBSERVE, STUCK, (), (), "Purge Proposed"),
    "under way": (ENFORCE, STUCK, (purge_of("uid-0", RepairState.INTENDED, 1),), (), None),
    "settles": (ENFORCE, STUCK, (purge_of("uid-0", age_s=9),), (), None),
    "settles while its connector is silent": (ENFORCE, PAIR, (purge_of("uid-0", age_s=9),), (), None),
    "did not help": (ENFORCE, STUCK, (purge_of("uid-0", age_s=10),), (), "Restart Intended"),
    "could not be made": (ENFORCE, STUCK, (purge_of("uid-0", RepairState.WITHDRAWN, 0),), (), "Restart Intended"),
    "purged an hour ago": (ENFORCE, STUCK, (purge_of("uid-0", age_s=3600),), (), "Purge Intended"),
    "purge of the former pod": (ENFORCE, STUCK, (purge_of("former"),), (), "Purge Intended"),
    "purge of the former pod settles": (ENFORCE, STUCK, (purge_of("former", age_s=9),), (), None),
    "purge of the partner settles": (ENFORCE, STUCK, (), (purge_of("a", age_s=9),), None),
    "breaker": (ENFORCE, (HANGS, make(1, Health.AT_FAULT)), (), (), "Purge Proposed"),
    "alone": (ENFORCE, (HANGS,), (), (), "Purge Intended"),
    "budget of restarts": (ENFORCE, STUCK, (record("a"), record("b")), (), "Purge Intended"),
    "cooldown of restarts": (ENFORCE, STUCK, (record("a", age_s=1),), (), "Purge Intended"),
    "budget of purges": (
        ENFORCE,
        STUCK,
        tuple(purge_of(f"a{i}") for i in range(MAX_PURGES)),
        (),
        "Restart Intended",
    ),
    "restarted before": (ENFORCE, STUCK, (record("a", index=0),), (), "Purge Intended"),
}


def progress(
    *,
    send: bool = True,
    ended: int = 0,
    waits: str = "rank 0 has not answered yet",
    refused: str = "",
) -> PurgeProgress:
    return PurgeProgress((SENT,) if send else (), ended, waits, refused)


def advance(answers: PurgeProgress, *, age_s: float = 1, instances: tuple[AssessedInstance, ...] = STUCK) -> RepairPlan:
    intent = purge_of("uid-0", RepairState.INTENDED, age_s)
    return plan_repair(ENFORCE, instances, (intent,), (), T0, {"uid-0": answers})


@pytest.mark.parametrize("name", RUNGS)
def test_next_rung_follows_from_purges(name: str):
    spec, instances, records, partners, words = RUNGS[name]
    plan = plan_repair(spec, instances, records, partners, T0, {"uid-0": progress()})
    new = [f"{one.action} {one.state}" for one in plan.records if one not in records and one.index == 0]
    assert new == ([] if words is None else [words])
    assert plan.restarts == ()
    assert plan.settling == (words is None and spec is not OFF)


def test_purge_then_restart_step_by_step():
    intended = plan_repair(ENFORCE, STUCK, (), (), T0)
    assert (intended.purges, intended.restarts, intended.intends, intended.remaining) == ((), (), True, 2)
    sent = plan_repair(ENFORCE, STUCK, intended.records, (), T0, {"uid-0": progress()})
    assert (sent.purges, sent.restarts, sent.records, sent.acts) == ((SENT,), (), intended.records, True)
    answered = {"uid-0": progress(send=False, ended=2, waits="")}
    done = plan_repair(ENFORCE, STUCK, sent.records, (), T0, answered)
    assert [(one.action, one.state) for one in done.records] == [(RepairAction.PURGE, RepairState.DONE)]
    assert [one.message for one in done.events] == ["Purged instance 0: Ended 2 hand-offs. why"]
    assert (done.acts, done.settling) == (False, True)
    after = plan_repair(ENFORCE, STUCK, done.records, (), T0 + SETTLES)
    assert [f"{one.action} {one.state}" for one in after.records] == ["Purge Done", "Restart Intended"]


def test_purge_that_ends_nothing_is_followed_by_the_restart_at_once():
    plan = advance(progress(send=False, waits=""))
    assert [f"{one.action} {one.state}" for one in plan.records] == ["Purge Withdrawn", "Restart Intended"]


def test_purge_that_helps_prevents_the_restart():
    purged = (purge_of("uid-0", age_s=SETTLES.seconds),)
    plan = plan_repair(ENFORCE, (make(0), make(1)), purged, (), T0)
    assert (plan.records, plan.acts, plan.stops) == (purged, False, ())


def test_silent_rank_does_not_hold_up_the_others():
    plan = advance(progress(send=False, ended=1, waits="rank 1 does not answer (timeout)"))
    assert [one.state for one in plan.records] == [RepairState.DONE]
    assert plan.records[0].message == "Ended 1 hand-off, but rank 1 does not answer (timeout). why"


def test_purge_is_sent_again_until_its_time_is_over():
    assert advance(progress(), age_s=PURGE_WITHIN.seconds).purges == (SENT,)
    late = advance(progress(), age_s=PURGE_WITHIN.seconds + 1)
    assert [(one.action, one.state) for one in late.records] == [
        (RepairAction.PURGE, RepairState.WITHDRAWN),
        (RepairAction.RESTART, RepairState.INTENDED),
    ]
    assert late.events[0].message == "Did not purge instance 0: rank 0 has not answered yet"


@pytest.mark.parametrize(
    ("answers", "instances", "state", "words"),
    [
        ({"refused": "rank 0 refused it: http 404"}, STUCK, RepairState.WITHDRAWN, "http 404"),
        ({"send": False, "waits": "rank 0 does not answer"}, STUCK, RepairState.WITHDRAWN, "does not answer"),
        ({"send": False, "waits": ""}, STUCK, RepairState.WITHDRAWN, "none of its hand-offs is old enough"),
        (
            {"refused": "rank 1 refused it", "ended": 1},
            STUCK,
            RepairState.DONE,
            "Ended 1 hand-off, but rank 1 refused it. why",
        ),
        ({}, (make(0), make(1)), RepairState.WITHDRAWN, "recovered"),
        ({"ended": 3}, (make(0), make(1)), RepairState.DONE, "Ended 3 hand-offs, but rank 0 has not"),
        ({}, (replace(HANGS, terminating=True), make(1)), RepairState.WITHDRAWN, "pod has ended"),
        ({}, (make(1),), RepairState.WITHDRAWN, "pod has ended"),
        ({}, (HANGS, make(1, Health.AT_FAULT)), RepairState.WITHDRAWN, "at fault at once"),
    ],
)
def test_intended_purge_ends(
    answers: dict[str, Any], instances: tuple[AssessedInstance, ...], state: RepairState, words: str
):
    plan = advance(progress(**answers), instances=instances)
    mine = [one for one in plan.records if one.action is RepairAction.PURGE and one.index == 0]
    assert ([one.state for one in mine], plan.purges) == ([state], ())
    assert words in mine[0].message


def test_purge_of_the_only_instance_goes_on():
    assert advance(progress(), instances=(HANGS,)).purges == (SENT,)


def test_purge_waits_for_a_verdict():
    plan = advance(progress(), instances=(make(0, Health.UNKNOWN), make(1)))
    assert (plan.purges, [one.state for one in plan.records]) == ((), [RepairState.INTENDED])

"""Repair: a table of gates, the way of one purge and one restart step by step, and what holds for every input."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdpool_operator.api.pools import RepairAction, RepairRecord, RepairState
from pdpool_operator.api.reasons import Reason
from pdpool_operator.api.services import RepairMode, RepairSpec
from pdpool_operator.plan.model import Delete, Purge
from pdpool_operator.plan.purge import PurgeProgress
from pdpool_operator.plan.repair import GRACE_S, PURGE_WITHIN, plan_repair
from pdpool_operator.plan.repair_gates import COOLDOWN, MAX_PURGES, SETTLES, WAITS_AT_MOST
from pdpool_operator.plan.repair_model import WINDOW, Health, Patient, RepairPlan, avoided_nodes

from .makers import T0

ENFORCE = RepairSpec(mode=RepairMode.ENFORCE, restarts_per_hour=2)
OBSERVE = RepairSpec(mode=RepairMode.OBSERVE)
OFF = RepairSpec(mode=RepairMode.OFF)


def make(index: int, health: Health = Health.WELL, **changes: object) -> Patient:
    patient = Patient(
        index, f"pod-{index}", f"uid-{index}", False, health, serves=health is Health.WELL, evidence="why"
    )
    return replace(patient, **changes)  # type: ignore[arg-type]


SICK = make(0, Health.AT_FAULT)
PAIR = (SICK, make(1))


def record(
    uid: str = "uid-9",
    state: RepairState = RepairState.DONE,
    age_s: float = 600,
    *,
    index: int = 9,
    action: RepairAction = RepairAction.RESTART,
    node: str = "",
) -> RepairRecord:
    since = T0 - timedelta(seconds=age_s)
    return RepairRecord(index=index, pod_uid=uid, action=action, node=node, state=state, since=since, message="why")


def purge_of(uid: str, state: RepairState = RepairState.DONE, age_s: float = 600) -> RepairRecord:
    return record(uid, state, age_s, index=0, action=RepairAction.PURGE)


def states(plan: RepairPlan) -> dict[str, RepairState]:
    return {one.pod_uid: one.state for one in plan.records}


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
    spec, patients, records, partners, words = GATES[name]
    plan = plan_repair(spec, patients, records, partners, T0)
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
    spec, patients, records, partners, words = GATES[name]
    plan = plan_repair(spec, patients, records, partners, T0)
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
    ("spec", "patients", "words"),
    [
        (OBSERVE, PAIR, "no longer Enforce"),
        (ENFORCE, (make(0), make(1)), "recovered"),
        (ENFORCE, (SICK, make(1, Health.AT_FAULT)), "at fault at once"),
        (ENFORCE, (SICK,), "no other instance"),
    ],
)
def test_intent_is_withdrawn_when_no_longer_allowed(spec: RepairSpec, patients: tuple[Patient, ...], words: str):
    plan = plan_repair(spec, patients, (record("uid-0", RepairState.INTENDED, 1),), (), T0)
    assert (plan.restarts, states(plan)["uid-0"]) == ((), RepairState.WITHDRAWN)
    assert words in plan.events[0].message


def test_intent_waits_for_a_verdict_ten_minutes():
    unknown = (make(0, Health.UNKNOWN), make(1))
    waits = plan_repair(ENFORCE, unknown, (record("uid-0", RepairState.INTENDED, 600),), (), T0)
    assert (waits.restarts, states(waits)) == ((), {"uid-0": RepairState.INTENDED})
    ends = plan_repair(ENFORCE, unknown, (record("uid-0", RepairState.INTENDED, 601),), (), T0)
    assert states(ends) == {"uid-0": RepairState.WITHDRAWN}


def test_proposal_keeps_its_time_and_is_told_once():
    first = plan_repair(OBSERVE, PAIR, (), (), T0)
    later = plan_repair(OBSERVE, PAIR, first.records, (), T0 + timedelta(minutes=5))
    assert [event.reason for event in first.events] == [Reason.REPAIR_PROPOSED]
    assert (later.records, later.events) == (first.records, ())
    assert plan_repair(OBSERVE, (make(0), make(1)), later.records, (), T0).records == ()


WAITS = replace(SICK, waits=True)
WAITING = (WAITS, make(1))
SENT = Purge("uid-0", "10.0.2.1", 0, 30.0, "repair", 1)


class TestPurge:
    """Rung before the restart, at an instance with hand-offs that wait too long."""

    RUNGS: ClassVar = {
        "nothing waits": (ENFORCE, PAIR, (), (), "Restart Intended"),
        "hand-offs wait": (ENFORCE, WAITING, (), (), "Purge Intended"),
        "off": (OFF, WAITING, (), (), None),
        "observe": (OBSERVE, WAITING, (), (), "Purge Proposed"),
        "under way": (ENFORCE, WAITING, (purge_of("uid-0", RepairState.INTENDED, 1),), (), None),
        "settles": (ENFORCE, WAITING, (purge_of("uid-0", age_s=9),), (), None),
        "settles while nothing waits": (ENFORCE, PAIR, (purge_of("uid-0", age_s=9),), (), None),
        "did not help": (ENFORCE, WAITING, (purge_of("uid-0", age_s=10),), (), "Restart Intended"),
        "could not be made": (ENFORCE, WAITING, (purge_of("uid-0", RepairState.WITHDRAWN, 0),), (), "Restart Intended"),
        "purged an hour ago": (ENFORCE, WAITING, (purge_of("uid-0", age_s=3600),), (), "Purge Intended"),
        "purge of the former pod": (ENFORCE, WAITING, (purge_of("former"),), (), "Purge Intended"),
        "purge of the former pod settles": (ENFORCE, WAITING, (purge_of("former", age_s=9),), (), None),
        "purge of the partner settles": (ENFORCE, WAITING, (), (purge_of("a", age_s=9),), None),
        "breaker": (ENFORCE, (WAITS, make(1, Health.AT_FAULT)), (), (), "Purge Proposed"),
        "alone": (ENFORCE, (WAITS,), (), (), "Purge Intended"),
        "budget of restarts": (ENFORCE, WAITING, (record("a"), record("b")), (), "Purge Intended"),
        "cooldown of restarts": (ENFORCE, WAITING, (record("a", age_s=1),), (), "Purge Intended"),
        "budget of purges": (
            ENFORCE,
            WAITING,
            tuple(purge_of(f"a{i}") for i in range(MAX_PURGES)),
            (),
            "Restart Intended",
        ),
        "restarted before": (ENFORCE, WAITING, (record("a", index=0),), (), "Purge Intended"),
    }

    @pytest.mark.parametrize("name", RUNGS)
    def test_next_rung_follows_from_purges(self, name: str):
        spec, patients, records, partners, words = self.RUNGS[name]
        plan = plan_repair(spec, patients, records, partners, T0, {"uid-0": self.progress()})
        new = [f"{one.action} {one.state}" for one in plan.records if one not in records and one.index == 0]
        assert new == ([] if words is None else [words])
        assert plan.restarts == ()
        assert plan.settling == (words is None and spec is not OFF)

    @staticmethod
    def progress(
        *,
        send: bool = True,
        done: int = 0,
        ended: int = 0,
        waits: str = "rank 0 has not answered yet",
        refused: str = "",
    ) -> PurgeProgress:
        return PurgeProgress((SENT,) if send else (), done, ended, waits, refused)

    def advance(
        self, progress: PurgeProgress, *, age_s: float = 1, patients: tuple[Patient, ...] = WAITING
    ) -> RepairPlan:
        intent = purge_of("uid-0", RepairState.INTENDED, age_s)
        return plan_repair(ENFORCE, patients, (intent,), (), T0, {"uid-0": progress})

    def test_purge_then_restart_step_by_step(self):
        intended = plan_repair(ENFORCE, WAITING, (), (), T0)
        assert (intended.purges, intended.restarts, intended.intends, intended.remaining) == ((), (), True, 2)
        sent = plan_repair(ENFORCE, WAITING, intended.records, (), T0, {"uid-0": self.progress()})
        assert (sent.purges, sent.restarts, sent.records, sent.acts) == ((SENT,), (), intended.records, True)
        answered = {"uid-0": self.progress(send=False, done=1, ended=2, waits="")}
        done = plan_repair(ENFORCE, WAITING, sent.records, (), T0, answered)
        assert [(one.action, one.state) for one in done.records] == [(RepairAction.PURGE, RepairState.DONE)]
        assert [one.message for one in done.events] == ["Purged instance 0: Ended 2 hand-offs. why"]
        assert (done.acts, done.settling) == (False, True)
        after = plan_repair(ENFORCE, WAITING, done.records, (), T0 + SETTLES)
        assert [f"{one.action} {one.state}" for one in after.records] == ["Purge Done", "Restart Intended"]

    def test_purge_that_helps_prevents_the_restart(self):
        purged = (purge_of("uid-0", age_s=SETTLES.seconds),)
        plan = plan_repair(ENFORCE, (make(0), make(1)), purged, (), T0)
        assert (plan.records, plan.acts, plan.stops) == (purged, False, ())

    def test_silent_rank_does_not_hold_up_the_others(self):
        plan = self.advance(self.progress(send=False, done=1, ended=1, waits="rank 1 does not answer (timeout)"))
        assert [one.state for one in plan.records] == [RepairState.DONE]
        assert plan.records[0].message == "Ended 1 hand-off, but rank 1 does not answer (timeout). why"

    def test_purge_is_sent_again_until_its_time_is_over(self):
        assert self.advance(self.progress(), age_s=PURGE_WITHIN.seconds).purges == (SENT,)
        late = self.advance(self.progress(), age_s=PURGE_WITHIN.seconds + 1)
        assert [(one.action, one.state) for one in late.records] == [
            (RepairAction.PURGE, RepairState.WITHDRAWN),
            (RepairAction.RESTART, RepairState.INTENDED),
        ]
        assert late.events[0].message == "Did not purge instance 0: rank 0 has not answered yet"

    @pytest.mark.parametrize(
        ("progress", "patients", "state", "words"),
        [
            ({"refused": "rank 0 refused it: http 404"}, WAITING, RepairState.WITHDRAWN, "http 404"),
            ({"send": False, "waits": "rank 0 does not answer"}, WAITING, RepairState.WITHDRAWN, "does not answer"),
            ({}, (make(0), make(1)), RepairState.WITHDRAWN, "recovered"),
            ({"done": 1, "ended": 3}, (make(0), make(1)), RepairState.DONE, "Ended 3 hand-offs, but rank 0 has not"),
            ({}, (replace(WAITS, terminating=True), make(1)), RepairState.WITHDRAWN, "pod has ended"),
            ({}, (make(1),), RepairState.WITHDRAWN, "pod has ended"),
            ({}, (WAITS, make(1, Health.AT_FAULT)), RepairState.WITHDRAWN, "at fault at once"),
        ],
    )
    def test_intended_purge_ends(
        self, progress: dict[str, Any], patients: tuple[Patient, ...], state: RepairState, words: str
    ):
        plan = self.advance(self.progress(**progress), patients=patients)
        mine = [one for one in plan.records if one.action is RepairAction.PURGE and one.index == 0]
        assert ([one.state for one in mine], plan.purges) == ([state], ())
        assert words in mine[0].message

    def test_purge_waits_for_a_verdict(self):
        plan = self.advance(self.progress(), patients=(make(0, Health.UNKNOWN), make(1)))
        assert (plan.purges, [one.state for one in plan.records]) == ((), [RepairState.INTENDED])


ON_A = (replace(SICK, node="a"), make(1))
RESTARTED_ON_A = record("former", index=0, node="a")


def replacement_of(
    uid: str, state: RepairState = RepairState.DONE, age_s: float = 600, node: str = "a"
) -> RepairRecord:
    return record(uid, state, age_s, index=0, action=RepairAction.REPLACE, node=node)


class TestReplace:
    """Rung after a restart that did not help."""

    RUNGS: ClassVar = {
        "never restarted": (ON_A, (), "Restart Intended", None),
        "failed on the same node": (ON_A, (RESTARTED_ON_A,), "Replace Intended", None),
        "failed on two nodes": (
            (replace(SICK, node="b"), make(1)),
            (RESTARTED_ON_A,),
            "Restart Proposed",
            Reason.RESTART_DID_NOT_HELP,
        ),
        "node not known": (PAIR, (record("former", index=0),), "Restart Proposed", Reason.RESTART_DID_NOT_HELP),
        "purge comes first": (
            (replace(SICK, node="a", waits=True), make(1)),
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
    def test_next_rung_follows_from_nodes(self, name: str):
        patients, records, words, stops = self.RUNGS[name]
        plan = plan_repair(ENFORCE, patients, records, (), T0)
        new = [f"{one.action} {one.state}" for one in plan.records if one not in records and one.index == 0]
        assert new == [words]
        assert [stop.reason for stop in plan.stops[:1]] == ([stops] if stops else [])

    def test_observe_proposes_no_further_rung(self):
        plan = plan_repair(OBSERVE, ON_A, (RESTARTED_ON_A,), (), T0)
        assert [one.state for one in plan.records if one.pod_uid == "uid-0"] == [RepairState.PROPOSED]
        assert "spec.repair.mode" in plan.events[0].message

    def test_pod_is_deleted_when_its_successor_avoids_the_node(self):
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

    def test_stateful_set_that_cannot_be_changed_ends_it(self):
        intent = replacement_of("uid-0", RepairState.INTENDED, WAITS_AT_MOST.seconds)
        assert plan_repair(ENFORCE, ON_A, (RESTARTED_ON_A, intent), (), T0).events == ()
        late = replacement_of("uid-0", RepairState.INTENDED, WAITS_AT_MOST.seconds + 1)
        plan = plan_repair(ENFORCE, ON_A, (RESTARTED_ON_A, late), (), T0)
        assert "StatefulSet could not be changed" in plan.events[0].message
        assert avoided_nodes(plan.records, T0) == {}


patients = st.lists(
    st.builds(
        Patient,
        index=st.integers(0, 9),
        pod=st.just("pod"),
        pod_uid=st.sampled_from([f"uid-{i}" for i in range(8)]),
        terminating=st.booleans(),
        health=st.sampled_from(Health),
        serves=st.booleans(),
        useless=st.booleans(),
        waits=st.booleans(),
        node=st.sampled_from(["", "a", "b"]),
        avoids_node=st.sampled_from(["", "a", "b"]),
    ),
    max_size=8,
    unique_by=(lambda one: one.index, lambda one: one.pod_uid),
)
specs = st.builds(RepairSpec, mode=st.sampled_from(RepairMode), restarts_per_hour=st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(specs, st.lists(st.tuples(patients, st.integers(1, 900), st.booleans()), max_size=12))
def test_no_history_breaks_a_rule(spec: RepairSpec, history: list[tuple[list[Patient], int, bool]]):
    records: tuple[RepairRecord, ...] = ()
    now, restarted, purged = T0, [], []
    for seen, pause_s, answers in history:
        now += timedelta(seconds=pause_s)
        progress = {
            one.pod_uid: PurgeProgress(
                () if answers else (replace(SENT, pod_uid=one.pod_uid),), int(answers), 0, "", ""
            )
            for one in seen
        }
        plan = plan_repair(spec, seen, records, (), now, progress)
        intents = intended_in(records)
        for uid in [deed.uid for deed in plan.restarts] + [deed.pod_uid for deed in plan.purges]:
            assert spec.mode is RepairMode.ENFORCE
            assert uid in {one.pod_uid for one in records if one.state is RepairState.INTENDED}
        for deed in plan.restarts:
            patient = next(one for one in seen if one.pod_uid == deed.uid)
            assert patient.useless or any(one.serves for one in seen if one is not patient)
            actions = {action for uid, action in intended_in(plan.records) if uid == deed.uid} - {RepairAction.PURGE}
            assert actions == {RepairAction.RESTART} or (
                actions == {RepairAction.REPLACE} and avoided_nodes(records, now)[patient.index] == patient.avoids_node
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

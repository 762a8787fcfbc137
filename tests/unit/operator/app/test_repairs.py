"""Repair in the cluster's terms: who is at fault, and an operator that is killed at any step of a repair."""

from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.api.pools import Pool
from pdpool_operator.api.reasons import Reason
from pdpool_operator.api.served import without
from pdpool_operator.api.services import RepairMode, RepairSpec
from pdpool_operator.controller.repairs import Repairer, assessed, health
from pdpool_operator.diagnose.evidence import STALE
from pdpool_operator.diagnose.model import Diagnosis, Subject, Verdict
from pdpool_operator.diagnose.standing import Phase, Standing
from pdpool_operator.diagnose.track import follow
from pdpool_operator.observe.keys import Bindings, Key
from pdpool_operator.observe.model import ObservedPool
from pdpool_operator.observe.pool_services import most_cautious
from pdpool_operator.observe.samples import RankSample
from pdpool_operator.plan.model import Purge, Purged
from pdpool_operator.plan.repair_model import WINDOW, Health, RepairPlan, avoided_nodes

from tests.unit.operator.plan.makers import T0, make_instance, make_observed, make_pool, make_sample

KEY = Key("DecodePool", "llm", "chat")
STUCK_AFTER_S = 30.0
SPECS = {mode: RepairSpec(mode=mode) for mode in RepairMode}


class KilledError(Exception):
    """The operator ends here."""


class World:
    """One pool whose instance 0 is stuck. It is the cluster, and the API server with its UID preconditions."""

    def __init__(self, mode: RepairMode = RepairMode.ENFORCE, *, field: bool = True, answers: bool = False) -> None:
        self.mode, self.field, self.now = mode, field, T0
        self.answers, self.old = answers, 1
        """Whether the connector of instance 0 answers, and how many old hand-offs its first pod has."""
        self.purged: list[str] = []
        """Pods whose old hand-offs a purge has ended."""
        self.purge_helps = False
        self.unknown_fields: set[str] = set()
        """Fields of a record that the installed CRD lacks."""
        self.status: dict[str, Any] = {}
        self.uids = ["first", "other"]
        self.deleted: list[str] = []
        self.calls = 0
        self.killed_at: int | None = None
        self.is_live = True
        self.helps_after = 1
        """How many pods of instance 0 must have been deleted before a new one works."""
        self.node, self.avoids = "", ""
        """Node of all pods of instance 0, and the one that its StatefulSet avoids."""
        self.restart()

    def restart(self) -> None:
        """Start a new operator, which remembers nothing."""
        missing = frozenset(f"status.repairs[].{name}" for name in self.unknown_fields)
        missing |= frozenset() if self.field else {"status.repairs"}
        served = SimpleNamespace(storable=lambda _, status: without(status, missing))
        self.repairer = Repairer(self, self, Bindings(), served)  # type: ignore[arg-type]

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self.killed_at:
            raise KilledError

    async def apply_status(self, _resource: Any, _body: Any, status: dict[str, Any]) -> None:
        self._step()
        self.status = status
        self._step()

    async def purge(self, purge: Purge) -> Purged:
        self._step()
        intent = self.status["repairs"][0]
        assert (intent["podUID"], intent["action"], intent["state"]) == (purge.pod_uid, "Purge", "Intended")
        cut_off = datetime.fromisoformat(intent["since"]) - timedelta(seconds=STUCK_AFTER_S)
        assert self.now - timedelta(seconds=purge.older_than_s) == cut_off, "a repeated purge ends nothing newer"
        ended = self.old if purge.pod_uid not in self.purged else 0
        self.purged += [purge.pod_uid]
        self._step()
        return Purged(purge, "given", ended)

    async def delete(self, _resource: Any, _ns: str, _name: str, uid: str, _grace_s: int) -> None:
        self._step()
        intended = [one for one in self.status["repairs"] if (one["podUID"], one["state"]) == (uid, "Intended")]
        assert [one["action"] for one in intended] == ["Replace" if self.avoids else "Restart"]
        if uid in self.uids:
            self.deleted.append(uid)
            self.uids[self.uids.index(uid)] = "new" * len(self.deleted)
        self._step()

    def observed(self) -> ObservedPool:
        pool: Pool = make_pool(Role.DECODE, replicas=2)
        pool = pool.model_validate({**pool.model_dump(by_alias=True), "status": self.status})
        instances = [make_instance(pool, index) for index in range(2)]
        kept = [
            replace(one, pod=replace(one.pod, uid=uid, node=self.node), ranks={0: sample(uid)}, avoids_node=self.avoids)
            for one, uid in zip(instances, self.uids, strict=True)
            if one.pod is not None
        ]
        return replace(make_observed(pool, *kept), repair=SPECS[self.mode], stuck_after_s=STUCK_AFTER_S)

    def _avoid(self, observed: ObservedPool) -> None:
        """Change the StatefulSet as the plan of the pool does."""
        node = avoided_nodes(observed.pool.status.repairs, self.now).get(0, "")
        if self.avoids != node:
            self._step()
            self.avoids = node
            self._step()

    async def reconcile(self) -> RepairPlan:
        observed = self.observed()
        self._avoid(observed)
        well = len(self.deleted) >= self.helps_after or (self.purge_helps and self.uids[0] in self.purged)
        verdict = Verdict.IDLE if well else Verdict.STUCK
        first = diagnosis(verdict, answered_at=self.now if self.answers else None)
        diagnoses = [first, diagnosis(Verdict.FLOWING, index=1)]
        self.now += timedelta(seconds=2)
        plan = await self.repairer.look(KEY, {"status": self.status}, observed, diagnoses, self.now, self)  # type: ignore[arg-type]
        if self.field:
            self.status = {**self.status, "repairs": [record.to_dict() for record in plan.records]}
        return plan


def sample(uid: str) -> RankSample:
    found = make_sample(pod_uid=uid)
    assert found.connector is not None
    return replace(found, connector=replace(found.connector, pod_uid=uid))


def diagnosis(
    verdict: Verdict, *, index: int = 0, times: int | None = None, answered_at: datetime | None = None
) -> Diagnosis:
    standing = None if times is None else Standing("i", Phase.OUT, T0, times=times)
    tracks = () if answered_at is None else (follow(None, make_sample(answered_at)),)
    subject = Subject("chat", Role.DECODE, index, None, False, tracks, standing=standing)
    return Diagnosis(subject, verdict, f"it is {verdict}")


@pytest.mark.parametrize("killed_at", [None, 1, 2, 3, 4])
async def test_killed_operator_neither_repeats_nor_forgets(killed_at: int | None):
    world = World()
    world.killed_at = killed_at
    for _ in range(6):
        try:
            await world.reconcile()
        except KilledError:
            world.restart()
    assert world.deleted == ["first"]
    assert [(one["podUID"], one["state"]) for one in world.status["repairs"]] == [("first", "Done")]


@pytest.mark.parametrize("killed_at", [None, 1, 2, 3, 4])
async def test_restart_that_did_not_help_is_not_repeated(killed_at: int | None):
    world = World()
    world.killed_at, world.helps_after = killed_at, 2
    for _ in range(8):
        try:
            plan = await world.reconcile()
        except KilledError:
            world.restart()
    assert world.deleted == ["first"]
    assert [stop.reason for stop in plan.stops] == [Reason.RESTART_DID_NOT_HELP]
    states = {one["podUID"]: one["state"] for one in world.status["repairs"]}
    assert states == {"first": "Done", "new": "Proposed"}


@pytest.mark.parametrize("killed_at", [None, *range(1, 11)])
@pytest.mark.parametrize(("helps_after", "stops"), [(2, []), (3, [Reason.REPLACEMENT_DID_NOT_HELP])])
async def test_killed_operator_replaces_once(killed_at: int | None, helps_after: int, stops: list[Reason]):
    world = World()
    world.killed_at, world.helps_after, world.node = killed_at, helps_after, "a"
    for _ in range(50):
        try:
            plan = await world.reconcile()
        except KilledError:
            world.restart()
    assert (world.deleted, world.avoids) == (["first", "new"], "a")
    ends = [(one["action"], one["node"]) for one in world.status["repairs"] if one["state"] == "Done"]
    assert ends == [("Restart", "a"), ("Replace", "a")]
    assert [stop.reason for stop in plan.stops] == stops


async def test_node_is_avoided_for_an_hour():
    world = World()
    world.helps_after, world.node = 2, "a"
    for _ in range(50):
        await world.reconcile()
    assert world.avoids == "a"
    world.now += WINDOW
    await world.reconcile()
    await world.reconcile()
    assert (world.avoids, world.status["repairs"]) == ("", [])


@pytest.mark.parametrize("killed_at", [None, *range(1, 9)])
async def test_killed_operator_purges_then_restarts_once(killed_at: int | None):
    world = World(answers=True)
    world.killed_at = killed_at
    for _ in range(14):
        try:
            await world.reconcile()
        except KilledError:
            world.restart()
    assert (set(world.purged), world.deleted) == ({"first"}, ["first"])
    purge, restart = world.status["repairs"]
    assert (purge["podUID"], purge["action"]) == ("first", "Purge")
    # The answer to the first purge is lost with its operator. The second one finds nothing to end.
    assert purge["state"] == ("Withdrawn" if len(world.purged) > 1 else "Done")
    assert (restart["podUID"], restart["action"], restart["state"]) == ("first", "Restart", "Done")


async def test_purge_that_ends_nothing_is_followed_by_the_restart():
    world = World(answers=True)
    world.old = 0
    for _ in range(5):
        await world.reconcile()
    assert (world.purged, world.deleted) == (["first"], ["first"])


async def test_purge_that_helps_restarts_nothing():
    world = World(answers=True)
    world.purge_helps = True
    for _ in range(10):
        await world.reconcile()
    assert (world.purged, world.deleted) == (["first"], [])
    assert [one["state"] for one in world.status["repairs"]] == ["Done"]
    assert world.status["repairs"][0]["message"] == "Ended 1 hand-off. it is Stuck"


@pytest.mark.parametrize("mode", [RepairMode.OFF, RepairMode.OBSERVE])
@pytest.mark.parametrize("answers", [False, True])
async def test_no_deed_unless_enforced(mode: RepairMode, answers: bool):
    world = World(mode, answers=answers)
    for _ in range(4):
        plan = await world.reconcile()
        assert not plan.acts
    assert (world.deleted, world.purged, world.calls) == ([], [], 0)
    assert len(world.status["repairs"]) == (mode is RepairMode.OBSERVE)


@pytest.mark.parametrize("unknown", ["action", "node"])
async def test_no_deed_if_part_of_intent_cannot_be_stored(unknown: str):
    world = World(answers=True)
    world.unknown_fields = {unknown}
    world.restart()
    for _ in range(3):
        await world.reconcile()
    assert (world.deleted, world.purged, world.calls) == ([], [], 0)


async def test_no_deed_if_intent_cannot_be_stored():
    world = World(field=False)
    for _ in range(3):
        await world.reconcile()
    assert (world.deleted, world.calls) == ([], 0)


async def test_watched_state_is_not_acted_on():
    world = World()
    world.is_live = False
    for _ in range(3):
        assert (await world.reconcile()).acts
    assert world.calls == 0


@pytest.mark.parametrize("verdict", Verdict)
def test_only_stuck_and_twice_failing_are_at_fault(verdict: Verdict):
    at_fault = [times for times in (None, 1, 2) if health(diagnosis(verdict, times=times)) is Health.AT_FAULT]
    assert at_fault == {Verdict.STUCK: [None, 1, 2], Verdict.FAILING: [2]}.get(verdict, [])


@pytest.mark.parametrize("verdict", Verdict)
def test_only_stuck_instances_whose_connector_answers_are_purged(verdict: Verdict):
    observed = World().observed()
    found = [
        assessed(observed, [diagnosis(verdict, answered_at=answered_at)], T0)[0].purgeable
        for answered_at in (None, T0 - STALE - timedelta(seconds=1), T0)
    ]
    assert found == [False, False, verdict is Verdict.STUCK]


def test_instance_of_an_earlier_spec_is_not_moved():
    observed = World().observed()
    old, current = observed.instances[0], observed.instances[1]
    seen = replace(observed, instances=(replace(old, spec_hash="earlier"), current))
    assert [one.movable for one in assessed(seen, (), T0)] == [False, True]


def test_most_cautious_service_decides():
    enforce, observe = RepairSpec(mode=RepairMode.ENFORCE, restarts_per_hour=1), RepairSpec()
    assert most_cautious([enforce, observe]) == RepairSpec(mode=RepairMode.OBSERVE, restarts_per_hour=1)
    assert most_cautious([enforce]) == enforce
    assert most_cautious([]).mode is RepairMode.OFF

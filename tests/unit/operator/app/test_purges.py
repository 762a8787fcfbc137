"""A purge whose operator is killed at any step: it is not forgotten, and ends no newer hand-offs."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.api.operations import OperationStatus, PoolOperation
from pdpool_operator.controller.operations import Operations
from pdpool_operator.observe.model import ObservedPool
from pdpool_operator.plan.model import Purge, Purged

from tests.unit.operator.plan.makers import T0, make_instance, make_observed, make_pool, make_sample, seconds

from .metrics import idle_metrics

POOL = make_pool(Role.DECODE, replicas=1)
OLDER_THAN_S = 60
RECONCILES = 8


class KilledError(Exception):
    """The operator ends here."""


class World:
    """One instance of two ranks that opens a hand-off each second, and ends none. It is the API server, too."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.killed_at, self.calls, self.now = killed_at, 0, T0
        self.status: dict[str, Any] = {}
        self.opened = {rank: [T0 - seconds(age_s) for age_s in range(120)] for rank in range(2)}
        self.ended: list[datetime] = []
        self.silent: set[int] = set()
        self.metrics = idle_metrics()
        self.restart()

    def restart(self) -> None:
        """Start a new operator, which remembers nothing."""
        served = SimpleNamespace(storable=lambda _, status: dict(status))
        parts = [cast("Any", one) for one in (self, self, served, self)]
        self.operations = Operations(*parts, self.metrics, lambda: self.now)

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self.killed_at:
            raise KilledError

    async def apply_status(self, _resource: Any, _body: Any, status: Mapping[str, Any]) -> None:
        self._step()
        self.status = dict(status)
        self._step()

    async def purge(self, purge: Purge) -> Purged:
        self._step()
        if purge.rank in self.silent:
            return Purged(purge, "unanswered", words="timeout")
        assert self.status["phase"] == "Purging", "the phase is written before the deed"
        cut_off, hand_offs = self.now - seconds(purge.older_than_s), self.opened[purge.rank]
        old = [opened for opened in hand_offs if opened <= cut_off]
        self.opened[purge.rank] = [opened for opened in hand_offs if opened > cut_off]
        self.ended += old
        self._step()
        return Purged(purge, "given", len(old))

    async def emit(self, *_: Any) -> None:
        self._step()

    def observed(self) -> ObservedPool:
        instance = make_instance(POOL, 0)
        assert instance.pod is not None
        ranks = {}
        for rank in range(2):
            sample = make_sample(self.now, pod_uid=instance.pod.uid, rank=rank)
            assert sample.connector is not None
            ranks[rank] = replace(sample, connector=replace(sample.connector, ranks=2, pod_uid=instance.pod.uid))
        meta = {"name": "one", "namespace": "llm", "uid": "uid-one", "creationTimestamp": T0.isoformat()}
        spec = {"type": "Purge", "instance": "chat-decode-0", "olderThanSeconds": OLDER_THAN_S}
        operation = PoolOperation.parse({"metadata": meta, "spec": spec, "status": self.status})
        return make_observed(POOL, replace(instance, ranks=ranks), operations=(operation,))

    async def reconcile(self) -> None:
        try:
            await self.operations.carry_out("llm", self.operations.plan(self.observed(), ()))
        except KilledError:
            self.restart()
        self.now += seconds(1)
        for hand_offs in self.opened.values():
            hand_offs.append(self.now)

    async def run(self) -> OperationStatus:
        for _ in range(RECONCILES):
            await self.reconcile()
        return OperationStatus.model_validate(self.status)


async def test_purge_ends_what_is_old_and_counts_it() -> None:
    world = World()
    status = await world.run()
    assert (status.phase, status.purged) == ("Succeeded", len(world.ended))
    assert len(world.ended) == 2 * (120 - OLDER_THAN_S)


@pytest.mark.parametrize("killed_at", range(1, 11))
async def test_killed_operator_neither_forgets_nor_ends_newer_hand_offs(killed_at: int) -> None:
    world = World(killed_at)
    status = await world.run()
    assert status.phase == "Succeeded"
    assert status.started_at is not None
    cut_off = status.started_at - seconds(OLDER_THAN_S)
    assert max(world.ended) == cut_off
    assert all(min(left) > cut_off for left in world.opened.values())


async def test_rank_that_has_done_it_is_not_asked_again() -> None:
    world = World()
    world.silent = {1}
    await world.run()
    assert OperationStatus.model_validate(world.status).phase == "Purging"
    first = len(world.opened[0])
    world.silent = set()
    status = await world.run()
    assert (status.phase, status.purged) == ("Succeeded", len(world.ended))
    assert len(world.opened[0]) == first + RECONCILES


def counted(world: World, outcome: str) -> float | None:
    labels = {"namespace": "llm", "pool": "chat", "role": "decode", "type": "purge", "outcome": outcome}
    return world.metrics.registry.get_sample_value("pdpool_operations_total", labels)


async def test_ended_operation_is_counted_once() -> None:
    world = World()
    await world.run()
    assert (counted(world, "succeeded"), counted(world, "failed")) == (1.0, None)


async def test_operation_under_way_is_not_counted() -> None:
    world = World()
    world.silent = {1}
    await world.run()
    assert (counted(world, "succeeded"), counted(world, "failed")) == (None, None)

"""A fence of a node whose operator is killed at any step: it goes on with the same processes, and with no others."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pdpool_operator.api import names
from pdpool_operator.api.names import Role
from pdpool_operator.api.operations import OperationStatus
from pdpool_operator.api.reasons import Reason
from pdpool_operator.controller.engines import FenceResult
from pdpool_operator.controller.fences import Fencer
from pdpool_operator.controller.node_fences import NodeFences
from pdpool_operator.controller.operations import Operations
from pdpool_operator.engines.answers import MAX_HOLDS
from pdpool_operator.observe.keys import Key
from pdpool_operator.observe.lives import Lives
from pdpool_operator.observe.pod_nodes import PodNodes
from pdpool_operator.observe.samples import HoldSample, RankSample
from pdpool_operator.plan.model import Fence, NodeOff
from pdpool_operator.runtime.api_errors import ForbiddenError
from pdpool_operator.runtime.resources import NODES, OPERATIONS, Resource

from tests.unit.operator.plan.makers import T0, make_sample, seconds

from .metrics import idle_metrics

KEY = Key("PoolOperation", "llm", "one")
DEAD, LATER = "d" * 32, "e" * 32
OFF = {
    "spec": {"taints": [{"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}]},
    "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]},
}
BACK = {"spec": {}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
GONE_POD = {"metadata": {"name": "chat-prefill-0-0", "uid": "pod-dead"}, "spec": {"nodeName": "gpu-17"}}


def pod(name: str, namespace: str, role: Role = Role.DECODE, *, keys: bool = True) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": name, "namespace": namespace, "uid": f"{namespace}/{name}"}
    meta |= {"labels": names.pool_labels("chat", role), "creationTimestamp": "2026-11-21T11:00:00Z"}
    meta["annotations"] = {names.ANNOTATION_KEY_EPOCH: "1"} if keys else {}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-21T11:00:00Z"}
    status = {"phase": "Running", "podIP": "10.0.2.1", "conditions": [ready]}
    return {"metadata": meta, "spec": {"nodeName": "gpu-3"}, "status": status}


class KilledError(Exception):
    """The operator ends here."""


class World:
    """The API server, and engines of two namespaces. Each holds memory for a process of gpu-17."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.killed_at, self.calls, self.now = killed_at, 0, T0
        self.status: dict[str, Any] = {}
        self.node: dict[str, Any] | None = OFF
        self.forbidden = False
        self.pods = [pod("chat-decode-0-0", "llm"), pod("chat-decode-0-0", "other")]
        self.held = {one["metadata"]["uid"]: {DEAD} for one in self.pods}
        self.fenced: list[tuple[str, str]] = []
        self.knows_the_node = True
        self.metrics = idle_metrics()
        self.restart()

    def restart(self) -> None:
        """Start a new operator. It reads from the history of pods what was deleted."""
        served = SimpleNamespace(storable=lambda _, status: dict(status))
        self_ = cast("Any", self)
        nodes = PodNodes()
        if self.knows_the_node:
            nodes.note(GONE_POD)
        fencer = Fencer(self_, self_, Lives(), nodes, lambda: self.now, lambda _: None)
        operations = Operations(self_, self_, cast("Any", served), self_, self.metrics, lambda: self.now)
        self.fences = NodeFences(self_, self_, self_, nodes, fencer, operations, lambda: self.now)

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self.killed_at:
            raise KilledError

    async def get(self, resource: Resource, namespace: str | None, name: str) -> dict[str, Any] | None:
        if resource == NODES:
            assert (namespace, name) == (None, "gpu-17")
            if self.forbidden:
                raise ForbiddenError(403, "Forbidden", "no", "get nodes")
            return self.node
        assert (resource, namespace, name) == (OPERATIONS, "llm", "one")
        meta = {"name": "one", "namespace": "llm", "uid": "uid-one", "creationTimestamp": T0.isoformat()}
        return {"metadata": meta, "spec": {"type": "Fence", "node": "gpu-17"}, "status": self.status}

    async def list(self, _: Any, namespace: str, labels: str) -> AsyncIterator[dict[str, Any]]:
        assert labels == names.SELECT_MADE
        for one in self.pods:
            if one["metadata"]["namespace"] == namespace:
                yield one

    def samples(self) -> Mapping[str, Mapping[int, RankSample]]:
        """The sampler samples the engines of all namespaces."""
        return {uid: {0: self.look(uid, held)} for uid, held in self.held.items()}

    def look(self, uid: str, held: set[str]) -> RankSample:
        sample = make_sample(self.now, pod_uid=uid)
        assert sample.connector is not None
        holds = tuple(HoldSample(one, "pod-dead", "run") for one in sorted(held)[:MAX_HOLDS])
        return replace(sample, connector=replace(sample.connector, pod_uid=uid, held_for=holds))

    async def apply_status(self, _resource: Any, _body: Any, status: Mapping[str, Any]) -> None:
        self._step()
        self.status = dict(status)
        self._step()

    async def fence(self, fence: Fence) -> FenceResult:
        self._step()
        assert fence.incarnation in self.status["processes"], "the process is written before the deed"
        assert fence.proof == NodeOff("gpu-17", "PoolOperation llm/one")
        self.held[fence.pod_uid].discard(fence.incarnation)
        self.fenced.append((fence.pod_uid, fence.incarnation))
        self._step()
        return FenceResult(fence, "given")

    async def emit(self, *_: Any) -> None:
        self._step()

    async def run(self, reconciles: int = 8, back_after: int | None = None) -> OperationStatus:
        """Reconcile so often. After `back_after` times the node is back, and another process of it is lost."""
        for count in range(reconciles):
            if count == back_after:
                self.node = BACK
                self.held["llm/chat-decode-0-0"].add(LATER)
            try:
                await self.fences.reconcile(KEY)
            except KilledError:
                self.restart()
            self.now += seconds(1)
        return OperationStatus.model_validate(self.status)


async def test_fence_releases_the_memory_of_its_namespace_alone() -> None:
    world = World()
    status = await world.run()
    assert (status.phase, status.processes, status.released) == ("Succeeded", (DEAD,), 1)
    assert world.held == {"llm/chat-decode-0-0": set(), "other/chat-decode-0-0": {DEAD}}
    assert world.fenced == [("llm/chat-decode-0-0", DEAD)]
    labels = {"namespace": "llm", "pool": "", "role": "", "type": "fence", "outcome": "succeeded"}
    assert world.metrics.registry.get_sample_value("pdpool_operations_total", labels) == 1.0


async def test_processes_beyond_those_that_are_read_are_fenced_next() -> None:
    world = World()
    processes = {f"{number:032x}" for number in range(2 * MAX_HOLDS + 50)}
    world.held["llm/chat-decode-0-0"] = set(processes)
    status = await world.run(12)
    assert (status.phase, set(status.processes), status.released) == ("Succeeded", processes, len(processes))
    assert world.held["llm/chat-decode-0-0"] == set()


@pytest.mark.parametrize("killed_at", range(1, 10))
async def test_killed_operator_forgets_no_process(killed_at: int) -> None:
    world = World(killed_at)
    status = await world.run()
    assert (status.phase, status.processes) == ("Succeeded", (DEAD,))
    assert world.held == {"llm/chat-decode-0-0": set(), "other/chat-decode-0-0": {DEAD}}


@pytest.mark.parametrize("killed_at", range(1, 10))
async def test_killed_operator_fences_no_process_that_began_when_the_node_was_back(killed_at: int) -> None:
    world = World(killed_at)
    await world.run(back_after=2)
    assert LATER in world.held["llm/chat-decode-0-0"]
    assert LATER not in {process for _, process in world.fenced}


async def test_node_that_is_back_fences_nothing() -> None:
    world = World()
    world.node = BACK
    status = await world.run()
    assert (status.phase, status.conditions[0].reason) == ("Failed", Reason.NODE_IN_SERVICE)
    assert world.fenced == []


async def test_node_that_may_not_be_read_fences_nothing() -> None:
    world = World()
    world.forbidden = True
    status = await world.run()
    assert (status.phase, status.conditions[0].reason) == ("Failed", Reason.NODE_UNREADABLE)
    assert world.fenced == []


async def test_pod_that_this_operator_never_saw_stays_held() -> None:
    world = World()
    world.knows_the_node = False
    world.restart()
    status = await world.run(40)
    assert (status.phase, status.conditions[0].reason) == ("Failed", Reason.PEERS_UNKNOWN)
    assert world.fenced == []


WITHOUT_CONNECTOR = {"router": pod("chat-router-0", "llm", Role.ROUTER), "stock": pod("x", "llm", keys=False)}


@pytest.mark.parametrize("other", WITHOUT_CONNECTOR.values(), ids=WITHOUT_CONNECTOR)
async def test_pod_without_a_connector_is_not_waited_for(other: dict[str, Any]) -> None:
    world = World()
    world.pods.append(other)
    assert (await world.run()).phase == "Succeeded"


async def test_fence_that_had_no_effect_yet_is_not_sent_every_second() -> None:
    world = World()

    async def keep(fence: Fence) -> FenceResult:
        world.fenced.append((fence.pod_uid, fence.incarnation))
        return FenceResult(fence, "given")

    cast("Any", world).fence = keep
    assert (await world.run(12)).phase == "Fencing"
    assert len(world.fenced) == 1


async def test_ended_operation_is_left_alone() -> None:
    world = World()
    await world.run()
    calls = world.calls
    await world.run()
    assert world.calls == calls

"""Carries out `PoolOperation` objects of type Fence, as `plan.node_fence` decides."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from ..api import names
from ..observe import parse
from ..observe.keys import Key
from ..observe.model import ObservedNode, ObservedPod
from ..observe.operations import parsed_operation
from ..observe.pod_nodes import PodNodes
from ..observe.reads import Reads
from ..observe.sampler import Sampler
from ..plan.model import HoldKey
from ..plan.node_fence import FenceFacts, plan_fence
from ..plan.operation_step import POLL_S
from ..runtime.api import Api
from ..runtime.api_errors import ForbiddenError
from ..runtime.manager import Result
from ..runtime.resources import NODES, OPERATIONS, PODS
from .fences import Fencer
from .operations import Operations


class NodeFences:
    """Reconciles operations on nodes. It acts on the pods in the namespace of an operation only.

    Args:
        reads: Reads watched objects.
        api: Reads Nodes, as they are now.
    """

    def __init__(
        self,
        reads: Reads,
        api: Api,
        sampler: Sampler,
        nodes: PodNodes,
        fencer: Fencer,
        operations: Operations,
        now: Callable[[], datetime],
    ) -> None:
        self._reads, self._api, self._sampler, self._nodes = reads, api, sampler, nodes
        self._fencer, self._operations, self._now = fencer, operations, now
        self._followed: dict[Key, _Followed] = {}

    async def reconcile(self, key: Key) -> Result:
        """Take the next step of one operation.

        Raises:
            ApiError: a call failed. The next reconcile plans again.
            NotLeaderError: another operator may be the leader.
        """
        body = await self._reads.get(OPERATIONS, key.namespace, key.name)
        operation = parsed_operation(body) if body is not None else None
        if operation is None or operation.status.phase.finished:
            self._followed.pop(key, None)
            return Result()
        followed = self._followed.get(key)
        if followed is None or followed.uid != operation.metadata.uid:
            followed = self._followed[key] = _Followed(operation.metadata.uid, self._now())
        facts = FenceFacts(
            holders=await self._holders(key.namespace),
            looks=self._sampler.samples(),
            node_of=self._nodes.of,
            followed_since=followed.since,
            refused=followed.refused,
        )
        step = plan_fence(operation, facts, await self._node(operation.node), self._now())
        await self._operations.write(step)
        for result in await self._fencer.send([fence for fence in step.fences if self._fencer.due(fence)]):
            if result.outcome == "refused":
                followed.refused[result.fence.hold_key] = result.words
        return Result(POLL_S)

    async def _holders(self, namespace: str) -> tuple[ObservedPod, ...]:
        """Return the engine pods of the namespace that have a connector: only they have keys."""
        found = []
        async for pod in self._reads.list(PODS, namespace, names.SELECT_MADE):
            self._nodes.note(pod)
            role = parse.labels_of(pod).get(names.LABEL_ROLE)
            if role in names.ENGINE_ROLES and parse.key_epochs(pod) is not None:
                found.append(parse.observed_pod(pod))
        return tuple(found)

    async def _node(self, name: str) -> ObservedNode:
        asked_at = self._now()
        try:
            return parse.observed_node(name, await self._api.get(NODES, None, name), asked_at)
        except ForbiddenError:
            return ObservedNode(name, asked_at, forbidden=True)


@dataclass(slots=True)
class _Followed:
    """An operation that has not ended."""

    uid: str
    since: datetime
    refused: dict[HoldKey, str] = field(default_factory=dict)
    """Holds whose fence was refused, with the connector's words."""

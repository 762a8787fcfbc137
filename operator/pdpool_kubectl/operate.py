"""`drain`, `restart`, `purge` and `fence`: create a `PoolOperation`, and follow it until it has ended."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdpool_operator.api.operations import OperationPhase, OperationType, PoolOperation
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.api_errors import UnavailableError
from pdpool_operator.runtime.resources import OPERATIONS

EVERY_S = 1.0
GRACE_S = 60.0
"""How long after the deadline of an operation its end is awaited. An operator that runs ends it at the deadline."""

MAX_TARGET = 200
"""Characters of a node's name in that of an operation, which has 253 at most."""


class LostError(Exception):
    """The end of the operation will not be seen: it was deleted, or no operator ends it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An operation as its status shows it."""

    namespace: str
    name: str
    type: OperationType
    target: str
    """Name of the instance, or of the node of a Fence."""
    deadline_s: int
    phase: OperationPhase = OperationPhase.PENDING
    message: str = ""

    @classmethod
    def of(cls, body: dict[str, Any]) -> "Seen":
        """Read an object of the API server."""
        one = PoolOperation.parse(body)
        meta, spec, status = one.metadata, one.spec, one.status
        return cls(
            meta.namespace,
            meta.name,
            spec.type,
            one.node if spec.type is OperationType.FENCE else one.instance,
            spec.deadline_seconds,
            status.phase,
            status.message,
        )

    @property
    def failed(self) -> bool:
        """Whether it was refused, or its deadline has passed."""
        return self.phase is OperationPhase.FAILED

    def line(self) -> str:
        """Return phase and message as one line."""
        return f"{self.phase}: {self.message}" if self.message else str(self.phase)

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "namespace": self.namespace,
            "operation": self.name,
            "type": str(self.type),
            ("node" if self.type is OperationType.FENCE else "instance"): self.target,
            "phase": str(self.phase),
            "message": self.message,
        }


async def create(api: Api, namespace: str, type_: OperationType, target: str, older_than_s: int | None = None) -> Seen:
    """Create an operation, under a name of its own. `older_than_s` is for a purge.

    Raises:
        ApiError: the API server refuses.
        LostError: it does not answer. The operation may exist.
    """
    name = f"{type_.lower()}-{target[:MAX_TARGET].rstrip('-.')}-{secrets.token_hex(3)}"
    meta = {"name": name, "namespace": namespace}
    spec: dict[str, Any] = {"type": str(type_), "node" if type_ is OperationType.FENCE else "instance": target}
    if older_than_s is not None:
        spec["olderThanSeconds"] = older_than_s
    kind = {"apiVersion": OPERATIONS.api_version, "kind": OPERATIONS.kind}
    try:
        return Seen.of(await api.create(OPERATIONS, {**kind, "metadata": meta, "spec": spec}))
    except UnavailableError as error:
        raise LostError(f"{error}; the operation may exist: kubectl get poolop {name} -n {namespace}") from error


async def follow(
    api: Api, operation: Seen, progress: Callable[[str], None], *, every_s: float = EVERY_S, grace_s: float = GRACE_S
) -> Seen:
    """Report each change of an operation, and return it once it has ended. An API server that is away is asked again.

    Raises:
        LostError: it was deleted, or has not ended some time after its deadline.
        ApiError: the API server refuses.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + operation.deadline_s + grace_s
    seen, said = operation, ""
    while loop.time() < until:
        try:
            body = await api.get(OPERATIONS, operation.namespace, operation.name)
        except UnavailableError as error:
            line = str(error)
        else:
            if body is None:
                raise LostError(f"PoolOperation {operation.name} was deleted before it had ended")
            seen = Seen.of(body)
            line = seen.line()
        if seen.phase.finished:
            return seen
        if line != said:
            progress(line)
            said = line
        await asyncio.sleep(every_s)
    late = f"PoolOperation {operation.name} has not ended {grace_s:.0f} s after its deadline"
    raise LostError(f"{late}: does an operator run? (kubectl pdpool doctor)")

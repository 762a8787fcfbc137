"""Reads the operations on instances of a pool."""

import logging

from ..api.base import SpecInvalid
from ..api.operations import OperationType, PoolOperation
from ..api.pools import Pool
from ..runtime.resources import OPERATIONS, Object
from .reads import Reads

log = logging.getLogger(__name__)


async def pool_operations(reads: Reads, kind: type[Pool], namespace: str, name: str) -> tuple[PoolOperation, ...]:
    """Return the operations on instances of a pool, which need not exist, the older ones first."""
    found = [parsed_operation(body) async for body in reads.list(OPERATIONS, namespace)]
    on_pool = [
        one
        for one in found
        if one and one.spec.type is not OperationType.FENCE and (one.pool_kind, one.pool_name) == (kind, name)
    ]
    return tuple(sorted(on_pool, key=lambda one: (one.metadata.creation_timestamp, one.metadata.name)))


def parsed_operation(body: Object) -> PoolOperation | None:
    """Return an operation, or None for one that does not fit the model: the CRD of another version let it in."""
    try:
        return PoolOperation.parse(body)
    except SpecInvalid as invalid:
        meta = body["metadata"]
        log.warning("PoolOperation %s/%s is left alone: %s", meta["namespace"], meta["name"], invalid)
        return None

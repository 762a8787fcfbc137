"""The bare data plane with the patterns that are known to be fast, to hold the connector against."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pdpool_connector.engines.base import Op
from pdpool_connector.engines.nixl import NixlEngine
from pdpool_connector.layout.memory import KVMemory
from pdpool_connector.layout.plan import PairPlan, split

Pairs = list[tuple[NDArray[np.int32], NDArray[np.int32]]]
DEADLINE_S = 60.0


def measure(engine: Any, peer: str, memory: KVMemory, remote: KVMemory, pairs: Pairs) -> dict[str, float]:  # noqa: ANN401
    """Seconds that it takes to move every request of `pairs`, by pattern. Nothing else may use the peer meanwhile."""
    plan = PairPlan(memory, remote)
    if isinstance(engine, NixlEngine):
        return {
            "one handle": _nixl(engine, peer, [plan.indices(local, target, (0, 0)) for local, target in pairs]),
            "chunks": _nixl(
                engine,
                peer,
                [plan.indices(*part, None) for local, target in pairs for part in split(memory, local, target)],
            ),
        }
    raise TypeError(f"no raw pattern for engine {engine.name}")


def _nixl(engine: NixlEngine, peer: str, handles: list[tuple[NDArray[np.int32], NDArray[np.int32]]]) -> float:
    """Handles made beforehand, started and polled two at a time."""
    agent, state = engine._agent, engine._peers[peer]
    assert engine._items is not None
    begun = time.monotonic()
    flying: list[int] = []
    waiting = list(reversed(handles))
    while waiting or flying:
        if waiting and len(flying) < 2:
            local, target = waiting.pop()
            transfer = agent.make(Op.WRITE, engine._items, local, state.items, target)
            over = agent.start(transfer)
        else:
            transfer = flying.pop(0)
            over = agent.over(transfer)
        if over:
            agent.release(transfer)
        else:
            flying.append(transfer)
        if time.monotonic() - begun > DEADLINE_S:
            raise TimeoutError(f"raw transfer is not over after {DEADLINE_S} s")
    return time.monotonic() - begun

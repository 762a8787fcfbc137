"""The bare data plane with the patterns that are known to be fast, to hold the connector against."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pdpool_connector.engines.base import Op
from pdpool_connector.engines.mooncake import MooncakeEngine
from pdpool_connector.engines.nixl import NixlEngine
from pdpool_connector.layout.plan import Chunk
from pdpool_connector.layout.pool import MAX_CHUNK_DESCRIPTORS, Runs

Pairs = list[tuple[NDArray[np.int32], NDArray[np.int32]]]
DEADLINE_S = 60.0


def measure(engine: Any, peer: str, pairs: Pairs) -> dict[str, float]:  # noqa: ANN401 - any engine's insides
    """Seconds that it takes to move every request of `pairs`, by pattern. Nothing else may use the peer meanwhile.

    What can be computed beforehand is: only the engine's own calls are timed.
    """
    if not isinstance(engine, NixlEngine | MooncakeEngine):
        raise TypeError(f"no raw pattern for engine {engine.name}")
    state: Any = engine._peers[peer]
    whole = [Chunk(local, target, aux=((0, 0),)) for local, target in pairs]
    cut = [chunk for local, target in pairs for chunk in state.plan.cut(local, target, (0, 0))]
    patterns = {"whole requests": whole, "chunks": cut}
    if isinstance(engine, NixlEngine):
        lists = {name: [state.plan.indices(chunk) for chunk in chunks] for name, chunks in patterns.items()}
        return {name: _timed(partial(_nixl, engine, state, items)) for name, items in lists.items()}
    native = engine._session._native
    parts = {
        name: [part for one in chunks for part in _parts(state.plan.runs(one))] for name, chunks in patterns.items()
    }
    return {name: _timed(partial(_mooncake, native, state.session, part)) for name, part in parts.items()}


def _timed(move: Callable[[], None]) -> float:
    begun = time.monotonic()
    move()
    return time.monotonic() - begun


def _nixl(engine: NixlEngine, state: Any, items: list[tuple[NDArray[np.int32], NDArray[np.int32]]]) -> None:  # noqa: ANN401
    """Two handles at a time, polled without a pause."""
    agent = engine._agent
    flying: list[int] = []
    waiting = list(reversed(items))
    deadline = time.monotonic() + DEADLINE_S
    while waiting or flying:
        if waiting and len(flying) < 2:
            local, target = waiting.pop()
            transfer = agent.make(Op.WRITE, state.local, local, state.remote, target)
            over = agent.start(transfer)
        else:
            transfer = flying.pop(0)
            over = agent.over(transfer)
        if over:
            agent.release(transfer)
        else:
            flying.append(transfer)
        if time.monotonic() > deadline:
            raise TimeoutError(f"a raw transfer is not over after {DEADLINE_S} s")


def _parts(runs: Runs) -> list[tuple[list[int], list[int], list[int]]]:
    return [
        (
            runs.local[at : at + MAX_CHUNK_DESCRIPTORS].tolist(),
            runs.remote[at : at + MAX_CHUNK_DESCRIPTORS].tolist(),
            runs.nbytes[at : at + MAX_CHUNK_DESCRIPTORS].tolist(),
        )
        for at in range(0, len(runs.nbytes), MAX_CHUNK_DESCRIPTORS)
    ]


def _mooncake(native: Any, session: str, parts: list[tuple[list[int], list[int], list[int]]]) -> None:  # noqa: ANN401
    """Merged ranges, as many at a time as Mooncake takes safely; waits in Mooncake, which spins."""
    for local, target, nbytes in parts:
        if native.batch_transfer_sync_write(session, local, target, nbytes) != 0:
            raise RuntimeError("Mooncake reports a failed batch")

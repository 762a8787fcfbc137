"""The bare transfer backend with the patterns that are known to be fast, to compare the connector with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pdpool_connector.backends.mooncake import MooncakeBackend
from pdpool_connector.backends.nixl import NixlBackend
from pdpool_connector.backends.polling import pause, sharpen_sleeps
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.pool import MAX_CHUNK_DESCRIPTORS, Runs

Pairs = list[tuple[NDArray[np.int32], NDArray[np.int32]]]
Ranges = tuple[list[int], list[int], list[int]]
"""Addresses here, addresses there, and lengths: at most `MAX_CHUNK_DESCRIPTORS`."""
DEADLINE_S = 60.0
SHORTEST_SLEEP_S = 15e-6
"""As the engine's."""


def measure(engine: Any, peer: str, pairs: Pairs, only: str = "") -> dict[str, float]:  # noqa: ANN401 - any engine's insides
    """Seconds that it takes to move every request of `pairs`, by pattern (or by `only` that one).

    Nothing else may use the peer meanwhile. What can be computed beforehand is: only the engine's own calls are timed.
    """
    if not isinstance(engine, NixlBackend | MooncakeBackend):
        raise TypeError(f"no raw pattern for engine {engine.name}")
    sharpen_sleeps()
    state: Any = engine._peers[peer]
    whole = [Chunk(local, target, aux=((0, 0),)) for local, target in pairs]
    cut = [chunk for local, target in pairs for chunk in state.plan.cut(local, target, (0, 0))]
    moves: dict[str, Callable[[], None]] = {}
    if isinstance(engine, NixlBackend):
        for name, chunks in (("whole requests", whole), ("chunks", cut)):
            moves[name] = partial(_nixl, engine, state, [state.plan.indices(chunk) for chunk in chunks])
    else:
        native = engine._session._native
        all_whole, all_cut = (
            [part for one in chunks for part in _parts(state.plan.runs(one))] for chunks in (whole, cut)
        )
        moves["whole requests, one by one"] = partial(_one_by_one, native, state.session, all_whole)
        moves["whole requests, two at once"] = partial(_two_at_once, native, state.session, all_whole)
        moves["chunks, two at once"] = partial(_two_at_once, native, state.session, all_cut)
    return {name: _timed(move) for name, move in moves.items() if only in ("", name)}


def _timed(move: Callable[[], None]) -> float:
    begun = time.monotonic()
    move()
    return time.monotonic() - begun


def _nixl(engine: NixlBackend, state: Any, items: list[tuple[NDArray[np.int32], NDArray[np.int32]]]) -> None:  # noqa: ANN401
    """Two handles at a time, polled without a pause."""
    agent = engine._agent
    flying: list[int] = []
    waiting = list(reversed(items))
    deadline = time.monotonic() + DEADLINE_S
    while waiting or flying:
        if waiting and len(flying) < 2:
            local, target = waiting.pop()
            transfer = agent.make(state.lists[0].local, local, state.lists[0].remote, target)
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


def _parts(runs: Runs) -> list[Ranges]:
    return [
        (
            runs.local[at : at + MAX_CHUNK_DESCRIPTORS].tolist(),
            runs.remote[at : at + MAX_CHUNK_DESCRIPTORS].tolist(),
            runs.nbytes[at : at + MAX_CHUNK_DESCRIPTORS].tolist(),
        )
        for at in range(0, len(runs.nbytes), MAX_CHUNK_DESCRIPTORS)
    ]


def _one_by_one(native: Any, session: str, parts: list[Ranges]) -> None:  # noqa: ANN401
    """Merged ranges, as many at a time as Mooncake takes safely; waits in Mooncake, which spins."""
    for local, target, nbytes in parts:
        if native.batch_transfer_sync_write(session, local, target, nbytes) != 0:
            raise RuntimeError("Mooncake reports a failed batch")


def _two_at_once(native: Any, session: str, parts: list[Ranges]) -> None:  # noqa: ANN401
    """The next batch starts while one is under way. No thread spins, which would take a core from the transfer threads.

    Mooncake answers for a batch of one range without waiting, so the last range of each goes as one.
    """
    flying: deque[tuple[int, int]] = deque()
    for local, target, nbytes in parts:
        if len(flying) == 2:
            _await(native, *flying.popleft())
        most = native.batch_transfer_async_write(session, local[:-1], target[:-1], nbytes[:-1]) if local[1:] else 0
        last = native.batch_transfer_async_write(session, local[-1:], target[-1:], nbytes[-1:])
        if not last or (local[1:] and not most):
            raise RuntimeError("Mooncake refuses a batch")
        flying.append((most, last))
    while flying:
        _await(native, *flying.popleft())


def _await(native: Any, most: int, last: int) -> None:  # noqa: ANN401
    begun = time.monotonic()
    while (status := native.transfer_check_status(last)) == 0:
        if (waited := time.monotonic() - begun) > DEADLINE_S:
            raise TimeoutError(f"a raw transfer is not over after {DEADLINE_S} s")
        time.sleep(pause(waited, SHORTEST_SLEEP_S))
    # Connections lag behind each other: what is left of the batch is waited for in Mooncake.
    if status != 1 or (most and native.get_batch_transfer_status([most]) != 0):
        raise RuntimeError("Mooncake reports a failed batch")

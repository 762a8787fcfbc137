"""Each data plane beside plain memory copy and beside the raw backend: `python -m proof.bench.dataplane`.

For every plane there is an initiator and a target process. A round measures all planes of a shape one after the other,
so that a busy moment hits all of them. The figures are medians over the rounds.

- backend: the request cut into chunks, checked, submitted and polled one after the other, as a peer's worker does.
- raw: NIXL with indices computed beforehand, one handle for the whole request, polled without a pause. Mooncake with
  ranges computed beforehand, in its largest synchronous batches, which spin inside Mooncake.

- memcpy: one numpy copy of as many contiguous bytes, in the initiator's process.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from pdpool_connector.backends import open_backend
from pdpool_connector.backends.base import Poll, TransferBackend
from pdpool_connector.backends.mooncake import MooncakeBackend
from pdpool_connector.backends.nixl import NixlBackend
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import KVMemory, RemoteMemory
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.pool import MAX_CHUNK_DESCRIPTORS

PLANES = {
    "local": ("local", {}),
    "nixl (shared memory)": ("nixl", {"UCX_NET_DEVICES": "lo"}),
    "nixl (tcp)": ("nixl", {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"}),
    "mooncake (tcp)": ("mooncake", {}),
}
ANSWER_TIMEOUT_S = 120.0
TRANSFER_TIMEOUT_S = 30.0
IDLE_S = 3.0


@dataclass(frozen=True)
class Shape:
    """A request: `pages` of `pool` pages, each `page_bytes` in every one of `regions` regions."""

    name: str
    regions: int
    page_bytes: int
    pages: int
    scattered: bool
    pool: int = 128

    def lists(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        if not self.scattered:
            return np.arange(self.pages, dtype=np.int32), np.arange(self.pages, dtype=np.int32)
        generator = np.random.default_rng(7)
        first, second = (generator.permutation(self.pool)[: self.pages].astype(np.int32) for _ in range(2))
        return first, second

    @property
    def nbytes(self) -> int:
        return self.regions * self.page_bytes * self.pages


SHAPES = (
    Shape("SmolLM2, 16 tokens", 60, 12288, 1, scattered=True),
    Shape("SmolLM2, 1024 tokens", 60, 12288, 64, scattered=True),
    Shape("32 x 16 KiB, 64 pages in a row", 32, 16384, 64, scattered=False),
    Shape("32 x 16 KiB, 64 pages scattered", 32, 16384, 64, scattered=True),
    Shape("32 x 64 KiB, 64 pages scattered", 32, 65536, 64, scattered=True),
)


def memory_of(shape: Shape, arena: HostArena) -> KVMemory:
    size = shape.page_bytes * shape.pool
    return KVMemory(
        kv=tuple(arena.region(index * size, shape.page_bytes, shape.pool) for index in range(shape.regions)),
        aux=(arena.region(shape.regions * size, 64, 16),),
        page_tokens=16,
        layers=shape.regions // 2,
        kv_heads=1,
        head_dim=1,
        dtype="float32",
        model=shape.name,
    )


class Side:
    """One process: (method, arguments) arrive over its pipe, the result goes back."""

    def __init__(self, plane: str, shape: Shape, *, target: bool) -> None:
        backend, env = PLANES[plane]
        os.environ.update(env)
        self.shape = shape
        self.arena = HostArena(shape.regions * shape.page_bytes * shape.pool + 1024)
        self.arena.array(0, self.arena.nbytes, np.uint8)[:] = 0 if target else 1
        self.backend: TransferBackend = open_backend(backend, f"{os.getpid():x}", target=target)
        self.memory = memory_of(shape, self.arena)
        self.remote = RemoteMemory(backend=backend, memory=self.memory, descriptor=self.backend.register(self.memory))

    def describe(self) -> tuple[str, RemoteMemory]:
        return f"{os.getpid():x}", self.remote

    def connect(self, peer: str, remote: RemoteMemory) -> None:
        self.peer, self.plan = peer, PairPlan(self.memory, remote.memory)
        self.backend.connect(peer, remote)

    def cpu(self) -> float:
        return time.process_time()

    def request(self) -> float:
        local, remote = self.shape.lists()
        start = time.perf_counter()
        for chunk in self.plan.cut(local, remote, (0, 0)):
            self._write(chunk)
        return time.perf_counter() - start

    def raw(self) -> float | None:
        if isinstance(self.backend, NixlBackend):
            return self._raw_nixl(self.backend)
        return self._raw_mooncake(self.backend) if isinstance(self.backend, MooncakeBackend) else None

    def _raw_mooncake(self, backend: MooncakeBackend) -> float:
        local, remote = self.shape.lists()
        columns = [column.tolist() for column in self.plan.runs(Chunk(local, remote, ((0, 0),)))]
        session, native = backend._peers[self.peer].session, backend._session._native
        start = time.perf_counter()
        for first in range(0, len(columns[0]), MAX_CHUNK_DESCRIPTORS):
            ranges = (column[first : first + MAX_CHUNK_DESCRIPTORS] for column in columns)
            if native.batch_transfer_sync_write(session, *ranges) != 0:
                raise RuntimeError("Mooncake reports a failed batch")
        return time.perf_counter() - start

    def _raw_nixl(self, backend: NixlBackend) -> float:
        agent, peer = backend._agent, backend._peers[self.peer]
        local, remote = self.shape.lists()
        local, remote = self.plan.indices(Chunk(local, remote, ((0, 0),)))
        start = time.perf_counter()
        lists = peer.lists[0]
        transfer = agent.make(lists.local, local, lists.remote, remote)
        over = agent.start(transfer)
        while not over:
            over = agent.over(transfer)
        agent.release(transfer)
        return time.perf_counter() - start

    def memcpy(self) -> float:
        source = self.arena.array(0, self.shape.nbytes, np.uint8)
        if not hasattr(self, "copy"):
            self.copy = np.zeros(self.shape.nbytes, np.uint8)
        start = time.perf_counter()
        np.copyto(self.copy, source)
        return time.perf_counter() - start

    def latencies(self, count: int) -> list[float]:
        nothing = np.empty(0, np.int32)
        return [self._write(Chunk(nothing, nothing, ((0, 0),))) for _ in range(count)]

    def _write(self, chunk: Chunk) -> float:
        start = time.perf_counter()
        handle = self.backend.submit(self.peer, chunk)
        while (outcome := self.backend.poll(handle)) is Poll.PENDING:
            if time.perf_counter() - start > TRANSFER_TIMEOUT_S:
                raise TimeoutError(f"a transfer is pending for {TRANSFER_TIMEOUT_S} s")
        if outcome is not Poll.DONE:
            raise RuntimeError(f"{outcome}: {handle.failure}")
        return time.perf_counter() - start


def serve(pipe: Connection, plane: str, shape: Shape, target: bool) -> None:
    side = Side(plane, shape, target=target)
    while (order := pipe.recv()) is not None:
        method, arguments = order
        pipe.send(getattr(side, method)(*arguments))
    side.backend.close()


class Worker:
    """A side in a process of its own: `serve` obeys orders from a pipe."""

    def __init__(self, stack: ExitStack, serve: Callable[..., None], *arguments: object) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        stack.callback(self.end)

    def call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - as many types as methods
        self.pipe.send((method, arguments))
        if not self.pipe.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"no answer to {method} within {ANSWER_TIMEOUT_S} s")
        return self.pipe.recv()

    def end(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(10)
        self.process.kill()


def rows(shape: Shape, rounds: int, small: bool, say: Callable[[str], None]) -> None:
    with ExitStack() as stack:
        pairs = {}
        for plane in PLANES:
            initiator, target = (Worker(stack, serve, plane, shape, is_target) for is_target in (False, True))
            initiator.call("connect", *target.call("describe"))
            pairs[plane] = (initiator, target)
        times: dict[tuple[str, str], list[float]] = {}
        for number in range(rounds + 1):
            for plane, (initiator, _) in pairs.items():
                for method in ("request", "raw", "memcpy"):
                    spent = initiator.call(method)
                    if number and spent is not None:  # the first round touches every page for the first time
                        times.setdefault((plane, method), []).append(spent)
        for plane, (initiator, target) in pairs.items():
            backend, copy = (statistics.median(times[plane, method]) for method in ("request", "memcpy"))
            raw = statistics.median(times.get((plane, "raw"), [float("nan")]))
            say(
                f"{shape.name:32} {plane:21} {backend * 1e3:9.3f} {shape.nbytes / backend / 1e9:7.2f} "
                f"{copy / backend:10.2f} {raw / backend:8.2f}"
            )
            if small:
                ordered = sorted(initiator.call("latencies", 2000))
                before = [worker.call("cpu") for worker in (initiator, target)]
                time.sleep(IDLE_S)
                idle = [worker.call("cpu") - old for worker, old in zip((initiator, target), before, strict=True)]
                half, tail = ordered[len(ordered) // 2] * 1e6, ordered[len(ordered) * 99 // 100] * 1e6
                say(
                    f"{'':32} {plane:21} one aux row p50 {half:.0f} us, p99 {tail:.0f} us;"
                    f" idle CPU initiator {idle[0] / IDLE_S:.2%}, target {idle[1] / IDLE_S:.2%}"
                )


@click.command()
@click.option("--rounds", default=9, show_default=True, help="Measured rounds for each shape.")
def main(rounds: int) -> None:
    """Print the throughput of each data plane for a few KV shapes, and its latency and idle CPU."""
    click.echo(f"{'request':32} {'plane':21} {'ms':>9} {'GB/s':>7} {'of memcpy':>10} {'of raw':>8}")
    for index, shape in enumerate(SHAPES):
        rows(shape, rounds, index == 0, click.echo)


if __name__ == "__main__":
    main()

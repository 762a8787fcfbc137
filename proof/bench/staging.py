"""Strips beside staging, where decode's tensor parallelism is twice prefill's: `python -m proof.bench.staging`.

An initiator with all heads writes a request of scattered pages to a target with half of them. It does so in turn as
strips and gathered through staging, so that a busy moment hits both. The figures are medians over the rounds. Both
include all that a peer's worker does: cut, check, gather, submit, poll, one chunk after the other.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection

import click
import numpy as np
from pdpool_connector.backends import open_backend
from pdpool_connector.backends.base import Poll, TransferBackend
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.memory import KVMemory, RemoteMemory
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.staging import Staging

from proof.bench.dataplane import PLANES, TRANSFER_TIMEOUT_S, Worker

REGIONS = 16
REQUEST_BYTES = 16 << 20
STRIPS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Shape:
    """`strip` bytes of each token go to the target, out of twice as many."""

    strip: int
    page_tokens: int

    @property
    def pages(self) -> int:
        return max(1, REQUEST_BYTES // (REGIONS * self.strip * self.page_tokens))

    @property
    def nbytes(self) -> int:
        return self.pages * REGIONS * self.strip * self.page_tokens


class Side:
    """One process; it gets its orders over a pipe."""

    def __init__(self, plane: str, shape: Shape, *, target: bool) -> None:
        backend, env = PLANES[plane]
        os.environ.update(env)
        heads, pool = (1 if target else 2), 2 * shape.pages
        size = shape.strip * heads * shape.page_tokens
        self.shape = shape
        self.arena = HostArena(REGIONS * size * pool + 1024)
        self.arena.array(0, self.arena.nbytes, np.uint8)[:] = not target
        self.backend: TransferBackend = open_backend(backend, f"{os.getpid():x}", target=target)
        self.staging = Staging(4)
        self.memory = KVMemory(
            kv=tuple(self.arena.region(index * size * pool, size, pool) for index in range(REGIONS)),
            aux=(self.arena.region(REGIONS * size * pool, 64, 16),),
            page_tokens=shape.page_tokens,
            layers=REGIONS // 2,
            kv_heads=heads,
            total_heads=2,
            head_dim=shape.strip,
            dtype="uint8",
            model="m",
        )
        descriptor = self.backend.register(self.memory, self.staging.region)
        self.remote = RemoteMemory(backend=backend, memory=self.memory, descriptor=descriptor)
        generator = np.random.default_rng(7)
        self.local, self.remote_pages = (generator.permutation(pool)[: shape.pages].astype(np.int32) for _ in range(2))

    def describe(self) -> tuple[str, RemoteMemory]:
        return f"{os.getpid():x}", self.remote

    def connect(self, peer: str, remote: RemoteMemory) -> None:
        self.peer, self.plan = peer, PairPlan(self.memory, remote.memory)
        self.backend.connect(peer, remote)

    def request(self, gather: bool) -> float:
        start = time.perf_counter()
        for chunk in self.plan.cut(self.local, self.remote_pages, (0, 0), gather=gather):
            slot = self.staging.reserve() if gather else None
            staged = chunk if slot is None else self.plan.stage(chunk, slot)
            handle = self.backend.submit(self.peer, staged)
            while (outcome := self.backend.poll(handle)) is Poll.PENDING:
                if time.perf_counter() - start > TRANSFER_TIMEOUT_S:
                    raise TimeoutError(f"a transfer is pending for {TRANSFER_TIMEOUT_S} s")
            if outcome is not Poll.DONE:
                raise RuntimeError(f"{outcome}: {handle.failure}")
            if slot is not None:
                slot.release()
        return time.perf_counter() - start


def serve(pipe: Connection, plane: str, shape: Shape, target: bool) -> None:
    side = Side(plane, shape, target=target)
    while (order := pipe.recv()) is not None:
        method, arguments = order
        pipe.send(getattr(side, method)(*arguments))
    side.backend.close()


def measure(plane: str, shape: Shape, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round: strips, staged."""
    with ExitStack() as stack:
        initiator, target = (Worker(stack, serve, plane, shape, is_target) for is_target in (False, True))
        initiator.call("connect", *target.call("describe"))
        times: tuple[list[float], list[float]] = [], []
        for number in range(rounds + 1):
            for gather in (False, True):
                spent = initiator.call("request", gather)
                if number:  # the first round touches every page for the first time
                    times[gather].append(spent)
    return times


@click.command()
@click.option("--rounds", default=9, show_default=True, help="Measured rounds for each row.")
@click.option("--plane", "planes", multiple=True, type=click.Choice(list(PLANES)), help="Default: all of them.")
@click.option("--page-tokens", default=(16, 64), show_default=True, multiple=True, help="Tokens of a page.")
def main(rounds: int, planes: tuple[str, ...], page_tokens: tuple[int, ...]) -> None:
    """Print how long a request takes as strips and staged, for strips of several sizes."""
    click.echo(
        f"{'plane':21} {'tokens':>6} {'strip':>6} {'strips ms':>10} {'staged ms':>10} {'GB/s':>12} {'faster':>7}"
    )
    for plane in planes or PLANES:
        for tokens in page_tokens:
            for strip in STRIPS:
                shape = Shape(strip, tokens)
                strips, staged = measure(plane, shape, rounds)
                slow, fast = statistics.median(strips), statistics.median(staged)
                ratios = sorted(one / two for one, two in zip(strips, staged, strict=True))
                click.echo(
                    f"{plane:21} {tokens:6} {strip:6} {slow * 1e3:10.2f} {fast * 1e3:10.2f} "
                    f"{shape.nbytes / slow / 1e9:5.2f} {shape.nbytes / fast / 1e9:6.2f} "
                    f"{statistics.median(ratios):7.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})"
                )


if __name__ == "__main__":
    main()

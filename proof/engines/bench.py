"""`bench`: pdpool beside SGLang's own NIXL backend, at its best settings and as it is shipped, in one run."""

import asyncio
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import click
import numpy as np

from proof.engines.client import ask, first_token, session, warmed
from proof.engines.launch import Backend, Launch
from proof.engines.play import Play, gather_limited, settled
from proof.engines.prompts import TOKEN_IDS, body_of
from proof.engines.record import Step
from proof.engines.servers import Pair
from proof.engines.storm import storm, storm_prompts

LENGTHS: Final = (18, 168, 1200)
SAMPLES: Final = {"tiny": 30, "smollm2": 10}
CONCURRENCIES: Final = {1: 40, 8: 120, 32: 160}
"""Requests in a block, by how many are under way."""
BLOCKS: Final = 3
RATE_TOKENS: Final = 168
RATE_NEW_TOKENS: Final = 16
IDLE_S: Final = 20.0
STORM: Final = 100
STORM_SEED: Final = 7000
KEPT_S: Final = 60.0
"""Longest wait for the pages of a killed prefill's requests."""

Figures = dict[str, Any]


def launches(backend: Backend, model: str) -> tuple[Launch, Launch]:
    """Return both sides, each with a core of its own."""
    return Launch("prefill", backend, model, core=0), Launch("decode", backend, model, core=1)


async def run(play: Play) -> None:
    """Measure both models, then the ratios."""
    await play.expected(list(storm_prompts(STORM_SEED).values()))
    play.end_unified()
    for model in SAMPLES:
        for backends in (("pdpool", "nixl"), ("nixl-shipped",)):
            await play.record.step(f"bench {model} {backends[-1]}", partial(_measure, play, model, backends))
    await play.record.step("bench ratios", partial(_ratios, play))


async def _measure(play: Play, model: str, backends: tuple[Backend, ...]) -> Step:
    """Measure pairs that are up at the same time, in turn."""
    play.end_pair()
    pairs = [play.stage.pair(*launches(backend, model)) for backend in backends]
    figures: dict[Backend, Figures] = {backend: {} for backend in backends}
    try:
        await _warm(pairs)
        await _ttft(pairs, model, figures)
        if model == "tiny":
            await _rates(pairs, figures)
            await _idle(pairs, figures)
            for pair in pairs:
                figures[pair.backend]["storm"] = await storm(play, pair, STORM, STORM_SEED)
                figures[pair.backend]["kill"] = await _kill(pair)
    finally:
        play.stage.end(*[server for pair in pairs for server in pair.servers])
    # A stock pair's faults are figures of the comparison, not ours.
    ours = figures.get("pdpool", {}).get("storm", {})
    return {"figures": figures} | {key: ours[key] for key in ("hung", "wrong", "leftovers") if key in ours}


def _body(length: int, new_tokens: int = 4) -> dict[str, Any]:
    return body_of(random.choices(TOKEN_IDS, k=length), new_tokens)


async def _warm(pairs: Sequence[Pair]) -> None:
    async with session() as client:
        for pair in pairs:
            for length in LENGTHS:
                reply = await warmed(client, pair, _body(length))
                if reply.tokens is None:
                    raise RuntimeError(f"{pair.backend} answered {reply.status}: {str(reply.body)[:500]}")


async def _ttft(pairs: Sequence[Pair], model: str, figures: dict[Backend, Figures]) -> None:
    async with session() as client:
        for length in LENGTHS:
            found: dict[Backend, list[float]] = {pair.backend: [] for pair in pairs}
            for number in range(SAMPLES[model]):
                for pair in pairs if number % 2 else reversed(pairs):
                    found[pair.backend].append(await first_token(client, pair, _body(length)))
            for backend, values in found.items():
                figures[backend][f"ttft {length}"] = values
                click.echo(f"  bench, {backend}, {model}, {length} tokens: TTFT {_spread(values, 1e3)} ms")


async def _rates(pairs: Sequence[Pair], figures: dict[Backend, Figures]) -> None:
    for concurrency, count in CONCURRENCIES.items():
        found: dict[Backend, list[float]] = {pair.backend: [] for pair in pairs}
        for number in range(BLOCKS):
            for pair in pairs if number % 2 else reversed(pairs):
                found[pair.backend].append(await _rate(pair, concurrency, count))
        for backend, values in found.items():
            figures[backend][f"rps {concurrency}"] = values
            click.echo(f"  bench, {backend}, {concurrency} at a time: {_spread(values)} requests/s")


async def _rate(pair: Pair, concurrency: int, count: int) -> float:
    async with session() as client:
        begun = time.perf_counter()
        jobs = [ask(client, pair, _body(RATE_TOKENS, RATE_NEW_TOKENS)) for _ in range(count)]
        replies = await gather_limited(jobs, concurrency)
        seconds = time.perf_counter() - begun
    if failed := [decode for _, decode in replies if decode.tokens is None]:
        raise RuntimeError(f"{pair.backend} answered {failed[0].status}: {str(failed[0].body)[:500]}")
    return count / seconds


async def _idle(pairs: Sequence[Pair], figures: dict[Backend, Figures]) -> None:
    for pair in pairs:
        await settled(pair.servers)
    before = [[server.cpu_s() for server in pair.servers] for pair in pairs]
    begun = time.monotonic()
    await asyncio.sleep(IDLE_S)
    seconds = time.monotonic() - begun
    for pair, old in zip(pairs, before, strict=True):
        now = [server.cpu_s() for server in pair.servers]
        used = [100 * (after - first) / seconds for after, first in zip(now, old, strict=True)]
        figures[pair.backend]["idle"] = used
        click.echo(f"  bench, {pair.backend}: idle CPU {', '.join(f'{value:.1f}' for value in used)} % of a core")


async def _kill(pair: Pair) -> Figures:
    """Kill prefill under load. Returns when decode's clients know, and when decode's pages are back."""
    async with session() as client:
        tasks = [asyncio.create_task(ask(client, pair, _body(1200, 48))) for _ in range(8)]
        await asyncio.sleep(0.3)
        pair.prefill.kill()
        at = time.monotonic()
        replies = [await task for task in tasks]
    errors = [decode.at - at for _, decode in replies if decode.tokens is None]
    left = await settled([pair.decode], KEPT_S)
    found = {"known_s": max(errors, default=0.0), "errors": len(errors), "released_s": time.monotonic() - at}
    click.echo(f"  bench, {pair.backend}, prefill killed: {found}, left over: {left or 'nothing'}")
    return found


async def _ratios(play: Play) -> Step:
    return ratios(figures_of(play.record.steps))


def figures_of(steps: Any) -> dict[str, dict[Backend, Figures]]:  # noqa: ANN401 - the record's JSON
    """Return all figures, by model and backend."""
    found: dict[str, dict[Backend, Figures]] = {}
    for name, step in steps.items():
        if name.startswith("bench ") and "figures" in step:
            found.setdefault(name.split()[1], {}).update(step["figures"])
    return found


def ratios(figures: dict[str, dict[Backend, Figures]]) -> Step:
    """Return ours divided by stock's at its best: geometric means of the ratios of medians, over all cases.

    `idle_cpu` is that of our busier side, in percent of a core.
    """

    def mean(kind: str) -> float:
        found = [
            math.log(ratio(by_backend, name))
            for by_backend in figures.values()
            for name in by_backend["pdpool"]
            if name.startswith(kind)
        ]
        return math.exp(statistics.fmean(found))

    return {
        "ttft_ratio": mean("ttft"),
        "rps_ratio": mean("rps"),
        "idle_cpu": max(figures["tiny"]["pdpool"]["idle"]),
    }


def ratio(by_backend: Mapping[Backend, Figures], name: str) -> float:
    """Return the median of ours divided by the median of stock at its best."""
    ours, stock = (float(statistics.median(by_backend[backend][name])) for backend in ("pdpool", "nixl"))
    return ours / stock


def _spread(values: Sequence[float], factor: float = 1.0) -> str:
    low, middle, high = np.percentile([value * factor for value in values], (10, 50, 90))
    return f"{middle:.4g} [{low:.4g} .. {high:.4g}]"

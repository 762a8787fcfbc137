"""The parts of a run. Each returns counts, which the last line adds up."""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import click

from proof.engines.play import gather_limited
from proof.vllm.proxy import HUNG, Reply, ask, complete, marked, prefilled, routed, session
from proof.vllm.servers import BLOCK_TOKENS, BLOCKS, USED, WAITING, Pair, Server, await_ready, router

TOKEN_IDS: Final = range(100, 49_000)
EDGES: Final = (1, 2, *(BLOCK_TOKENS * n + d for n in (1, 2, 4) for d in (-1, 0, 1)), 500, 1500)
"""Lengths of prompts around the ends of blocks, and over many."""
NEW_TOKENS: Final = 16
AT_ONCE: Final = 8
UNDER_WAY: Final = 8
LONG: Final = 1500
FULL: Final = BLOCKS // UNDER_WAY * BLOCK_TOKENS - 3 * NEW_TOKENS
"""`UNDER_WAY` prompts of this length, with their new tokens, leave no room for another in a cache."""
SETTLED_S: Final = 25.0
"""Requests that decode never gets are given up after 15 s."""
RELEASED_S: Final = 30.0
STOPPED_S: Final = 4.0
LATEST_S: Final = 0.15
SHOWN_S: Final = 3.0
"""A connector shows its counters as of a fraction of a second ago."""

NEARLY: Final = 0.95
"""Share of a cache that is used, where no prompt of `FULL` tokens has room."""

Prompt = tuple[int, ...]
Counts = Counter[str]


async def tokens(pair: Pair, count: int) -> Counts:
    """Ask prompts one after the other and at once; decode's tokens must be those of one server."""
    rng = random.Random(count)
    common = _prompt(rng, 4 * BLOCK_TOKENS)
    prompts = [_prompt(rng, length) for length in EDGES]
    prompts += [common + _prompt(rng, length) for length in (1, BLOCK_TOKENS, 300)] + [common] * 3
    prompts += [_prompt(rng, rng.randrange(1, 600)) for _ in range(count - len(prompts))]
    async with session() as client:
        expected = await _unified(client, pair.prefill, prompts)
        jobs = [ask(client, pair.prefill, pair.decode, prompt, NEW_TOKENS) for prompt in prompts]
        replies = await gather_limited(jobs[: count // 2], 1) + await gather_limited(jobs[count // 2 :], AT_ONCE)
    wrong = _differences(expected, replies)
    return await _ended(
        pair, f"tokens, prefill with {pair.prefill.tensor} ranks", wrong, asked=count, right=count - len(wrong)
    )


async def through_router(pair: Pair, folder: Path, count: int) -> Counts:
    """Ask through sglang-router, which asks both sides at once; decode's text must be that of one server."""
    rng = random.Random(count)
    words = ("apple", "river", "stone", "cloud", "seven", "green", "quiet", "north", "paper", "light")
    prompts = [" ".join(rng.choices(words, k=rng.randrange(1, 500))) for _ in range(count)]
    async with session() as client:
        jobs = [routed(client, pair.prefill.url, prompt, NEW_TOKENS) for prompt in prompts]
        expected = await gather_limited(jobs, AT_ONCE)
        with router(pair, folder) as url:
            before = await asyncio.to_thread(_moved, pair.decode)
            replies = await gather_limited([routed(client, url, one, NEW_TOKENS) for one in prompts], AT_ONCE)
            deadline = time.monotonic() + SHOWN_S
            while (moved := await asyncio.to_thread(_moved, pair.decode) - before) < count:
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.1)
    wrong = [
        f"{number}: {got.status} {got.text!r} {got.error}, must be {right.text!r}"
        for number, (right, got) in enumerate(zip(expected, replies, strict=True))
        if got.text != right.text or not right.text
    ]
    wrong += [f"only {moved} of {count} caches came from prefill"] if moved < count else []
    return await _ended(
        pair, "through sglang-router", wrong, asked=count, right=count - len(wrong), hung=_hung(replies)
    )


async def full(pair: Pair) -> Counts:
    """Fill prefill with requests that decode has not got, and decode with others: all must be answered."""
    rng = random.Random(BLOCKS)
    prompts = [_prompt(rng, FULL) for _ in range(2 * UNDER_WAY)]
    rooms = rng.sample(range(1, 1 << 62), len(prompts))
    async with session() as client:
        expected = await _unified(client, pair.prefill, prompts)

        def asked(server: Server, numbers: range) -> list[asyncio.Task[Reply]]:
            port = pair.prefill.bootstrap_port
            jobs = [marked(client, server, prompts[at], NEW_TOKENS, port, rooms[at]) for at in numbers]
            return [asyncio.create_task(job) for job in jobs]

        early, late = range(UNDER_WAY), range(UNDER_WAY, len(prompts))
        prefills, decodes = asked(pair.prefill, early), asked(pair.decode, late)
        for server in pair.servers:
            await _reached(server, lambda gauges: _all_wait(gauges) or gauges[USED] > NEARLY)
        prefills, decodes = prefills + asked(pair.prefill, late), asked(pair.decode, early) + decodes
        await asyncio.gather(*prefills)
        replies = await asyncio.gather(*decodes)
    wrong = _differences(expected, replies)
    right = len(prompts) - len(wrong)
    return await _ended(pair, "full caches", wrong, asked=len(prompts), right=right, hung=_hung(replies))


def _moved(decode: Server) -> int:
    return sum(int(state["outcomes"]["done"]) for state in decode.connectors())


async def aborts(pair: Pair, count: int) -> Counts:
    """Leave at random moments, or never ask decode; requests between them must be answered right."""
    rng = random.Random(count)
    prompts = [_prompt(rng, length) for length in (5, 33, 100, 400, 800, LONG)]
    async with session() as client:
        expected = await _unified(client, pair.prefill, prompts)
        whole = [rng.randrange(len(prompts)) for _ in range(count // 4)]
        jobs: list[Coroutine[Any, Any, Any]] = [
            _leave(client, pair, rng.choice(prompts), rng.uniform(-LATEST_S / 3, LATEST_S)) for _ in range(count)
        ]
        jobs += [ask(client, pair.prefill, pair.decode, prompts[at], NEW_TOKENS) for at in whole]
        order = rng.sample(range(len(jobs)), len(jobs))
        found = dict(zip(order, await gather_limited([jobs[at] for at in order], AT_ONCE), strict=True))
    replies = [found[count + at] for at in range(len(whole))]
    wrong = _differences([expected[at] for at in whole], replies)
    return await _ended(pair, "aborts", wrong, aborts=count, hung=_hung(replies))


async def _leave(client: aiohttp.ClientSession, pair: Pair, prompt: Prompt, after_s: float) -> None:
    """Ask, and close decode's connection after so long; never ask decode if that is negative."""
    first = await prefilled(client, pair.prefill, prompt)
    if after_s < 0:
        return
    task = asyncio.create_task(complete(client, pair.decode, prompt, NEW_TOKENS, first.params))
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.wait([task])


async def stopped(pair: Pair, number: int) -> Counts:
    """Stop prefill while it sends, and leave half of the requests: decode keeps their blocks until it is safe."""
    rng = random.Random(number)
    prompts = [_prompt(rng, LONG) for _ in range(UNDER_WAY)]
    async with session() as client:
        expected = await _unified(client, pair.prefill, prompts)
        firsts = await asyncio.gather(*(prefilled(client, pair.prefill, prompt) for prompt in prompts))
        pair.prefill.signal_engine(signal.SIGSTOP)
        try:
            tasks = [
                asyncio.create_task(complete(client, pair.decode, prompt, NEW_TOKENS, first.params))
                for prompt, first in zip(prompts, firsts, strict=True)
            ]
            used = (await _reached(pair.decode, _all_wait))[USED]
            for task in tasks[::2]:
                task.cancel()
            await asyncio.sleep(STOPPED_S)
            gauges = await asyncio.to_thread(pair.decode.gauges)
        finally:
            pair.prefill.signal_engine(signal.SIGCONT)
        replies = await asyncio.gather(*tasks[1::2])
    early = gauges[USED] < used
    lines = _differences(expected[1::2], replies)
    lines += [f"blocks were given back while prefill could write: {gauges}, {used} before"] if early else []
    return await _ended(
        pair, f"prefill stopped {number}", lines, faults=1, recovered=int(not lines), hung=_hung(replies)
    )


async def _reached(server: Server, state: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Wait for a state of the gauges, at most `SETTLED_S`; returns them."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        gauges = await asyncio.to_thread(server.gauges)
        if state(gauges) or time.monotonic() > deadline:
            return gauges
        await asyncio.sleep(0.05)


def _all_wait(gauges: dict[str, float]) -> bool:
    return gauges[WAITING] >= UNDER_WAY


async def killed(side: str, pair: Pair, number: int) -> Counts:
    """Kill a side under load: the other one ends what waits for it, has its blocks back, and serves its successor."""
    rng = random.Random(number)
    prompts = [_prompt(rng, LONG) for _ in range(UNDER_WAY)]
    victim, survivor = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
    async with session() as client:
        expected = await _unified(client, pair.prefill, prompts)
        tasks = [asyncio.create_task(ask(client, pair.prefill, pair.decode, p, 4 * NEW_TOKENS)) for p in prompts]
        await asyncio.sleep(rng.uniform(0.05, 0.4))
        victim.kill()
        at = time.monotonic()
        replies = await asyncio.gather(*tasks)
        known_s = time.monotonic() - at
        left = await _left([survivor], RELEASED_S)
        await asyncio.to_thread(_again, victim)
        again = await asyncio.gather(*(ask(client, pair.prefill, pair.decode, p, NEW_TOKENS) for p in prompts))
    answered = [(one[:NEW_TOKENS], reply) for one, reply in zip(expected, replies, strict=True) if reply.status == 200]
    lines = [f"answered wrong: {reply.tokens}" for one, reply in answered if reply.tokens[:NEW_TOKENS] != one]
    lines += _differences(expected, again)
    if left:
        lines.append(f"{RELEASED_S:.0f} s after the loss {survivor.side} has {left}")
    name = f"{side} killed {number}: {len(answered)} of {UNDER_WAY} answered, the others ended after {known_s:.1f} s"
    return await _ended(pair, name, lines, faults=1, recovered=int(not lines), hung=_hung(replies))


FAULTS: Final[tuple[Callable[[Pair, int], Coroutine[Any, Any, Counts]], ...]] = (
    stopped,
    partial(killed, "prefill"),
    partial(killed, "decode"),
)


def _again(server: Server) -> None:
    server.start()
    await_ready([server])


def _prompt(rng: random.Random, length: int) -> Prompt:
    return tuple(rng.choices(TOKEN_IDS, k=length))


async def _unified(client: aiohttp.ClientSession, server: Server, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """The tokens of one server that computes the whole request."""
    replies = await gather_limited([complete(client, server, one, NEW_TOKENS) for one in prompts], AT_ONCE)
    return [reply.tokens for reply in replies]


def _differences(expected: Sequence[tuple[int, ...]], replies: Sequence[Reply]) -> list[str]:
    return [
        f"{number}: {reply.status} {reply.tokens} {reply.error}, must be {right}"
        for number, (right, reply) in enumerate(zip(expected, replies, strict=True))
        if reply.tokens != right or not right
    ]


def _hung(replies: Sequence[Reply]) -> int:
    return sum(reply.status == HUNG for reply in replies)


async def _left(servers: Sequence[Server], seconds: float) -> dict[str, float]:
    """Wait until nothing is left, at most so long; returns what is."""
    deadline = time.monotonic() + seconds
    while True:
        found = [await asyncio.to_thread(server.left) for server in servers]
        left = {name: value for one in found for name, value in one.items()}
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.2)


async def _ended(pair: Pair, name: str, wrong: Sequence[str], **counts: int) -> Counts:
    """Wait until the servers are idle, print a line, and return the counts."""
    left = await _left(pair.servers, SETTLED_S)
    numbers = ", ".join(f"{key}={value}" for key, value in counts.items())
    click.echo(f"  {name}: {numbers}, wrong: {len(wrong)}, left over: {left or 'nothing'}")
    for line in wrong[:10]:
        click.echo(f"    {line}")
    return Counter({**counts, "wrong": len(wrong), "leftovers": len(left)})

"""`aborts`: requests that end at random moments by every way there is, among others that must be answered right."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import aiohttp
import click

from proof.engines.client import HUNG, Reply, paired, post, session
from proof.engines.play import Play, gather_limited, settled, show
from proof.engines.prompts import TOKEN_IDS, body_of, difference
from proof.engines.record import Step
from proof.engines.servers import Pair
from proof.engines.tokens import TP1

Act = Literal["none", "abort", "leave"]

WAYS: Final[dict[str, tuple[str, Act, str]]] = {
    "none": ("PD", "none", ""),
    "abort at prefill": ("PD", "abort", "P"),
    "abort at decode": ("PD", "abort", "D"),
    "abort at both": ("PD", "abort", "PD"),
    "leave prefill": ("PD", "leave", "P"),
    "leave decode": ("PD", "leave", "D"),
    "leave both": ("PD", "leave", "PD"),
    "prefill's half alone, abort": ("P", "abort", "P"),
    "decode's half alone, abort": ("D", "abort", "D"),
    "prefill's half alone, leave": ("P", "leave", "P"),
    "decode's half alone, leave": ("D", "leave", "D"),
}
"""Halves that are sent, what happens, and to which of them. To leave is to close the connection."""
WHOLE_SHARE: Final = 7
"""For so many aborted requests one is not aborted."""
LENGTHS: Final = (5, 18, 100, 168, 400, 800, 1200)
LATEST_S: Final = 0.2
AT_ONCE: Final = 12
ROUND: Final = 100
NEW_TOKENS: Final = 24


@dataclass(frozen=True)
class Case:
    """One request: its way (a key of `WAYS`), tokens of its prompt, and when it is aborted."""

    way: str
    length: int
    delay_s: float
    stream: bool


def schedule(aborts: int, seed: int) -> list[Case]:
    """Return `aborts` aborted requests, each way as often as another, and the whole ones between them."""
    rng = random.Random(seed)
    ways = [way for way in WAYS if way != "none"]
    chosen = [ways[n % len(ways)] for n in range(aborts)] + ["none"] * -(-aborts // WHOLE_SHARE)
    rng.shuffle(chosen)
    return [
        Case(way, rng.choice(LENGTHS), rng.uniform(0, LATEST_S), "leave" in way and rng.random() < 0.5)
        for way in chosen
    ]


def storm_prompts(seed: int) -> dict[int, dict[str, Any]]:
    """Return a request of each length: the unified server answers each once."""
    rng = random.Random(seed)
    return {length: body_of(rng.choices(TOKEN_IDS, k=length), NEW_TOKENS) for length in LENGTHS}


async def run(play: Play, aborts: int) -> None:
    """Abort `aborts` requests, in rounds of `ROUND`."""
    for number, first in enumerate(range(0, aborts, ROUND)):
        count = min(ROUND, aborts - first)
        await play.record.step(f"aborts {number}", partial(_round, play, count, number))


async def _round(play: Play, aborts: int, seed: int) -> Step:
    return await storm(play, play.begin(TP1.prefill, TP1.decode), aborts, seed)


async def storm(play: Play, pair: Pair, aborts: int, seed: int) -> Step:
    """Run one round on a pair.

    Returns:
        The counts. `hung`: clients without an answer within their time. `wrong`: answers that differ from the unified
        server's. `kept`: KV tokens in use right after the round. `leftovers`: counters that are not zero 5 s later.
    """
    cases = schedule(aborts, seed)
    prompts = storm_prompts(seed)
    expected = dict(zip(prompts, await play.expected(list(prompts.values())), strict=True))
    begun = time.monotonic()
    async with session() as client:
        played = [_play(client, pair, case, prompts[case.length], f"{seed}-{n}") for n, case in enumerate(cases)]
        replies: list[dict[str, Reply]] = await gather_limited(played, AT_ONCE)
    took = time.monotonic() - begun
    kept = sum(load["num_used_tokens"] for server in pair.servers for load in server.loads())
    left = await settled(pair.servers)
    hung = Counter(
        f"{case.way}, {side}" for case, found in zip(cases, replies, strict=True) for side, reply in found.items()
        if reply.status == HUNG
    )  # fmt: skip
    lines = [f"{case.way}, {case.length} tokens: {line}" for case, found in zip(cases, replies, strict=True)
             if (line := _wrong(case, found, expected[case.length]))]  # fmt: skip
    click.echo(
        f"  aborts, {pair.backend}: {aborts} aborted of {len(cases)} in {took:.1f} s, hung: {dict(hung) or 'none'}, "
        f"wrong: {len(lines)}, KV tokens in use at the end: {kept}, left over: {left or 'nothing'}"
    )
    show(lines)
    return {
        "aborts": aborts,
        "hung": hung.total(),
        "wrong": len(lines),
        "kept": kept,
        "leftovers": len(left),
        "seconds": took,
        "left": left,
        "different": lines,
    }


def _wrong(case: Case, replies: dict[str, Reply], expected: tuple[tuple[tuple[int, ...], str], ...]) -> str | None:
    """Return what is wrong with decode's answer: whole requests must have one, others may be complete by then."""
    reply = replies.get("D")
    if reply is None or case.stream or reply.status == HUNG:
        return None
    return difference(expected, reply) if case.way == "none" or reply.tokens is not None else None


async def _play(
    client: aiohttp.ClientSession, pair: Pair, case: Case, body: dict[str, Any], name: str
) -> dict[str, Reply]:
    """Send a case's halves, abort it; returns the replies of clients that have not left."""
    sent, act, sides = WAYS[case.way]
    servers = {"P": pair.prefill, "D": pair.decode}
    whole = {**paired(pair, body), "rid": f"{pair.room}-{name}", "stream": case.stream}
    tasks = {side: asyncio.create_task(post(client, servers[side], "/generate", whole)) for side in sent}
    if act != "none":
        await asyncio.sleep(case.delay_s)
    for side in sides:
        if act == "abort":
            await post(client, servers[side], "/abort_request", {"rid": whole["rid"]})
        else:
            tasks.pop(side).cancel()
    return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))

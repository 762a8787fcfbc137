"""`tokens`: greedy answers over the hand-off equal those of the unified server."""

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

import click

from proof.engines.client import Reply, ask, post, retractions_of, session
from proof.engines.launch import Launch
from proof.engines.play import AT_ONCE, Play, gather_limited, settled, show
from proof.engines.prompts import Prompt, body_of, identical, make
from proof.engines.record import Step
from proof.engines.servers import Pair

RETRACTED: Final = 4
"""Requests whose decode is interrupted; then their prompts are computed once more."""


@dataclass(frozen=True)
class Setup:
    """A topology with the features that it tries."""

    name: str
    prefill: Launch
    decode: Launch


TP1: Final = Setup("TP1", Launch("prefill", "pdpool", core=0), Launch("decode", "pdpool", core=1))
SETUPS: Final = (
    TP1,
    Setup(
        "TP2 prefill with two tokenizer workers, radix cache at decode",
        Launch("prefill", "pdpool", tensor=2, flags=("--tokenizer-worker-num", "2")),
        Launch("decode", "pdpool", flags=("--disaggregation-decode-enable-radix-cache",)),
    ),
    Setup(
        "DP2 prefill, forced retraction",
        Launch("prefill", "pdpool", data=2),
        Launch("decode", "pdpool", env=(("SGLANG_TEST_RETRACT", "1"),)),
    ),
)


async def run(play: Play, setups: tuple[Setup, ...], count: int) -> None:
    """Ask `count` prompts of each setup."""
    for seed, setup in enumerate(setups):
        await play.record.step(f"tokens {setup.name}", partial(_setup, play, setup, count, seed))


async def _setup(play: Play, setup: Setup, count: int, seed: int) -> Step:
    pair = play.begin(setup.prefill, setup.decode)
    prompts = make(count, seed)
    expected = await play.expected([prompt.body for prompt in prompts])
    begun = time.monotonic()
    # Half of them one after the other, the others eight at once.
    middle = count // 2
    replies = await _decoded(pair, prompts[:middle], 1) + await _decoded(pair, prompts[middle:], AT_ONCE)
    same, lines = identical(prompts, expected, replies)
    retraction = [Prompt("retracted", body_of([1000 * seed + n] * (30 + n), 200)) for n in range(RETRACTED)]
    right = await play.expected([prompt.body for prompt in retraction])
    computed_again = await _retracted(pair, retraction)
    more, other = identical(retraction, right, computed_again)
    retractions = sum(retractions_of(reply) for reply in [*replies, *computed_again])
    left = await settled(pair.servers)
    click.echo(
        f"  tokens, {setup.name}: {same + more} of {count + RETRACTED} identical in {time.monotonic() - begun:.1f} s, "
        f"{retractions} retractions, left over: {left or 'nothing'}"
    )
    show(lines + other)
    return {"identical": same + more, "asked": count + RETRACTED, "leftovers": len(left), "different": lines + other}


async def _decoded(pair: Pair, prompts: list[Prompt], at_once: int) -> list[Reply]:
    async with session() as client:
        pairs = await gather_limited([ask(client, pair, prompt.body) for prompt in prompts], at_once)
    return [decode for _, decode in pairs]


async def _retracted(pair: Pair, prompts: list[Prompt]) -> list[Reply]:
    """Answers of requests that decode gives up in the midst and computes again."""
    async with session() as client:
        tasks = [asyncio.create_task(ask(client, pair, prompt.body)) for prompt in prompts]
        await _running(pair, len(prompts))
        await post(client, pair.decode, "/pause_generation", {"mode": "retract"})
        await post(client, pair.decode, "/continue_generation", {})
        return [decode for _, decode in await asyncio.gather(*tasks)]


async def _running(pair: Pair, count: int, deadline_s: float = 10.0) -> None:
    """Wait until decode generates for `count` requests, or some have ended already."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if (await asyncio.to_thread(pair.decode.loads))[0]["num_running_reqs"] >= count:
            return
        await asyncio.sleep(0.02)

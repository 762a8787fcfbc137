"""`faults`: a side is lost, stops, or its control messages do; the other side serves on without a restart."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import click

from dev.packages import ensure_command
from dev.shell import Clock
from proof.engines.client import ANSWER_S, HUNG, Reply, ask, cancelled, post, session, warmed
from proof.engines.environment import EnginesError
from proof.engines.launch import Launch
from proof.engines.play import Play, settled, show
from proof.engines.prompts import TOKEN_IDS, body_of, difference
from proof.engines.record import Step
from proof.engines.servers import Pair, Server, restarted
from proof.engines.tokens import TP1

UNDER_WAY: Final = 8
LENGTH: Final = 1200
NEW_TOKENS: Final = 48
STOPPED_S: Final = 20.0
DROPPED_S: Final = 10.0
RELEASE_S: Final = 30.0
"""Longest wait until the survivor of a killed peer has all its pages back."""
KNOWN_S: Final = 2.0
"""Clients of the survivor know of a killed peer within this time."""
TP2_PREFILL: Final = Launch("prefill", "pdpool", tensor=2)
TP2_DECODE: Final = Launch("decode", "pdpool")
TOKEN_BYTES: Final = 1024
"""KV cache of a token of the tiny model: two layers, keys and values, two heads of 32, 4 bytes."""
AUX_BYTES: Final = 8192
"""More than what a hold has beside KV cache."""
NO_FAULT: Final = "none"
DROPPED: Final = "control messages dropped"
SMOKE: Final = ("prefill killed", "decode killed")

Replies = list[tuple[Reply, Reply]]


async def run(play: Play, times: int, names: tuple[str, ...]) -> None:
    """Try each fault `times` times, at random moments of a load, which is first played once without a fault."""
    calm = await play.record.step("faults none", partial(_one, play, NO_FAULT, 0, 0.0))
    if calm["wrong"] or calm["complete"] < UNDER_WAY:
        raise EnginesError("the load is not answered right without a fault; see the lines above")
    for name in names:
        if name == DROPPED:
            if os.geteuid() != 0:
                click.echo(f"  faults, {name}: not run, dropping packets needs root")
                continue
            ensure_command("iptables", Clock("engines"))
        for number in range(times):
            await play.record.step(f"faults {name} {number}", partial(_one, play, name, number, calm["load_s"]))


async def _one(play: Play, name: str, number: int, load_s: float) -> Step:
    """Play the load, with a fault at a random moment of the first half of its `load_s` seconds."""
    launches = (TP2_PREFILL, TP2_DECODE) if name == "one rank killed" else (TP1.prefill, TP1.decode)
    pair = play.begin(*launches)
    rng = random.Random(number)
    # All different: prefill computes each of them.
    bodies = [body_of(rng.choices(TOKEN_IDS, k=LENGTH), NEW_TOKENS) for _ in range(UNDER_WAY)]
    probe = body_of(rng.choices(TOKEN_IDS, k=60))
    right, *expected = await play.expected([probe, *bodies])
    async with session() as client:
        reply = await warmed(client, pair, probe)
    if problem := difference(right, reply):
        raise EnginesError(f"the pair does not answer before the fault: {problem}")
    async with _requests(pair, bodies) as tasks, _holds(pair) as seen:
        # In the second half prefill has sent nearly all, and its end would interrupt nothing.
        await asyncio.sleep(rng.uniform(0.0, load_s / 2))
        step = await (_no_fault if name == NO_FAULT else FAULTS[name])(play, pair, tasks)
    replies: Replies = [task.result() for task in tasks]
    async with session() as client:
        reply = await warmed(client, pair, probe)
    answers = [(tokens, decode) for tokens, (_, decode) in zip(expected, replies, strict=True) if decode.tokens]
    lines = [line for tokens, answer in [*answers, (right, reply)] if (line := difference(tokens, answer))]
    lines += seen.lines
    left = await settled(pair.servers)
    statuses = sorted({reply.status for both in replies for reply in both})
    recovered = not difference(right, reply) and step.get("known_s", 0.0) <= KNOWN_S
    click.echo(
        f"  faults, {name} {number}: {', '.join(f'{key}={value:.3g}' for key, value in step.items())} "
        f"statuses={statuses} complete={len(answers)} "
        f"holds={seen.peak} recovered={recovered} left over: {left or 'nothing'}"
    )
    show(lines)
    hung = sum(reply.status == HUNG for both in replies for reply in both)
    return {
        **step,
        "faults": int(name != NO_FAULT),
        "complete": len(answers),
        "holds": seen.peak,
        "recovered": int(recovered and name != NO_FAULT),
        "hung": hung,
        "wrong": len(lines),
        "leftovers": len(left),
        "left": left,
        "different": lines,
    }


@contextlib.asynccontextmanager
async def _requests(
    pair: Pair, bodies: list[dict[str, Any]]
) -> AsyncIterator[list["asyncio.Task[tuple[Reply, Reply]]"]]:
    """Send requests; all are answered, or have given up, when the block is left."""
    async with session() as client:
        rids = [f"{pair.room}-{number}" for number in range(len(bodies))]
        tasks = [
            asyncio.create_task(ask(client, pair, {**body, "rid": rid}), name=rid)
            for body, rid in zip(bodies, rids, strict=True)
        ]
        try:
            yield tasks
        finally:
            await asyncio.wait(tasks, timeout=2 * ANSWER_S)


@dataclass
class Holds:
    """What was seen of holds: how many at most, and where pages were given back in spite of them."""

    peak: int = 0
    lines: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def _holds(pair: Pair) -> AsyncIterator[Holds]:
    """Watch that each server keeps at least the KV tokens that its connector holds."""
    seen = Holds()
    # One task for each server: a stopped one does not answer.
    tasks = [asyncio.create_task(_watch(server, seen)) for server in pair.servers]
    try:
        yield seen
    finally:
        await cancelled(tasks)


async def _watch(server: Server, seen: Holds) -> None:
    suspect = False
    while True:
        with contextlib.suppress(OSError):
            used, holds, held = await asyncio.to_thread(_kept, server)
            seen.peak = max(seen.peak, holds)
            early = held_too_little(used, holds, held)
            # The counters are read one after the other: only what is so twice counts.
            if early and suspect:
                seen.lines.append(f"{server.launch.name}: {holds} holds of {held} bytes, {used} KV tokens in use")
            suspect = early
        await asyncio.sleep(0.2)


def _kept(server: Server) -> tuple[int, int, int]:
    used = sum(load["num_used_tokens"] for load in server.loads())
    states = server.connectors()
    # Ranks of tensor parallelism hold shares of the same tokens.
    return used, max(state["holds"] for state in states), sum(state["held_bytes"] for state in states)


def held_too_little(used_tokens: int, holds: int, held_bytes: int) -> bool:
    """Return whether SGLang keeps fewer tokens of the tiny model than the connector holds bytes for."""
    return held_bytes - holds * AUX_BYTES > used_tokens * TOKEN_BYTES


async def _killed(side: str, play: Play, pair: Pair, tasks: list["asyncio.Task[tuple[Reply, Reply]]"]) -> Step:
    server = getattr(pair, side)
    return await _lost(server.kill, side, play, pair, tasks)


async def _rank_killed(play: Play, pair: Pair, tasks: list["asyncio.Task[tuple[Reply, Reply]]"]) -> Step:
    victim = random.choice(pair.prefill.schedulers())
    return await _lost(lambda: os.kill(victim, signal.SIGKILL), "prefill", play, pair, tasks)


async def _lost(
    end: Callable[[], None], side: str, play: Play, pair: Pair, tasks: list["asyncio.Task[tuple[Reply, Reply]]"]
) -> Step:
    """End a side; measure when the survivor's clients know and its pages are back; start it again at its address."""
    end()
    at = time.monotonic()
    await asyncio.wait(tasks, timeout=2 * ANSWER_S)
    survivor = pair.decode if side == "prefill" else pair.prefill
    position = 1 if side == "prefill" else 0
    errors = [task.result()[position] for task in tasks if task.result()[position].tokens is None]
    known = max((reply.at - at for reply in errors), default=0.0)
    left = await settled([survivor], RELEASE_S)
    released = time.monotonic() - at
    if left:
        click.echo(f"    {released:.0f} s after the loss {survivor.launch.name} has {left}")
    getattr(pair, side).kill()
    begun = time.monotonic()
    await asyncio.to_thread(restarted, play.stage, pair, side)
    return {"interrupted": len(errors), "known_s": known, "released_s": released, "restart_s": time.monotonic() - begun}


async def _stopped(side: str, _play: Play, pair: Pair, tasks: list["asyncio.Task[tuple[Reply, Reply]]"]) -> Step:
    """Stop a side. The other side aborts half of the requests meanwhile, and keeps their pages until it is safe."""
    server, other = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
    server.signal_schedulers(signal.SIGSTOP)
    try:
        async with session() as client:
            for task in tasks[::2]:
                await post(client, other, "/abort_request", {"rid": task.get_name()})
        await asyncio.sleep(STOPPED_S)
    finally:
        server.signal_schedulers(signal.SIGCONT)
    at = time.monotonic()
    await asyncio.wait(tasks, timeout=2 * ANSWER_S)
    return {"answered_s": time.monotonic() - at}


async def _no_fault(_play: Play, _pair: Pair, tasks: list["asyncio.Task[tuple[Reply, Reply]]"]) -> Step:
    begun = time.monotonic()
    await asyncio.wait(tasks, timeout=2 * ANSWER_S)
    return {"load_s": time.monotonic() - begun}


async def _dropped(_play: Play, pair: Pair, tasks: list["asyncio.Task[tuple[Reply, Reply]]"]) -> Step:
    with blocked([s.ports.control + rank for s in pair.servers for rank in range(s.launch.ranks)]):
        await asyncio.sleep(DROPPED_S)
    at = time.monotonic()
    await asyncio.wait(tasks, timeout=2 * ANSWER_S)
    return {"answered_s": time.monotonic() - at}


FAULTS: Final[dict[str, Callable[[Play, Pair, list["asyncio.Task[tuple[Reply, Reply]]"]], Awaitable[Step]]]] = {
    "prefill stopped": partial(_stopped, "prefill"),
    "decode stopped": partial(_stopped, "decode"),
    DROPPED: _dropped,
    "prefill killed": partial(_killed, "prefill"),
    "decode killed": partial(_killed, "decode"),
    "one rank killed": _rank_killed,
}


@contextlib.contextmanager
def blocked(ports: list[int]) -> Iterator[None]:
    """Drop all packets from and to TCP ports on loopback."""
    rules = [
        ["INPUT", "-i", "lo", "-p", "tcp", direction, str(port), "-j", "DROP"]
        for port in ports
        for direction in ("--dport", "--sport")
    ]
    with contextlib.ExitStack() as stack:
        for rule in rules:
            subprocess.run(["iptables", "-w", "-I", *rule], check=True, capture_output=True)
            stack.callback(subprocess.run, ["iptables", "-w", "-D", *rule], check=True, capture_output=True)
        yield

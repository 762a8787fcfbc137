"""`faults`: a side is lost, stops, or its control messages do; the other side serves on without a restart."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import click

from proof.engines.client import ANSWER_S, HUNG, Reply, ask, session, warmed
from proof.engines.environment import EnginesError
from proof.engines.launch import Launch
from proof.engines.play import Play, settled, show
from proof.engines.prompts import TOKEN_IDS, body_of, difference
from proof.engines.record import Step
from proof.engines.servers import Pair, restarted
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
LATEST_S: Final = 0.8
TP2_PREFILL: Final = Launch("prefill", "pdpool", tensor=2)
TP2_DECODE: Final = Launch("decode", "pdpool")
SMOKE: Final = ("prefill killed", "decode killed")

Replies = list[tuple[Reply, Reply]]


async def run(play: Play, times: int, names: tuple[str, ...]) -> None:
    """Try each fault `times` times."""
    for name in names:
        if name == "control messages dropped" and (reason := no_firewall()):
            click.echo(f"  faults, {name}: not run, {reason}")
            continue
        for number in range(times):
            await play.record.step(f"faults {name} {number}", partial(_one, play, name, number))


async def _one(play: Play, name: str, number: int) -> Step:
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
    async with _requests(pair, bodies) as tasks, _proof(pair) as freed:
        await asyncio.sleep(rng.uniform(0.05, LATEST_S))
        step = await FAULTS[name](play, pair, tasks)
    replies: Replies = [task.result() for task in tasks]
    async with session() as client:
        reply = await warmed(client, pair, probe)
    answers = [(tokens, decode) for tokens, (_, decode) in zip(expected, replies, strict=True) if decode.tokens]
    lines = [line for tokens, answer in [*answers, (right, reply)] if (line := difference(tokens, answer))]
    left = await settled(pair.servers)
    statuses = sorted({reply.status for both in replies for reply in both})
    recovered = not difference(right, reply) and step.get("known_s", 0.0) <= KNOWN_S
    click.echo(
        f"  faults, {name} {number}: {', '.join(f'{key}={value:.3g}' for key, value in step.items())} "
        f"statuses={statuses} complete={len(answers)} recovered={recovered} left over: {left or 'nothing'}"
    )
    show([*lines, *freed])
    hung = sum(reply.status == HUNG for both in replies for reply in both)
    return {
        **step,
        "faults": 1,
        "recovered": int(recovered),
        "hung": hung,
        "wrong": len(lines) + len(freed),
        "leftovers": len(left),
        "left": left,
        "different": [*lines, *freed],
    }


@contextlib.asynccontextmanager
async def _requests(
    pair: Pair, bodies: list[dict[str, Any]]
) -> AsyncIterator[list["asyncio.Task[tuple[Reply, Reply]]"]]:
    """Send requests; all are answered, or have given up, when the block is left."""
    async with session() as client:
        tasks = [asyncio.create_task(ask(client, pair, body)) for body in bodies]
        try:
            yield tasks
        finally:
            await asyncio.wait(tasks, timeout=2 * ANSWER_S)


@contextlib.asynccontextmanager
async def _proof(pair: Pair) -> AsyncIterator[list[str]]:
    """Watch that no server gives back its last KV token while its connector has holds."""
    lines: list[str] = []

    async def watch() -> None:
        suspects: set[str] = set()
        while True:
            found = await asyncio.to_thread(_freed_early, pair)
            # The two counters are read one after the other: only what is so twice counts.
            lines.extend(sorted(found & suspects))
            suspects = found
            await asyncio.sleep(0.2)

    task = asyncio.create_task(watch())
    try:
        yield lines
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _freed_early(pair: Pair) -> set[str]:
    found = set()
    for server in pair.servers:
        with contextlib.suppress(OSError):
            used = sum(load["num_used_tokens"] for load in server.loads())
            holds = sum(state["holds"] for state in server.connectors())
            if holds and not used:
                found.add(f"{server.launch.name}: {holds} holds, and no KV token in use")
    return found


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
    server = getattr(pair, side)
    server.signal_schedulers(signal.SIGSTOP)
    try:
        await asyncio.sleep(STOPPED_S)
    finally:
        server.signal_schedulers(signal.SIGCONT)
    at = time.monotonic()
    await asyncio.wait(tasks, timeout=2 * ANSWER_S)
    return {"answered_s": time.monotonic() - at}


async def _dropped(_play: Play, pair: Pair, tasks: list["asyncio.Task[tuple[Reply, Reply]]"]) -> Step:
    with blocked([s.ports.control + rank for s in pair.servers for rank in range(s.launch.ranks)]):
        await asyncio.sleep(DROPPED_S)
    at = time.monotonic()
    await asyncio.wait(tasks, timeout=2 * ANSWER_S)
    return {"answered_s": time.monotonic() - at}


FAULTS: Final[dict[str, Callable[[Play, Pair, list["asyncio.Task[tuple[Reply, Reply]]"]], Awaitable[Step]]]] = {
    "prefill stopped": partial(_stopped, "prefill"),
    "decode stopped": partial(_stopped, "decode"),
    "control messages dropped": _dropped,
    "prefill killed": partial(_killed, "prefill"),
    "decode killed": partial(_killed, "decode"),
    "one rank killed": _rank_killed,
}


def no_firewall() -> str | None:
    """Return why packets cannot be dropped here; None where they can."""
    if os.geteuid() != 0:
        return "dropping packets needs root"
    return None if shutil.which("iptables") else "the program iptables is not installed"


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

"""What the parts of a run share: the servers that are up, the unified server's answers, and the record."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from proof.engines.client import Reply, Tokens, post, session
from proof.engines.environment import EnginesError
from proof.engines.launch import Launch
from proof.engines.record import Record
from proof.engines.servers import Pair, Server, Stage, all_idle

UNIFIED: Final = Launch("unified", "none")
AT_ONCE: Final = 8
SETTLED_S: Final = 5.0
"""After this time without work no queue, token or hold may be left."""


@dataclass
class Play:
    """One run."""

    stage: Stage
    record: Record
    pair: Pair | None = None
    unified: Server | None = None

    def begin(self, prefill: Launch, decode: Launch, *, unified: bool = True) -> Pair:
        """Return a running pair of these two; ends another one that is up. Starts the unified server beside it."""
        if self.pair and [server.launch for server in self.pair.servers if server.alive()] == [prefill, decode]:
            return self.pair
        self.end_pair()
        if unified and self.unified is None:
            self.pair, self.unified = self.stage.trio(prefill, decode, UNIFIED)
        else:
            self.pair = self.stage.pair(prefill, decode)
        return self.pair

    def end_pair(self) -> None:
        """End the pair that is up, if there is one."""
        if self.pair:
            self.stage.end(*self.pair.servers)
            self.pair = None

    def end_unified(self) -> None:
        """End the unified server, if it is up."""
        if self.unified:
            self.stage.end(self.unified)
            self.unified = None

    async def expected(self, bodies: Sequence[dict[str, Any]]) -> list[Tokens]:
        """Return the unified server's answers.

        Raises:
            EnginesError: it answered with an error.
        """
        keys = [hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:20] for body in bodies]
        missing = {key: body for key, body in zip(keys, bodies, strict=True) if key not in self.record.answers}
        if missing:
            if self.unified is None:
                (self.unified,) = self.stage.start(UNIFIED)
            replies = await gather_limited([_answer(self.unified, body) for body in missing.values()], AT_ONCE)
            for key, reply in zip(missing, replies, strict=True):
                if reply.tokens is None:
                    raise EnginesError(f"the unified server answered {reply.status}: {str(reply.body)[:500]}")
                self.record.answers[key] = reply.tokens
            self.record.save()
        # JSON gives lists.
        return [tuple((tuple(ids), why) for ids, why in self.record.answers[key]) for key in keys]


async def _answer(server: Server, body: dict[str, Any]) -> Reply:
    async with session() as client:
        return await post(client, server, "/generate", body)


async def gather_limited(jobs: Sequence[Any], limit: int) -> list[Any]:
    """Await coroutines, at most `limit` at a time; returns their results in order."""
    slots = asyncio.Semaphore(limit)

    async def one(job: Any) -> Any:  # noqa: ANN401 - any coroutine
        async with slots:
            return await job

    return list(await asyncio.gather(*[one(job) for job in jobs]))


async def settled(servers: Sequence[Server], seconds: float = SETTLED_S) -> dict[str, float]:
    """Wait until nothing is left, at most `seconds`; returns what is."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        left = await asyncio.to_thread(all_idle, servers)
        if not left or asyncio.get_running_loop().time() > deadline:
            return left
        await asyncio.sleep(0.1)


def show(lines: Sequence[str], most: int = 20) -> None:
    """Print lines, the first ones only where there are many."""
    for line in lines[:most]:
        click.echo(f"    {line}")
    if len(lines) > most:
        click.echo(f"    and {len(lines) - most} more")

"""`python -m pdpool_connector.agent drain`: ask the engine to drain, and wait until it has."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import click

POLL_S = 0.25

DRAINED, LATE, UNREACHABLE = 0, 1, 2


@click.group()
def main() -> None:
    """Helpers that run inside an engine's pod."""


@main.command()
@click.option(
    "--socket",
    "paths",
    type=click.Path(path_type=Path),
    required=True,
    multiple=True,
    help="A connector's admin socket. Repeat it for each rank with a socket of its own.",
)
@click.option("--deadline", "deadline_s", type=click.FloatRange(0, 86400), required=True, help="Seconds to wait.")
def drain(paths: tuple[Path, ...], deadline_s: float) -> None:
    """Have the engine take no new requests, and wait until queues and holds are at zero.

    Exit code 0: drained. 1: not within the deadline. 2: a connector does not answer. The others are waited for.
    """
    sys.exit(asyncio.run(_drain_all(paths, deadline_s)))


async def _drain_all(paths: tuple[Path, ...], deadline_s: float) -> int:
    named = len(paths) > 1
    return max(await asyncio.gather(*(_drain(path, deadline_s, f"{path.name}: " if named else "") for path in paths)))


async def _drain(path: Path, deadline_s: float, prefix: str) -> int:
    timeout = aiohttp.ClientTimeout(total=None)  # the deadline below bounds it
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path)), timeout=timeout) as session:
        try:
            async with asyncio.timeout(deadline_s):
                return await _watch(session, prefix)
        except TimeoutError:
            _say(f"{prefix}not drained within {deadline_s:g} s")
            return LATE
        except aiohttp.ClientError as error:
            _say(f"{prefix}the connector behind {path} does not answer: {error}")
            return UNREACHABLE


async def _watch(session: aiohttp.ClientSession, prefix: str) -> int:
    """Start the drain and print each change. The connector cannot call back, so it is polled."""
    shown = None
    state = await _ask(session, "POST")
    while True:
        line = _line(state)
        if line != shown:
            _say(prefix + line)
            shown = line
        if state["drained"]:
            return DRAINED
        await asyncio.sleep(POLL_S)
        state = await _ask(session, "GET")


async def _ask(session: aiohttp.ClientSession, method: str) -> dict[str, Any]:
    async with session.request(method, "http://connector/drain") as response:
        response.raise_for_status()
        state: dict[str, Any] = await response.json()
        return state


def _line(state: dict[str, Any]) -> str:
    if state["drained"]:
        return "drained"
    queues = " ".join(f"{name}={reqs}" for name, reqs in state["queues"].items() if reqs)
    return f"draining: running={state['running']} holds={state['holds']} {queues}".rstrip()


def _say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()

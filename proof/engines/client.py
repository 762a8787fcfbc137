"""Requests to one server, or to both halves of a pair."""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from proof.engines.servers import Pair, Server

ANSWER_S: Final = 60.0
"""After this time a client gives up: the request hangs."""
HUNG: Final = -1
LOST: Final = 0

Tokens = tuple[tuple[tuple[int, ...], str], ...]
"""Of each sample: its tokens and why it ended."""


@dataclass(frozen=True)
class Reply:
    """What a client got: an HTTP status, `LOST` where the connection ended, `HUNG` where no answer came in time.

    `at`: when, by `time.monotonic`.
    """

    status: int
    body: Any
    at: float

    @property
    def tokens(self) -> Tokens | None:
        """Complete samples of the answer; None for an error or an aborted request."""
        if self.status != 200:
            return None
        found = tokens_of(self.body)
        return None if any(reason not in ("length", "stop") for _, reason in found) else found


def tokens_of(body: Any) -> Tokens:  # noqa: ANN401 - JSON
    """Return the samples in an answer of `/generate`."""
    samples = body if isinstance(body, list) else [body]
    return tuple((tuple(one["output_ids"]), one["meta_info"]["finish_reason"]["type"]) for one in samples)


def retractions_of(reply: Reply) -> int:
    """Return how often decode has interrupted the samples of an answer; 0 for an error."""
    if reply.status != 200:
        return 0
    samples = reply.body if isinstance(reply.body, list) else [reply.body]
    return sum(one["meta_info"].get("num_retractions", 0) for one in samples)


def session() -> aiohttp.ClientSession:
    """Make a client without a limit of connections."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def post(
    client: aiohttp.ClientSession, server: Server, path: str, body: Mapping[str, Any], timeout_s: float = ANSWER_S
) -> Reply:
    """Send one request. Does not raise: a failure is a reply."""
    status, answer = LOST, None
    try:
        async with asyncio.timeout(timeout_s), client.post(server.url + path, json=body) as response:
            text = await response.text()
            status, answer = response.status, text
            if "json" in response.content_type:
                answer = await response.json()
    except TimeoutError:
        status = HUNG
    except (aiohttp.ClientError, ConnectionError) as error:
        answer = repr(error)
    return Reply(status, answer, time.monotonic())


def paired(pair: Pair, body: Mapping[str, Any]) -> dict[str, Any]:
    """Add what both halves of a request have in common."""
    count = len(body["input_ids"]) if body["input_ids"] and isinstance(body["input_ids"][0], list) else None
    first = pair.rooms(count or 1)
    address = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.prefill.ports.bootstrap}
    if count is None:
        return {**body, **address, "bootstrap_room": first}
    lists = {name: [value] * count for name, value in address.items()}
    return {**body, **lists, "bootstrap_room": list(range(first, first + count))}


async def ask(
    client: aiohttp.ClientSession, pair: Pair, body: Mapping[str, Any], timeout_s: float = ANSWER_S
) -> tuple[Reply, Reply]:
    """Send both halves. Returns the replies of prefill and of decode."""
    whole = paired(pair, body)
    prefill, decode = (post(client, server, "/generate", whole, timeout_s) for server in pair.servers)
    replies = await asyncio.gather(prefill, decode)
    return replies[0], replies[1]


async def first_token(client: aiohttp.ClientSession, pair: Pair, body: Mapping[str, Any]) -> float:
    """Return the seconds until decode's first token.

    Raises:
        RuntimeError: the answer was an error.
    """
    whole = paired(pair, {**body, "stream": True})
    begun = time.perf_counter()
    other = asyncio.create_task(post(client, pair.prefill, "/generate", whole))
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            client.post(pair.decode.url + "/generate", json=whole) as response,
        ):
            line = await response.content.readline()
            seconds = time.perf_counter() - begun
            if response.status != 200 or b'"output_ids"' not in line:
                raise RuntimeError(f"{pair.backend} answered {response.status}: {line[:500]!r}")
            await response.read()
    finally:
        await other
    return seconds


async def warmed(client: aiohttp.ClientSession, pair: Pair, body: Mapping[str, Any], deadline_s: float = 60.0) -> Reply:
    """Ask until the pair answers; returns the last reply of decode. Peers that have just started may have to meet."""
    deadline = time.monotonic() + deadline_s
    while True:
        _, decode = await ask(client, pair, body)
        if decode.tokens is not None or time.monotonic() > deadline:
            return decode
        await asyncio.sleep(0.5)


async def cancelled(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait for their ends."""
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

"""What a P/D proxy of vLLM does: prefill first, then decode with the parameters of prefill's answer."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import aiohttp

from proof.vllm.servers import Server

ANSWER_S: Final = 60.0
"""After this time a client gives up: the request hangs."""
HUNG: Final = -1
LOST: Final = 0


Params: TypeAlias = dict[str, Any] | None
"""Of a hand-off, as vLLM's API has them."""


@dataclass(frozen=True)
class Reply:
    """HTTP status, or `LOST` where the connection ended, or `HUNG`; and the tokens with their text, or the error."""

    status: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    error: str = ""
    params: Params = None


def session() -> aiohttp.ClientSession:
    """Make a client without a limit of connections."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def complete(
    client: aiohttp.ClientSession, server: Server, prompt: Sequence[int], new_tokens: int, params: Params = None
) -> Reply:
    """Ask one server for greedy tokens. Does not raise: a failure is a reply."""
    return await _post(client, server.url, list(prompt), new_tokens, {"kv_transfer_params": params})


async def routed(client: aiohttp.ClientSession, url: str, prompt: str, new_tokens: int) -> Reply:
    """Ask sglang-router, which asks both sides at once."""
    return await _post(client, url, prompt, new_tokens, {})


async def marked(
    client: aiohttp.ClientSession,
    server: Server,
    prompt: Sequence[int],
    new_tokens: int,
    bootstrap_port: int,
    room: int,
) -> Reply:
    """Ask one side, as sglang-router asks it."""
    marks = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port, "bootstrap_room": room}
    return await _post(client, server.url, list(prompt), new_tokens, marks)


async def _post(
    client: aiohttp.ClientSession, url: str, prompt: str | list[int], new_tokens: int, fields: dict[str, Any]
) -> Reply:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    body |= {"return_token_ids": True, **fields}
    try:
        async with asyncio.timeout(ANSWER_S), client.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json(content_type=None)
    except TimeoutError:
        return Reply(HUNG, error="no answer")
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        return Reply(LOST, error=repr(error))
    if response.status != 200:
        return Reply(response.status, error=str(answer)[:300])
    choice = answer["choices"][0]
    return Reply(200, tuple(choice["token_ids"] or ()), choice["text"], params=answer.get("kv_transfer_params"))


async def prefilled(client: aiohttp.ClientSession, server: Server, prompt: Sequence[int]) -> Reply:
    """Ask prefill to compute a prompt. The reply has the parameters for decode."""
    return await complete(client, server, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})


async def ask(
    client: aiohttp.ClientSession, prefill: Server, decode: Server, prompt: Sequence[int], new_tokens: int
) -> Reply:
    """Ask both sides, as a proxy does. The reply is decode's, or prefill's failure."""
    first = await prefilled(client, prefill, prompt)
    if first.status != 200:
        return first
    return await complete(client, decode, prompt, new_tokens, first.params)

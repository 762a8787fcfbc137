"""Real servers whose writer or target is stopped: no page is used again before it is safe."""

import asyncio
import time

import pytest

from tests.sglang.servers import pair, run

PROMPT, REQUESTS = 1100, 8
ANSWER_S = 3.0
"""A client gets its answer within this time, also while pages are held."""


@pytest.fixture(scope="module")
def servers(engines, tmp_path_factory):
    with pair(engines, tmp_path_factory.mktemp("sglang")) as started:
        yield started


async def is_empty(client):
    """Whether neither server uses a token, and neither connector holds one."""
    used = [await client.used(server) for server in (client.prefill, client.decode)]
    holds = [(await client.state(server))["holds"] for server in (client.prefill, client.decode)]
    return used == [(0, {})] * 2 and holds == [0, 0]


def test_stopped_writer_keeps_decodes_pages(servers):
    run(stop_writer, servers)


async def stop_writer(client):
    prompts = [client.prompt(tokens) for tokens in (300, 700, 1200, 900, 1150, 1000)]
    expected = [await client.tokens(prompt) for prompt in prompts]
    await client.until(lambda: is_empty(client))
    with client.prefill.stopped():
        rooms = range(100, 100 + REQUESTS)
        halves = [
            asyncio.create_task(client.ask(client.decode, client.prompt(PROMPT), room, f"left-{room}"))
            for room in rooms
        ]

        async def all_offered():
            return (await client.used(client.decode))[1] == {"decode_transfer_queue_reqs": REQUESTS}

        await client.until(all_offered)
        offered, _ = await client.used(client.decode)
        assert offered >= PROMPT * REQUESTS
        began = time.monotonic()
        await asyncio.gather(*(client.abort(client.decode, f"left-{room}") for room in rooms))
        answers = await asyncio.gather(*halves)
        assert time.monotonic() - began < ANSWER_S
        assert {status for status, _ in answers} == {503}

        later = [asyncio.create_task(client.tokens(prompt)) for prompt in prompts]

        async def is_held():
            return (await client.state(client.decode))["holds"] == REQUESTS

        await client.until(is_held)  # ten seconds after the end
        used, _ = await client.used(client.decode)
        assert used >= offered, "SGLang counts the pages as used"
        assert not any(request.done() for request in later)
    assert await asyncio.gather(*later) == expected
    await client.until(lambda: is_empty(client))


def test_stopped_target_keeps_prefills_pages(servers):
    run(stop_target, servers)


async def stop_target(client):
    prompt = client.prompt(600)
    expected = await client.tokens(prompt)
    await client.until(lambda: is_empty(client))
    requests = [(room, client.prompt(PROMPT)) for room in range(200, 200 + REQUESTS)]
    receiving = [asyncio.create_task(client.ask(client.decode, one, room)) for room, one in requests]

    async def all_offered():
        return (await client.state(client.prefill))["attempts"]["parked"]["reqs"] == REQUESTS

    await client.until(all_offered)
    with client.decode.stopped():
        sending = [asyncio.create_task(client.ask(client.prefill, one, room, f"gone-{room}")) for room, one in requests]

        async def is_sending():
            return (await client.used(client.prefill))[1].get("prefill_inflight_queue_reqs", 0) >= 2

        await client.until(is_sending)
        began = time.monotonic()
        await asyncio.gather(*(client.abort(client.prefill, f"gone-{room}") for room, _ in requests))
        await asyncio.gather(*sending)
        assert time.monotonic() - began < ANSWER_S

        async def has_no_request():
            return (await client.used(client.prefill))[1] == {}

        await client.until(has_no_request)  # SGLang publishes its numbers from time to time

        async def is_held():
            return (await client.state(client.prefill))["holds"] > 0

        await client.until(is_held)
        assert (await client.used(client.prefill))[0] >= PROMPT, "SGLang counts the pages as used"
        async with client.session.post(f"http://127.0.0.1:{client.prefill.port}/flush_cache") as response:
            assert response.status == 400
    answers = await asyncio.gather(*receiving)
    assert {status for status, _ in answers} == {502}
    await client.until(lambda: is_empty(client))
    assert await client.tokens(prompt) == expected

"""How the outputs of a request reach its handler."""

import asyncio

import pytest
from pdpool_connector.reference.openai_api import Result
from pdpool_connector.reference.request import Tokens
from pdpool_connector.reference.server_generate import GenerationError, _arriving


async def test_a_client_that_leaves_at_the_moment_of_a_token_ends_its_request_too():
    outputs = asyncio.Queue()

    async def handle():
        return [index async for index, _ in _arriving(outputs, [Result(1)])]

    handler = asyncio.create_task(handle())
    await asyncio.sleep(0)  # it waits for the first token
    outputs.put_nowait((0, Tokens((1,), "a")))
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(handler), 1.0)
    assert handler.cancelled()


async def test_a_request_without_a_token_is_ended_soon_after_its_deadline_also_by_an_engine_that_stands_still(
    monkeypatch,
):
    monkeypatch.setattr("pdpool_connector.reference.server_generate.DEFAULT_DEADLINE_S", 0.02)
    monkeypatch.setattr("pdpool_connector.reference.server_generate.OVERDUE_S", 0.01)
    with pytest.raises(GenerationError) as caught:
        async for _ in _arriving(asyncio.Queue(), [Result(1)]):
            pass
    assert (caught.value.failure.status, caught.value.failure.code) == (504, "engine_stalled")

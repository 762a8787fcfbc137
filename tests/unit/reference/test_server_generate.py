"""How a request reaches the scheduler by HTTP, and its outputs the handler."""

import asyncio
from types import SimpleNamespace

import aiohttp
import pytest
from pdpool_reference.http_edge import listen
from pdpool_reference.openai_api import Result
from pdpool_reference.request import DEFAULT_DEADLINE_S, Finish, Tokens
from pdpool_reference.server import Api
from pdpool_reference.server_generate import OVERDUE_S, STALL_S, GenerationError, _arriving


async def test_a_client_that_leaves_at_the_moment_of_a_token_ends_its_request_too():
    outputs = asyncio.Queue()

    async def handle():
        return [index async for index, _ in _arriving(outputs, [Result(1)])]

    handler = asyncio.create_task(handle())
    await asyncio.sleep(0)  # it waits for the first token
    outputs.put_nowait((0, Tokens((1,), "a")))
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(handler), 30.0)
    assert handler.cancelled()


async def test_a_request_without_a_token_is_ended_soon_after_its_deadline_also_by_an_engine_that_stands_still(
    monkeypatch,
):
    monkeypatch.setattr("pdpool_reference.server_generate.DEFAULT_DEADLINE_S", 0.02)
    monkeypatch.setattr("pdpool_reference.server_generate.OVERDUE_S", 0.01)
    with pytest.raises(GenerationError) as caught:
        async for _ in _arriving(asyncio.Queue(), [Result(1)]):
            pass
    assert (caught.value.failure.status, caught.value.failure.code) == (504, "engine_stalled")


@pytest.fixture
def waits(monkeypatch):
    """For how long a handler would wait for each output; what is not there does not come."""
    asked, timeout = [], asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda seconds: asked.append(seconds) or timeout(0))
    return asked


@pytest.mark.parametrize("first", [Tokens((1,), "a"), Tokens((1,), "a", Finish("length"))], ids=["runs", "has ended"])
async def test_a_sequence_waits_for_its_first_token_until_the_deadline_also_when_its_sibling(first, waits):
    outputs = asyncio.Queue()
    outputs.put_nowait((0, first))
    with pytest.raises(GenerationError, match=r"engine produced nothing for [23]\d\d s"):
        async for _ in _arriving(outputs, [Result(1), Result(1)]):
            pass
    assert waits == pytest.approx([DEFAULT_DEADLINE_S + OVERDUE_S] * 2, abs=60)


async def test_once_all_sequences_of_a_request_have_a_token_the_engine_stalls_after_a_shorter_silence(waits):
    outputs = asyncio.Queue()
    for index in range(2):
        outputs.put_nowait((index, Tokens((1,), "a")))
    with pytest.raises(GenerationError, match="engine produced nothing for 120 s"):
        async for _ in _arriving(outputs, [Result(1), Result(1)]):
            pass
    assert waits[-1] == STALL_S


class AnsweringScheduler:
    """Takes what it is given, and answers each sequence with one token at once."""

    mode = "decode"

    def __init__(self):
        self.taken = []

    def submit(self, sequences):
        self.taken += sequences
        for one in sequences:
            one.sink(Tokens((1,), "a", Finish("length")))

    def abort(self, sequences):
        assert sequences == []


@pytest.mark.parametrize("headers", [{"traceparent": "00-trace"}, {"TraceParent": "00-trace"}, {}])
async def test_the_traceparent_header_of_a_request_goes_with_each_of_its_hand_offs(headers):
    scheduler = AnsweringScheduler()
    engine = SimpleNamespace(
        scheduler=scheduler,
        config=SimpleNamespace(vocab=300),
        options=SimpleNamespace(mode="decode"),
        max_tokens=100,
        tokenizer=None,
        draining=False,
        announce=lambda _: None,
    )
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}
    body = {"input_ids": [1, 2], "sampling_params": {"n": 2, "max_new_tokens": 1}, **room}
    runners = []
    try:
        port = await listen(Api(engine).app(), "127.0.0.1", 0, runners)
        async with aiohttp.ClientSession() as client:
            answer = await client.post(f"http://127.0.0.1:{port}/generate", json=body, headers=headers)
            assert answer.status == 200, await answer.text()
    finally:
        for runner in runners:
            await runner.cleanup()
    expected = "00-trace" if headers else None
    assert [one.handoff.traceparent for one in scheduler.taken] == [expected, expected]

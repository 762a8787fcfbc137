"""How a request reaches the scheduler by HTTP, and its outputs the handler."""

import asyncio
from types import SimpleNamespace

import aiohttp
import pytest
from pdpool_connector import Cause
from pdpool_reference.http_edge import listen
from pdpool_reference.openai_api import Result
from pdpool_reference.request import (
    DEFAULT_DEADLINE_S,
    Finish,
    RequestError,
    SamplingParams,
    Tokens,
    TooLongError,
)
from pdpool_reference.request_body import Job
from pdpool_reference.request_handoffs import RequestHandoffs
from pdpool_reference.server import Api
from pdpool_reference.server_generate import OVERDUE_S, STALL_S, GenerationError, _arriving, check_length

from tests.unit.reference.scripted import ScriptedTransfer


async def test_client_that_leaves_at_a_token_is_noticed():
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


async def test_overdue_request_of_hung_engine_ends(
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
async def test_first_token_may_take_until_the_deadline(first, waits):
    outputs = asyncio.Queue()
    outputs.put_nowait((0, first))
    with pytest.raises(GenerationError, match=r"engine produced nothing for [23]\d\d s"):
        async for _ in _arriving(outputs, [Result(1), Result(1)]):
            pass
    assert waits == pytest.approx([DEFAULT_DEADLINE_S + OVERDUE_S] * 2, abs=60)


async def test_silence_after_first_tokens_is_a_stall(waits):
    outputs = asyncio.Queue()
    for index in range(2):
        outputs.put_nowait((index, Tokens((1,), "a")))
    with pytest.raises(GenerationError, match="engine produced nothing for 120 s"):
        async for _ in _arriving(outputs, [Result(1), Result(1)]):
            pass
    assert waits[-1] == STALL_S


class AnsweringScheduler:
    """Answers each sequence with one token at once."""

    mode = "decode"

    def __init__(self, error=None):
        self.error = error

    def submit(self, sequences):
        if self.error is not None:
            raise self.error
        for one in sequences:
            one.sink(Tokens((1,), "a", Finish("length")))

    def abort(self, sequences):
        assert sequences == []


class ScriptedDecodeConnector:
    """Records what is opened."""

    def __init__(self, wrong=None):
        self.opened, self.transfers, self.wrong = [], [], wrong

    def open(self, prefill, room, rid, *, prompt, deadline_s, traceparent=None):
        if self.wrong is not None and self.opened:
            raise ValueError(self.wrong)
        assert 0 < deadline_s <= DEFAULT_DEADLINE_S
        self.opened.append((prefill, room, rid, prompt, traceparent))
        self.transfers.append(ScriptedTransfer())
        return self.transfers[-1]


ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}
BODY = {"input_ids": [1, 2], "rid": "r", "sampling_params": {"n": 2, "max_new_tokens": 1}, **ROOM}


async def post(body, connector, scheduler=None, headers=None, draining=False, path="/generate"):
    """Status and error of one request to the HTTP side of a decode engine."""
    engine = SimpleNamespace(
        scheduler=scheduler or AnsweringScheduler(),
        config=SimpleNamespace(vocab=300),
        options=SimpleNamespace(mode="decode", served_model_name="tiny"),
        max_tokens=100,
        tokenizer=None,
        draining=draining,
        handoffs=RequestHandoffs(None, connector),
    )
    runners = []
    try:
        port = await listen(Api(engine).app(), "127.0.0.1", 0, runners)
        async with aiohttp.ClientSession() as client:
            answer = await client.post(f"http://127.0.0.1:{port}{path}", json=body, headers=headers)
            read = await answer.json()
            return answer.status, read["error"] if isinstance(read, dict) else None
    finally:
        for runner in runners:
            await runner.cleanup()


@pytest.mark.parametrize("headers", [{"traceparent": "00-trace"}, {"TraceParent": "00-trace"}, {}])
async def test_each_sequence_opens_with_the_traceparent_header(headers):
    connector = ScriptedDecodeConnector()
    assert (await post(BODY, connector, headers=headers))[0] == 200
    assert [one[:3] for one in connector.opened] == [("127.0.0.1:1", 7, "r")] * 2
    assert [one[4] for one in connector.opened] == ["00-trace" if headers else None] * 2
    assert all(len(one[3]) == 16 for one in connector.opened)


@pytest.mark.parametrize(
    ("fields", "options", "status", "cause"),
    [
        ({"sampling_params": {"temperature": "hot"}}, {}, 400, Cause.INVALID),
        ({"sampling_params": {"temperature": 9}}, {}, 400, Cause.INVALID),
        ({"sampling_params": {"regex": "a"}}, {}, 400, Cause.INVALID),
        ({"input_ids": [300]}, {}, 400, Cause.INVALID),
        ({"input_ids": [1] * 99}, {}, 200, None),
        ({"input_ids": [1] * 100}, {}, 400, Cause.TOO_LONG),
        ({}, {"draining": True}, 503, Cause.REFUSED),
        ({"prompt": [1], "model": "nope"}, {"path": "/v1/completions"}, 404, Cause.INVALID),
        ({"text": "a", "input_ids": None}, {}, 500, Cause.ABORTED),
    ],
    ids=str,
)
async def test_request_refused_before_open_refuses_its_half(fields, options, status, cause):
    connector = ScriptedDecodeConnector()
    answered, error = await post({**BODY, **fields}, connector, **options)
    assert answered == status
    if cause is None:
        return
    assert connector.opened == [("127.0.0.1:1", 7, "r", b"", None)], "without digest it matches any half of the room"
    ((message, sent),) = connector.transfers[0].aborts
    assert sent is cause
    assert message == (error["message"] if status != 500 else "the request ended before the engine had read it")


async def test_refused_body_without_room_opens_nothing():
    connector = ScriptedDecodeConnector()
    assert (await post({"text": 5}, connector))[0] == 400
    assert connector.opened == []


async def test_full_engine_refuses_every_opened_hand_off():
    connector = ScriptedDecodeConnector()
    full = AnsweringScheduler(RequestError("it is full", status=503, code="queue_full"))
    assert (await post(BODY, connector, full))[0] == 503
    assert [one.aborts for one in connector.transfers] == [[("it is full", Cause.REFUSED)]] * 2


async def test_open_that_raises_leaves_no_half_behind():
    connector = ScriptedDecodeConnector("room is -1, must be 0..9")
    status, error = await post(BODY, connector)
    assert (status, error["code"], error["message"]) == (400, "invalid_handoff", "room is -1, must be 0..9")
    assert connector.transfers[0].aborts == [("room is -1, must be 0..9", Cause.INVALID)]


def lengths(prompt, answer):
    sampling = SamplingParams(max_new_tokens=answer)
    return Job(["r"], [(1,) * prompt], [sampling], [None], samples=1, stream=False)


@pytest.mark.parametrize("mode", ["unified", "decode"])
def test_decode_refuses_what_its_cache_cannot_hold(mode):
    check_length(lengths(60, 4), 64, mode)
    with pytest.raises(TooLongError, match=f"are 65; this {mode} engine has room for 64 tokens") as caught:
        check_length(lengths(60, 5), 64, mode)
    assert caught.value.param == "max_tokens"


def test_prefill_refuses_only_prompts_it_cannot_hold():
    check_length(lengths(64, 1000), 64, "prefill")
    with pytest.raises(TooLongError, match="prompt: 65 tokens; this prefill engine has room for 64") as caught:
        check_length(lengths(65, 1), 64, "prefill")
    assert caught.value.param == "prompt"

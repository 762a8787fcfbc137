"""From a job to an HTTP answer, whole or as server-sent events. A client that leaves ends its sequences."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from aiohttp import web

from pdpool_reference.handoff import Transfers
from pdpool_reference.openai_api import Reply, Result, error_body
from pdpool_reference.request import (
    DEFAULT_DEADLINE_S,
    Failure,
    GenerationRequest,
    Output,
    RequestError,
    SamplingParams,
    Tokens,
    TooLongError,
)
from pdpool_reference.request_body import Job
from pdpool_reference.request_handoffs import abort_all, cause_of
from pdpool_reference.scheduler import Scheduler

OVERDUE_S = 5.0
"""The HTTP side ends a request without a token so long after its deadline. A scheduler that runs ends it earlier, and
knows the reason."""
STALL_S = 120.0
"""Once all sequences of a request have a token, so long a silence ends it: the engine stalls."""
WRITE_S = 60.0
"""Longest that a client may take to accept one event."""


STREAMING = "streaming"
"""Set on a request once the head of its answer has gone out."""

log = logging.getLogger(__name__)


class GenerationError(Exception):
    """A sequence failed; so does its HTTP request."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def check_length(job: Job, max_tokens: int, mode: str) -> None:
    """Refuse sequences that this engine can never hold. A prefill engine holds the prompt only.

    Args:
        job: the sequences.
        max_tokens: most tokens that one sequence may have here.
        mode: unified, prefill or decode.

    Raises:
        TooLongError: one is too long.
    """
    here = room_of(mode, max_tokens)
    for prompt, sampling in zip(job.prompts, job.sampling, strict=True):
        if len(prompt) > max_tokens:
            raise TooLongError(f"prompt: {len(prompt)} tokens; {here}", param="prompt")
        wanted = len(prompt) + sampling.max_new_tokens
        if mode != "prefill" and wanted > max_tokens:
            what = f"{len(prompt)} tokens of prompt and {sampling.max_new_tokens} new ones are {wanted}"
            raise TooLongError(f"max_tokens: {what}; {here}", param="max_tokens")


def room_of(mode: str, max_tokens: int) -> str:
    """Return the words that name an engine's limit in an error."""
    return f"this {mode} engine has room for {max_tokens} tokens (its --kv-pages, or the model's context)"


def check_rooms(job: Job, mode: str) -> None:
    """Refuse a request without a room if the engine hands off. Raises RequestError."""
    if mode != "unified" and None in job.handoffs:
        message = f"bootstrap_room: missing; a {mode} engine takes requests through the router, which adds it"
        raise RequestError(message, param="bootstrap_room", code="missing_room")


async def respond(
    request: web.Request, scheduler: Scheduler, job: Job, transfers: Transfers, reply: Reply
) -> web.StreamResponse:
    """Run a job whose hand-offs are open, and answer with its output.

    Raises:
        RequestError: the scheduler does not take the job.
        GenerationError: a sequence failed before the answer had begun.
    """
    outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
    sequences = _sequences(job, scheduler.mode, _sinks(outputs, len(job.prompts)), transfers)
    results = [Result(len(prompt)) for prompt in job.prompts]
    try:
        scheduler.submit(sequences)
    except RequestError as error:
        abort_all(transfers, error.message, cause_of(error))
        raise
    try:
        arriving = _arriving(outputs, results)
        if job.stream:
            return await _stream(request, arriving, reply, results)
        async for _ in arriving:
            pass
        return web.json_response(reply.whole(results))
    finally:
        scheduler.abort([sequences[i] for i, result in enumerate(results) if result.finish is None])


def _sinks(outputs: asyncio.Queue[tuple[int, Output]], count: int) -> list[Callable[[Output], None]]:
    loop = asyncio.get_running_loop()

    def put(index: int, output: Output) -> None:
        loop.call_soon_threadsafe(outputs.put_nowait, (index, output))

    return [partial(put, i) for i in range(count)]


def _sequences(
    job: Job, mode: str, sinks: list[Callable[[Output], None]], transfers: Transfers
) -> list[GenerationRequest]:
    deadline = time.monotonic() + DEFAULT_DEADLINE_S
    sampling = [_first_only(one) for one in job.sampling] if mode == "prefill" else job.sampling
    return [
        GenerationRequest(rid, prompt, params, sink, transfer, deadline)
        for rid, prompt, params, sink, transfer in zip(job.rids, job.prompts, sampling, sinks, transfers, strict=True)
    ]


def _first_only(params: SamplingParams) -> SamplingParams:
    """A prefill engine answers with one token and ends by length, as in SGLang."""
    return replace(params, max_new_tokens=1, stop=(), stop_token_ids=frozenset(), ignore_eos=True)


async def _arriving(
    outputs: asyncio.Queue[tuple[int, Output]], results: list[Result]
) -> AsyncIterator[tuple[int, Tokens]]:
    """Yield outputs and enter them into `results`, until all sequences have ended. Raises GenerationError."""
    left = len(results)
    deadline = time.monotonic() + DEFAULT_DEADLINE_S
    stall = 0.0
    while left:
        begun = all(result.ids or result.finish for result in results)
        patience = stall if begun else max(stall, deadline + OVERDUE_S - time.monotonic())
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with a token.
            async with asyncio.timeout(patience):
                index, output = await outputs.get()
        except TimeoutError:
            message = f"the engine produced nothing for {patience:.0f} s"
            raise GenerationError(Failure(504, "engine_stalled", message)) from None
        if isinstance(output, Failure):
            raise GenerationError(output)
        stall = STALL_S
        results[index].add(output)
        left -= output.finish is not None
        yield index, output


async def _stream(
    request: web.Request, arriving: AsyncIterator[tuple[int, Tokens]], reply: Reply, results: list[Result]
) -> web.StreamResponse:
    """Answer with server-sent events. Raises GenerationError while nothing has been sent."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        await _write_events(request, response, arriving, reply, results)
        await response.write_eof()
    except TimeoutError:
        log.warning("a client accepted nothing for %.0f s; its connection is cut", WRITE_S)
        if request.transport is not None:
            request.transport.abort()
    except ConnectionResetError:
        log.debug("a client has left its stream")
    return response


async def _write_events(
    request: web.Request,
    response: web.StreamResponse,
    arriving: AsyncIterator[tuple[int, Tokens]],
    reply: Reply,
    results: list[Result],
) -> None:
    """Send headers with the first token, so that an earlier failure has a status of its own.

    A later failure is an event without `[DONE]` after it: the stream must not look whole.
    """
    try:
        async for index, tokens in arriving:
            if not response.prepared:
                request[STREAMING] = True
                await response.prepare(request)
                await _send(response, *reply.opening())
            event = reply.delta(index, tokens, results[index])
            if event is not None:
                await _send(response, event)
    except GenerationError as error:
        if not response.prepared:
            raise
        failure = error.failure
        await _send(response, error_body(failure.message, status=failure.status, code=failure.code))
        return
    await _send(response, *reply.closing(results))
    await response.write(b"data: [DONE]\n\n")


async def _send(response: web.StreamResponse, *events: object) -> None:
    data = b"".join(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" for event in events)
    if data:
        async with asyncio.timeout(WRITE_S):
            await response.write(data)

"""From a job to an HTTP answer, whole or as server-sent events. The client's leaving ends its sequences."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from aiohttp import web

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
from pdpool_reference.scheduler import Scheduler

OVERDUE_S = 5.0
"""How much later than its deadline a request without a token is ended here: the scheduler, if it runs, knows why."""
STALL_S = 120.0
"""Longest silence between two tokens of a request, all of whose sequences have one, before its client is told that the
engine stalls."""
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


def check_length(job: Job, max_tokens: int) -> None:
    """Refuse sequences that can never fit. `max_tokens`: most tokens of prompt and answer. Raises TooLongError."""
    for prompt, sampling in zip(job.prompts, job.sampling, strict=True):
        if len(prompt) >= max_tokens:
            message = f"prompt: {len(prompt)} tokens; this engine has room for {max_tokens} with those of the answer"
            raise TooLongError(message, param="prompt")
        wanted = len(prompt) + sampling.max_new_tokens
        if wanted > max_tokens:
            message = (
                f"max_tokens: {len(prompt)} prompt tokens and {sampling.max_new_tokens} new ones are {wanted}; "
                f"this engine has room for {max_tokens} in one sequence"
            )
            raise TooLongError(message, param="max_tokens")


def check_rooms(job: Job, mode: str) -> None:
    """Refuse requests without a room where there must be one. Raises RequestError."""
    if mode != "unified" and None in job.handoffs:
        message = f"bootstrap_room: missing; a {mode} engine takes requests through the router, which adds it"
        raise RequestError(message, param="bootstrap_room", code="missing_room")


async def respond(request: web.Request, scheduler: Scheduler, job: Job, reply: Reply) -> web.StreamResponse:
    """Run a job and answer with it. Raises RequestError or GenerationError while nothing has been sent."""
    outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
    sinks = _sinks(outputs, len(job.prompts))
    sequences = _sequences(job, scheduler.mode, sinks, request.headers.get("traceparent"))
    results = [Result(len(prompt)) for prompt in job.prompts]
    scheduler.submit(sequences)
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
    job: Job, mode: str, sinks: list[Callable[[Output], None]], traceparent: str | None
) -> list[GenerationRequest]:
    deadline = time.monotonic() + DEFAULT_DEADLINE_S
    handoffs = [handoff and replace(handoff, traceparent=traceparent) for handoff in job.handoffs]
    sampling = [_first_only(one) for one in job.sampling] if mode == "prefill" else job.sampling
    return [
        GenerationRequest(rid, prompt, params, sink, handoff if mode != "unified" else None, deadline)
        for rid, prompt, params, sink, handoff in zip(job.rids, job.prompts, sampling, sinks, handoffs, strict=True)
    ]


def _first_only(params: SamplingParams) -> SamplingParams:
    """A prefill engine answers with one token that ends by length whatever it is, as SGLang's does."""
    return replace(params, max_new_tokens=1, stop=(), stop_token_ids=frozenset(), ignore_eos=True)


async def _arriving(
    outputs: asyncio.Queue[tuple[int, Output]], results: list[Result]
) -> AsyncIterator[tuple[int, Tokens]]:
    """The outputs as they come, entered into `results`, until all sequences have ended. Raises GenerationError."""
    left = len(results)
    deadline = time.monotonic() + DEFAULT_DEADLINE_S
    stall = 0.0
    while left:
        begun = all(result.ids or result.finish for result in results)
        patience = stall if begun else max(stall, deadline + OVERDUE_S - time.monotonic())
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation, a client's leaving, that comes with a token.
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
    """Headers go out with the first token, so that a failure before it still has a status of its own.

    A later one is an event, and no `[DONE]` follows it: the stream must not look whole.
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

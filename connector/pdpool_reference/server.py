"""The engine's HTTP interface: OpenAI's and SGLang's endpoints on one port."""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import generate_latest

from pdpool_reference.faults import apply_faults
from pdpool_reference.handoff import Transfers
from pdpool_reference.http_edge import error_response, read_body
from pdpool_reference.openai_api import (
    NO_MODEL,
    ChatBody,
    ChatReply,
    CompletionBody,
    CompletionReply,
    Event,
    chat_job,
    completion_job,
    model_object,
    new_request_id,
)
from pdpool_reference.request import RequestError, TooLongError
from pdpool_reference.request_body import MAX_BODY_BYTES, ROUTER_ADDS_BYTES, Job, decode_body
from pdpool_reference.scheduler_report import Report
from pdpool_reference.server_engine import Engine
from pdpool_reference.server_generate import check_length, check_rooms, respond, room_of
from pdpool_reference.sglang_api import AbortBody, GenerateBody, GenerateReply, generate_job
from pdpool_reference.tokenizer import TextTooLongError

LOADS_S = 2.0
"""The scheduler must answer /v1/loads within this time: old numbers would mislead."""

Answer = TypeVar("Answer")
Body = TypeVar("Body", ChatBody, CompletionBody, GenerateBody)


class Api:
    """The handlers. One method for each endpoint."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._created = int(time.time())

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES + ROUTER_ADDS_BYTES)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{model:.+}", self.model),
                web.get("/health", self.health),
                web.get("/health_generate", self.health),
                web.get("/ready", self.ready),
                web.get("/v1/loads", self.loads),
                web.get("/get_load", self.get_load),
                web.post("/abort_request", self.abort_request),
                web.route("*", "/flush_cache", self.flush_cache),
                web.get("/metrics", self.metrics),
                web.route("*", "/faults", self.faults),
                *(web.get(path, self.model_info) for path in ("/model_info", "/get_model_info")),
                *(web.get(path, self.server_info) for path in ("/server_info", "/get_server_info")),
            ]
        )
        return app

    # ------------------------------------------------------------------ generation

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        request_id = new_request_id()
        body, job, transfers = await self._open(request, CompletionBody, completion_job, request_id)
        reply = self._reply(CompletionReply, body, job, request_id)
        return await respond(request, self._engine.scheduler, job, transfers, reply)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        request_id = new_request_id()
        body, job, transfers = await self._open(request, ChatBody, chat_job, request_id)
        reply = self._reply(ChatReply, body, job, request_id)
        return await respond(request, self._engine.scheduler, job, transfers, reply)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """`POST /generate`."""
        body, job, transfers = await self._open(request, GenerateBody, generate_job, new_request_id())
        reply = GenerateReply(job.rids, batch=body.batch)
        return await respond(request, self._engine.scheduler, job, transfers, reply)

    async def _open(
        self, request: web.Request, shape: type[Body], make: Callable[..., Job], request_id: str
    ) -> tuple[Body, Job, Transfers]:
        """Read a request, check it and open its hand-offs; or refuse it, also to the other engine.

        Another thread makes the job: a long text would block every other request.

        Args:
            request: the request.
            shape: of its body.
            make: makes the job.
            request_id: for a body that names none.

        Raises:
            RequestError: the request is refused.
        """
        engine, raw = self._engine, await read_body(request)
        with engine.handoffs.refusing(raw):
            body = decode_body(raw, shape)
            self._check_model(body)
            if engine.draining:
                raise RequestError("the engine is draining; ask another one", status=503, code="draining")
            more = (engine.tokenizer, engine.config.vocab, request_id, engine.max_tokens)
            try:
                job = await asyncio.to_thread(make, body, *more)
            except TextTooLongError as error:
                here = room_of(engine.options.mode, engine.max_tokens)
                raise TooLongError(f"prompt: {error}; {here}", param="prompt") from None
            check_rooms(job, engine.options.mode)
            check_length(job, engine.max_tokens, engine.options.mode)
            return body, job, engine.handoffs.open(job, request.headers.get("traceparent"))

    def _check_model(self, body: ChatBody | CompletionBody | GenerateBody) -> None:
        """Refuse a request for another model. SGLang's `/generate` names none."""
        name = None if isinstance(body, GenerateBody) else body.model
        served = self._engine.options.served_model_name
        if name is not None and name not in (*NO_MODEL, served):
            raise _model_not_found(name, served)

    def _reply(
        self, kind: type[CompletionReply], body: ChatBody | CompletionBody, job: Job, request_id: str
    ) -> CompletionReply:
        return kind(
            request_id,
            self._engine.options.served_model_name,
            samples=job.samples,
            sequences=len(job.prompts),
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
        )

    # ------------------------------------------------------------------ state

    async def health(self, request: web.Request) -> web.Response:
        """`GET /health`: whether scheduler and connector live and requests are taken."""
        del request
        why = self._engine.unwell()
        return web.Response(status=200) if why is None else error_response(why, status=503, code="unwell")

    async def ready(self, request: web.Request) -> web.Response:
        """`GET /ready`: whether requests are taken."""
        return await self.health(request)

    async def loads(self, request: web.Request) -> web.Response:
        """`GET /v1/loads`, answered by the scheduler itself."""
        del request
        return web.json_response((await self._report()).loads())

    async def get_load(self, request: web.Request) -> web.Response:
        """`GET /get_load`, the older form that the router's load monitor reads."""
        del request
        report = await self._report()
        load = {"dp_rank": 0, "num_reqs": report.live, "num_waiting_reqs": report.waiting}
        return web.json_response([{**load, "num_tokens": report.used_tokens}])

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`."""
        del request
        return web.json_response({"object": "list", "data": [self._served_model()]})

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{model}`."""
        served, asked = self._served_model(), request.match_info["model"]
        if asked != served["id"]:
            raise _model_not_found(asked, served["id"])
        return web.json_response(served)

    def _served_model(self) -> Event:
        engine = self._engine
        return model_object(engine.options.served_model_name, self._created, engine.max_tokens)

    async def model_info(self, request: web.Request) -> web.Response:
        """`GET /model_info`."""
        del request
        options = self._engine.options
        info = {"model_path": options.model_path, "tokenizer_path": options.model_path, "is_generation": True}
        return web.json_response({**info, "served_model_name": options.served_model_name, "model_type": "llama"})

    async def server_info(self, request: web.Request) -> web.Response:
        """`GET /server_info`. Without the model path: the router would look it up at a public model hub."""
        del request
        engine, options = self._engine, self._engine.options
        info = {
            "served_model_name": options.served_model_name,
            "disaggregation_mode": "null" if options.mode == "unified" else options.mode,
            "disaggregation_transfer_backend": options.transfer_backend,
            "disaggregation_bootstrap_port": self.addresses().get("bootstrap_port"),
            "context_length": engine.config.max_context,
            "max_total_num_tokens": engine.scheduler.report.max_tokens,
            "page_size": 16,
            "tp_size": options.tp_size,
            "dp_size": 1,
            "pp_size": options.pp_size,
            "open_sequences": engine.scheduler.open_sequences,
            "status": "ready" if engine.unwell() is None else "unwell",
        }
        return web.json_response(info)

    def addresses(self) -> dict[str, Any]:
        """Return the hand-off addresses of this engine; empty in a unified engine."""
        connector = self._engine.connector
        if connector is None:
            return {}
        found: dict[str, Any] = {"control": connector.control_address, "admin": connector.admin_address}
        if bootstrap := getattr(connector, "bootstrap_address", None):
            found |= {"bootstrap": bootstrap, "bootstrap_port": int(bootstrap.rpartition(":")[2])}
        if self._engine.ranks is not None:
            found["ranks"] = {str(rank): where for rank, where in self._engine.ranks.addresses().items()}
        return found

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`."""
        del request
        return web.Response(body=generate_latest(self._engine.registry), content_type="text/plain", charset="utf-8")

    # ------------------------------------------------------------------ control

    async def abort_request(self, request: web.Request) -> web.Response:
        """`POST /abort_request`: ends the requests of exactly this rid, or all."""
        body = decode_body(await read_body(request), AbortBody)
        if not body.rid and not body.abort_all:
            raise RequestError("rid: missing; give the id of a request, or abort_all", param="rid")
        rid = None if body.abort_all else body.rid
        aborted = await self._ask(self._engine.scheduler.call(lambda core: core.abort_rid(rid, time.monotonic())))
        return web.json_response({"aborted": aborted})

    async def flush_cache(self, request: web.Request) -> web.Response:
        """`/flush_cache`: fails while requests use the cache, as in SGLang. An idle engine caches nothing."""
        del request
        report = await self._report()
        if report.live:
            message = f"the cache is not flushed: {report.live} requests use it"
            return error_response(message, status=400, code="busy")
        return web.json_response({"flushed": True})

    async def faults(self, request: web.Request) -> web.Response:
        """`POST /faults`, where the command line allows it."""
        if not self._engine.options.enable_faults:
            return error_response("faults are off: start the engine with --enable-faults", status=404, code="disabled")
        if request.method != "POST":
            raise web.HTTPMethodNotAllowed(request.method, ["POST"])
        engine = self._engine
        state = apply_faults(await read_body(request), engine.scheduler, engine.frame_faults, engine.ranks)
        return web.json_response(state)

    async def _report(self) -> Report:
        return await self._ask(self._engine.scheduler.loads())

    async def _ask(self, future: Future[Answer]) -> Answer:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), LOADS_S)
        except TimeoutError:
            message = f"the scheduler did not answer within {LOADS_S:.0f} s"
            raise RequestError(message, status=503, code="scheduler_silent") from None


def _model_not_found(asked: str, served: str) -> RequestError:
    message = f"model: {asked[:300]!r} is not served here, {served!r} is"
    return RequestError(message, param="model", status=404, code="model_not_found")


def ready_line(http: str, addresses: dict[str, Any]) -> str:
    """Return the line for stdout by which a parent process learns where this engine listens."""
    return json.dumps({"ready": True, "http": http, **addresses})

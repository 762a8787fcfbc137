"""What sglang-router and pdpool's operator expect of SGLang's HTTP server, for vLLM's.

Start vLLM with `--middleware pdpool_vllm.middleware.SGLangHttp`.

- sglang-router sends each request to prefill and decode at once, with three fields more: `bootstrap_host`,
  `bootstrap_port` and `bootstrap_room`. vLLM knows them as `kv_transfer_params`. Prefill computes one token.
- sglang-router reads the model's name from `/server_info`, and lists it in `/v1/models`.
- `/v1/loads` counts the requests that run and wait. They are vLLM's own gauges, as of its last step.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from pdpool_connector import Address
from prometheus_client import REGISTRY, CollectorRegistry
from starlette.exceptions import HTTPException

COMPLETIONS: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
LOADS: Final = "/v1/loads"
SERVER_INFO: Final = "/server_info"
GAUGES: Final = {"vllm:num_requests_running": "num_running_reqs", "vllm:num_requests_waiting": "num_waiting_reqs"}
MAX_BODY: Final = 256 << 20
"""Bytes of a request; prompts with images are long."""
LIMITS: Final = ("max_tokens", "max_completion_tokens")
ONLY_DECODE: Final = ("stream_options", "min_tokens")
"""vLLM refuses the first without a stream, and the second above `max_tokens`."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class SGLangHttp:
    """ASGI middleware. Other requests pass as they are."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        route = (scope["method"], scope["path"]) if scope["type"] == "http" else ("", "")
        if route == ("GET", LOADS):
            found = loads(REGISTRY)
            await _answer(send, 200 if found else 503, json.dumps({"loads": found}))
        elif route == ("GET", SERVER_INFO):
            # Without the model's path: the router would look for a tokenizer at a public model hub.
            name = scope["app"].state.vllm_config.model_config.served_model_name
            await _answer(send, 200, json.dumps({"served_model_name": name}))
        elif route[0] == "POST" and route[1] in COMPLETIONS:
            await self._complete(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _complete(self, scope: Message, receive: Receive, send: Send) -> None:
        kv_role = scope["app"].state.vllm_config.kv_transfer_config.kv_role
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        is_read = False

        async def receive_translated() -> Message:
            """Read the body only when vLLM does, so after vLLM has checked the API key."""
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            body = await _read(receive)
            if body is None:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": translated(body, is_prefill=kv_role == "kv_producer")}

        await self._app({**scope, "headers": headers}, receive_translated, send)


async def _read(receive: Receive) -> bytes | None:
    """Return the body. None if its client has left.

    Raises:
        HTTPException: It is too long. FastAPI answers with this one.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"the request has more than {MAX_BODY} bytes")
        if not message.get("more_body"):
            return bytes(body)


async def _answer(send: Send, status: int, text: str) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": text.encode()})


def loads(registry: CollectorRegistry) -> list[dict[str, int]]:
    """Return the requests that run and wait, for each data-parallel rank, as SGLang's `/v1/loads` has them.

    Empty where vLLM does not count them (`--disable-log-stats`).
    """
    found: dict[int, dict[str, int]] = {}
    for metric in registry.restricted_registry(GAUGES).collect():
        for sample in metric.samples:
            rank = int(sample.labels.get("engine") or 0)
            entry = found.setdefault(rank, {"dp_rank": rank, **dict.fromkeys(GAUGES.values(), 0)})
            entry[GAUGES[sample.name]] += int(sample.value)
    return [found[rank] for rank in sorted(found)]


def translated(body: bytes, *, is_prefill: bool) -> bytes:
    """Return the request as vLLM knows it. One that the router has not marked, or that is no JSON object, is unchanged.

    One hand-off serves one sequence. A request for several (`n`, or a list of prompts) is computed at decode.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(request, dict) or "bootstrap_room" not in request:
        return body
    host, port, room = (request.pop(f"bootstrap_{name}", None) for name in ("host", "port", "room"))
    handed_over = isinstance(host, str) and type(port) is int and type(room) is int
    if is_prefill:
        request = {name: value for name, value in request.items() if name not in ONLY_DECODE}
        request |= dict.fromkeys((name for name in LIMITS if name in request), 1)
        request |= {"max_tokens": 1, "stream": False, "n": 1}
    request["kv_transfer_params"] = None
    if handed_over:
        at_decode = {"remote_bootstrap": str(Address(str(host), port))}
        request["kv_transfer_params"] = {
            "do_remote_prefill": not is_prefill,
            "do_remote_decode": is_prefill,
            "remote_room": room,
            **({} if is_prefill else at_decode),
        }
    return json.dumps(request).encode()

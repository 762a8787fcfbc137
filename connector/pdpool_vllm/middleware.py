"""Requests of sglang-router, for vLLM's HTTP server: `--middleware pdpool_vllm.middleware.RouterRequests`.

sglang-router sends each request to prefill and decode at once, with three fields more: `bootstrap_host`,
`bootstrap_port` and `bootstrap_room`. vLLM knows them as `kv_transfer_params`. Prefill computes one token.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
MAX_BODY: Final = 256 << 20
"""Bytes of a request; prompts with images are long."""
LIMITS: Final = ("max_tokens", "max_completion_tokens")
ONLY_DECODE: Final = ("stream_options", "min_tokens", "response_format", "tool_choice")
"""What a request for one token cannot have, or what only decode's answer needs."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RouterRequests:
    """ASGI middleware. Requests without `bootstrap_room` pass as they are."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            await _refuse(send)
            return
        kv_role = scope["app"].state.vllm_config.kv_transfer_config.kv_role
        changed = translated(body, is_prefill=kv_role == "kv_producer")
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        length = (b"content-length", str(len(changed)).encode())
        first = True

        async def replay() -> Message:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": changed, "more_body": False}
            return await receive()

        await self._app({**scope, "headers": [*headers, length]}, replay, send)


async def _read(receive: Receive) -> bytes | None:
    """Return the body. None if it is too long, or its client has left."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            return None
        if not message.get("more_body"):
            return bytes(body)


async def _refuse(send: Send) -> None:
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": f"the request has more than {MAX_BODY} bytes".encode()})


def translated(body: bytes, *, is_prefill: bool) -> bytes:
    """Return the request as vLLM knows it. One that the router has not marked, or that is no JSON object, is unchanged.

    One hand-off serves one sequence. A request for several (`n`, or a list of prompts) is computed at decode.
    """
    try:
        request = json.loads(body)
    except ValueError:
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
        at_decode = {"remote_bootstrap": f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"}
        request["kv_transfer_params"] = {
            "do_remote_prefill": not is_prefill,
            "do_remote_decode": is_prefill,
            "remote_room": room,
            **({} if is_prefill else at_decode),
        }
    return json.dumps(request).encode()

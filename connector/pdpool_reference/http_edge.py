"""Between the socket and the handlers: reads bodies within bounds, and gives every error OpenAI's form."""

import asyncio
import logging

from aiohttp import web

from pdpool_reference.openai_api import error_body
from pdpool_reference.request import RequestError
from pdpool_reference.server_generate import STREAMING, GenerationError

BODY_S = 20.0
"""Longest that a body may take to arrive. The router is near, and sends a body when it has all of it."""
CLOSE_S = 5.0
"""Requests may take so long to end when the server stops. Their sequences have failed before. A client that reads
nothing delays the end by twice as long."""

log = logging.getLogger(__name__)


def error_response(message: str, *, status: int, code: str, param: str | None = None) -> web.Response:
    """An OpenAI-style error."""
    return web.json_response(error_body(message, status=status, code=code, param=param), status=status)


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises RequestError for one that is packed, broken, late or too long."""
    if (packed := request.headers.get("Content-Encoding", "").strip().lower()) not in ("", "identity"):
        message = f"Content-Encoding: {packed[:64]!r} is not read here; send the body as it is"
        raise RequestError(message, status=415, code="unsupported_content_encoding")
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        message = f"the body is incomplete: the rest did not come within {BODY_S:.0f} s"
        raise RequestError(message, status=408, code="request_timeout") from None
    except web.HTTPRequestEntityTooLarge:
        message = f"the body has more than {request.client_max_size} bytes, which is the limit"
        raise RequestError(message, status=413, code="request_entity_too_large") from None
    except web.RequestPayloadError as error:
        raise RequestError(f"the body is broken: {error}", code="invalid_body") from None


async def listen(
    app: web.Application, host: str, port: int, runners: list[web.BaseRunner], close_s: float = CLOSE_S
) -> int:
    """Serve `app`. Returns the port. Adds the runners to clean up, in that order, to `runners`. Raises OSError.

    `close_s`: see CLOSE_S.
    """
    inner = web.AppRunner(app)
    runners.append(inner)
    await inner.setup()
    assert inner.server is not None, "it has been set up"
    server = _Server(inner.server)
    outer = web.ServerRunner(server, shutdown_timeout=close_s)
    runners.insert(0, outer)
    await outer.setup()
    await web.TCPSite(outer, host, port).start()
    bound: int = outer.addresses[0][1]
    return bound


class _Server(web.Server):
    """Wraps an application's server: errors before and outside its handlers get the same form as all others."""

    def __init__(self, inner: web.Server) -> None:
        super().__init__(self._handle, request_factory=inner.request_factory, handler_cancellation=True)
        self._inner = inner

    def __call__(self) -> web.RequestHandler:
        # Bodies are not unpacked: few bytes may become very many. sglang-router does not unpack them either.
        nothing: logging.Logger = None  # type: ignore[assignment] # the value that `AppRunner` takes for none
        return _Connection(self, loop=asyncio.get_running_loop(), access_log=nothing, auto_decompress=False)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer errors. None of the answers carries a prompt."""
        try:
            return await self._inner.request_handler(request)
        except RequestError as error:
            return error_response(error.message, status=error.status, code=error.code, param=error.param)
        except GenerationError as error:
            failure = error.failure
            return error_response(failure.message, status=failure.status, code=failure.code)
        except web.HTTPException as error:
            message = f"{request.method} {request.path}: {error.reason}"
            return error_response(message, status=error.status, code=error.reason.lower().replace(" ", "_"))
        except Exception:
            if request.get(STREAMING):
                raise
            log.exception("%s %s failed", request.method, request.path)
            return error_response("the engine failed to handle the request", status=500, code="internal_error")


class _Connection(web.RequestHandler):
    """One connection of a client."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See `RequestHandler`: for bytes that are not HTTP, and for handlers that raise in mid-answer."""
        super().handle_error(request, status, exc, message)
        words = (message or "the engine failed to handle the request").partition("\n")[0].rstrip(":")
        response = error_response(words, status=status, code="invalid_http" if status < 500 else "internal_error")
        response.force_close()
        return response

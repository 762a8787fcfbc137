"""Sends one request to the API server: a deadline, bounded reads, and an error of a known type. Nothing is repeated.

It uses `kubernetes.aio` for credentials, certificates and token rotation.
"""

import asyncio
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config as kubeconfig
from kubernetes.aio.client import ApiClient, Configuration

from .api_answers import error_of, object_of
from .api_errors import UnavailableError
from .resources import Object, Resource

LINE_LIMIT = 16 << 20
"""Bytes of one event of a watch. The API server stores objects of at most 1.5 MiB."""
PART_BYTES = 1 << 16
ERROR_BYTES = 1 << 20
"""Limit of an error's body: behind the proxy, it is a pod's own."""
METHODS = {"create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}
"""HTTP methods by verb. All other verbs are GET."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the API."""

    verb: str
    resource: Resource
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    accept: str = "application/json"
    patch_type: str = ""
    """Content type of a patch."""

    @property
    def what(self) -> str:
        """The call in error messages."""
        return f"{self.verb} {self.path}"


class ApiTransport:
    """Sends requests.

    Args:
        client: Has the connections and the credentials.
        timeout_s: Deadline of each call, in seconds. Of a watch, until it is accepted.
        on_call: Called for every call with verb, plural, and HTTP status (0 if there was none).
        user_agent: Name of this program in the API server's audit log.
    """

    def __init__(
        self, client: ApiClient, timeout_s: float, on_call: Callable[[str, str, int], None], user_agent: str
    ) -> None:
        self._client: Any = client  # its methods have no annotations
        self._timeout_s = timeout_s
        self._on_call = on_call
        self.user_agent = user_agent

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def call(self, request: Request, budget_s: float = math.inf) -> Object:
        """Return the object in the answer, which must come within `budget_s` if that is less than the deadline."""
        return object_of(await self.send(request, budget_s), request.what)

    async def send(self, request: Request, budget_s: float = math.inf, take: Callable[[bytes], bytes] = bytes) -> bytes:
        """Return what `take` keeps of each part of the answer. It may raise, which ends the call."""
        timeout_s = min(self._timeout_s, budget_s)
        status = 0
        try:
            answer = await self._request(request, aiohttp.ClientTimeout(total=timeout_s))
            data = await (_body(answer, take) if 200 <= answer.status < 300 else _body(answer, limit=ERROR_BYTES))
            status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"no answer within {timeout_s:.1f} s" if isinstance(error, TimeoutError) else str(error)
            raise UnavailableError(0, type(error).__name__, reason, request.what) from error
        finally:
            self._on_call(request.verb, request.resource.plural, status)
        if not 200 <= status < 300:
            raise error_of(status, data, request.what)
        return data

    async def stream(
        self, request: Request, seconds: float, silent_s: float, opened: Callable[[], None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of an answer as they come. `opened` is called when the API server has accepted the request.

        Raises:
            UnavailableError: the connection broke, or nothing came for `silent_s`.
        """
        status = 0
        timeout = aiohttp.ClientTimeout(total=seconds + silent_s, sock_read=silent_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._request(request, timeout)
            async with answer:
                status = answer.status
                if status != 200:
                    raise error_of(status, await answer.read(), request.what)
                opened()
                async for line in _lines(answer.content, request.what):
                    yield line
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            message = str(error) or "no answer in time"
            raise UnavailableError(0, type(error).__name__, message, request.what) from error
        finally:
            self._on_call(request.verb, request.resource.plural, status)

    async def _request(self, request: Request, within: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        method = METHODS.get(request.verb, "GET")
        headers = {
            "Accept": request.accept,
            "Content-Type": request.patch_type if method == "PATCH" else "application/json",
            "User-Agent": self.user_agent,
        }
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], request.path, method, request.body)
        query = f"?{urlencode(request.query)}" if request.query else ""
        url = self._client.configuration.host + request.path + query
        answer = await self._client.rest_client.request(
            method, url, headers=headers, body=request.body, _request_timeout=within
        )
        response: aiohttp.ClientResponse = answer.response
        return response


async def _body(
    answer: aiohttp.ClientResponse, take: Callable[[bytes], bytes] = bytes, limit: int | None = None
) -> bytes:
    """Return what `take` keeps of a body, at most `limit` bytes."""
    kept = bytearray()
    async with answer:  # closes the connection if not all was read
        async for part in answer.content.iter_chunked(PART_BYTES):
            kept += take(part)
            if limit is not None and len(kept) > limit:
                break
    return bytes(kept[:limit])


async def _lines(content: aiohttp.StreamReader, what: str) -> AsyncIterator[bytes]:
    """Yield complete lines. The last one may lack its end; a half one is no JSON."""
    buffer = bytearray()
    async for chunk in content.iter_any():
        buffer += chunk
        *lines, rest = bytes(buffer).split(b"\n") if b"\n" in chunk else [bytes(buffer)]
        if len(rest) > LINE_LIMIT:
            raise UnavailableError(0, "TooLong", f"an event has more than {LINE_LIMIT} bytes", what)
        for line in lines:
            if line.strip():
                yield line
        buffer = bytearray(rest)
    if buffer.strip():
        yield bytes(buffer)


async def connect(config_file: str | None = None, context: str | None = None) -> ApiClient:
    """Return a client: by the service account in a pod, by KUBECONFIG (or ~/.kube/config) elsewhere.

    A file or context that is named is used everywhere.
    """
    configuration = Configuration()
    configuration.connection_pool_maxsize = 0  # no limit: each watch keeps a connection
    chosen = config_file or context or os.environ.get("KUBECONFIG")
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not chosen:
        kubeconfig.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
    else:
        await kubeconfig.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=config_file, context=context, client_configuration=configuration
        )
    return ApiClient(configuration)

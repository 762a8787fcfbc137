"""One bounded HTTP request to a pod.

Answers of pods are not trusted. No redirect is followed, no proxy is used, nothing is decompressed, and a body is read
up to a limit. Every failure becomes an `Unanswered` with a short reason, because every failure means unknown.
"""

import errno
from collections.abc import Callable
from typing import Any

import aiohttp
from pydantic import ValidationError

BODY_LIMIT = 1 << 20
"""Limit in bytes. A longer answer counts as no answer."""
CHUNK = 1 << 16
TIMED_OUT = "timeout"
REFUSED = "refused"
UNREACHABLE = "unreachable"


class ByteBudget:
    """Bytes that several answers may have together, each at most `per_answer`."""

    def __init__(self, total: int, per_answer: int) -> None:
        self.left = total
        self.per_answer = per_answer

    def spend(self, received: int, of_this_answer: int) -> None:
        """Count `received` bytes of an answer that now has `of_this_answer`; raises Unanswered beyond a limit."""
        self.left -= received
        if of_this_answer > self.per_answer:
            raise Unanswered(f"invalid: more than {self.per_answer} bytes")
        if self.left < 0:
            raise Unanswered("invalid: the answers of this pod are too long together")

    def counting(self, sift: Callable[[bytes], bytes] = bytes) -> Callable[[bytes], bytes]:
        """Return a function that counts each part of one answer, and returns what `sift` keeps of it."""
        received = 0

        def take(part: bytes) -> bytes:
            nonlocal received
            received += len(part)
            self.spend(len(part), received)
            return sift(part)

        return take


class Unanswered(Exception):  # noqa: N818 - not an error of ours but the state of the pod
    """There is no usable answer. The text gives the reason: `timeout`, `refused`, `http 503`, `invalid: …`."""

    @property
    def outcome(self) -> str:
        """The first word of the reason, from a small fixed set: a metric label."""
        return str(self).split(":", 1)[0].split(" ", 1)[0]


def invalid(error: ValidationError) -> str:
    """Return the reason of an `Unanswered` that names the first invalid field, without its value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"invalid: {where}: {first['msg']}"[:200]


def session(connections: int) -> aiohttp.ClientSession:
    """Return a session for requests to pods, with at most `connections` at once."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, limit_per_host=4),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        raise_for_status=False,
    )


async def request(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    timeout_s: float,
    connect_s: float | None = None,
    headers: dict[str, str] | None = None,
    json: Any = None,  # noqa: ANN401 - any JSON
    budget: ByteBudget | None = None,
    sift: Callable[[bytes], bytes] = bytes,
) -> tuple[int, bytes]:
    """Return status and body. The body is counted in `budget`, by default one of `BODY_LIMIT` for this answer.

    `sift` gets each part of the body, and returns what is kept of it. A connection that is not made within `connect_s`
    is `unreachable`, and not a `timeout`.

    Raises:
        Unanswered: there is no answer within `timeout_s`, connecting included, or it is too long.
    """
    take = (budget or ByteBudget(BODY_LIMIT, BODY_LIMIT)).counting(sift)
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)
    try:
        async with http.request(
            method, url, timeout=timeout, headers=headers, json=json, allow_redirects=False
        ) as answer:
            body = bytearray()
            async for chunk in answer.content.iter_chunked(CHUNK):
                body += take(chunk)
            return answer.status, bytes(body)
    except aiohttp.ConnectionTimeoutError as error:
        raise Unanswered(UNREACHABLE) from error
    except TimeoutError as error:
        raise Unanswered(TIMED_OUT) from error
    except aiohttp.ClientConnectorError as error:
        raise Unanswered(REFUSED if error.errno == errno.ECONNREFUSED else UNREACHABLE) from error
    except (aiohttp.ClientError, OSError) as error:
        raise Unanswered(f"disconnected: {type(error).__name__}") from error
    except ValueError as error:  # not a valid URL
        raise Unanswered(f"invalid: {error}") from error

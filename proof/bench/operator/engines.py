"""Stand-in for all engine pods: answers the operator's samples at every address of its network namespace.

Run as `python -m proof.bench.operator.engines`. It prints `ready` once it listens, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from pdpool_operator.api.names import ADMIN_PORT, ENGINE_HTTP_PORT

MAX_REQUEST = 16 << 10
"""Bytes of a request that is kept while its end has not arrived."""
LOADS = {
    "loads": [
        {
            "dp_rank": 0,
            "num_running_reqs": 8,
            "num_waiting_reqs": 0,
            "num_used_tokens": 4096,
            "max_total_num_tokens": 65536,
            "disaggregation": {},
        }
    ]
}


def state(ip: str, moved: int) -> dict[str, Any]:
    """Return what a busy connector reports: requests wait, and `moved` have moved on."""
    queue = {"reqs": 3, "oldest_s": 0.2, "moved_total": moved}
    return {
        "incarnation": ip,
        "ranks": 1,
        "container": ip,
        "engine_beat_age_s": 0.01,
        "queues": {"prefill_bootstrap": queue, "prefill_inflight": queue},
        "holds": 0,
        "held_bytes": 0,
        "outcomes": {"done": moved, "failed": 0},
        "causes": {},
    }


class Answers(asyncio.Protocol):
    """Answers GET requests over one kept connection. The HTTP server of a library would use more CPU than is measured.

    Args:
        moved: number of answers so far, by address. It makes every queue progress.
    """

    def __init__(self, moved: dict[str, int]) -> None:
        self._moved, self._received = moved, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        assert self._transport is not None
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, self._received = self._received.split(b"\r\n\r\n", 1)
            self._transport.write(self._answer(head))
        if len(self._received) > MAX_REQUEST:
            self._transport.abort()

    def _answer(self, head: bytes) -> bytes:
        assert self._transport is not None
        path = head.split(b" ", 2)[1].split(b"?")[0]
        if path == b"/v1/loads":
            found: Any = LOADS
        elif path == b"/v1/state":
            ip = self._transport.get_extra_info("sockname")[0]
            self._moved[ip] = self._moved.get(ip, 0) + 1
            found = state(ip, self._moved[ip])
        else:
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        body = json.dumps(found).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return head + body


async def serve() -> None:
    """Listen at all addresses until the standard input ends."""
    moved: dict[str, int] = {}
    loop = asyncio.get_running_loop()
    for port in (ENGINE_HTTP_PORT, ADMIN_PORT):
        await loop.create_server(lambda: Answers(moved), "0.0.0.0", port, backlog=4096)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())

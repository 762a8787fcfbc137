"""Answers of a stock SGLang, with the values that a test sets.

The texts in `stock_sglang_metrics` have the names, labels and order of lines of SGLang 0.5.23's `/metrics`. Histograms
have fewer buckets.
"""

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.serving import stop_serving

FOLDER = Path(__file__).with_name("stock_sglang_metrics")
QUEUES = ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer")
STAGES = {
    "prefill_bootstrap": "prefill_bootstrap",
    "prefill_inflight": "prefill_transfer_kv_cache",
    "decode_prealloc": "decode_bootstrap",
    "decode_transfer": "decode_transferred",
}
_LINE = re.compile(r"sglang:(?P<metric>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)")


@dataclass
class Stock:
    """What one stock engine shows. `None` leaves a series out."""

    role: str
    queues: dict[str, Any] = field(default_factory=dict)
    """Length by queue. A queue that is not named is empty."""
    left: dict[str, Any] = field(default_factory=dict)
    """Requests that left each queue. A queue that is not named keeps the recorded value."""
    running: Any = 0
    tokens: Any = 5000
    finished: Any = 200

    def metrics(self) -> str:
        """Return the text of `/metrics`."""
        lines = (FOLDER / f"{self.role}.txt").read_text().splitlines()
        return "".join(f"{line}\n" for line in map(self._line, lines) if line is not None)

    def loads(self) -> dict[str, Any]:
        """Return the body of `/v1/loads`."""
        queues = {f"{name}_queue_reqs": self.queues.get(name, 0) for name in QUEUES}
        load = {"dp_rank": 0, "num_running_reqs": self.running, "num_waiting_reqs": 0, "disaggregation": queues}
        return {"loads": [load]}

    def _line(self, line: str) -> str | None:
        found = _LINE.fullmatch(line)
        if found is None:
            return line
        value = self._value(found["metric"], found["labels"], found["value"])
        return None if value is None else f"sglang:{found['metric']}{{{found['labels']}}} {value}"

    def _value(self, metric: str, labels: str, recorded: str) -> Any:
        for queue in QUEUES:
            if metric == f"num_{queue}_queue_reqs":
                return self.queues.get(queue, 0)
            if metric == "per_stage_req_latency_seconds_count" and f'stage="{STAGES[queue]}"' in labels:
                return self.left.get(queue, recorded)
        if metric == "kv_transfer_latency_ms_count":
            return self.left.get("prefill_inflight", recorded)
        if metric == "realtime_tokens_total":
            mine = 'mode="decode"' if self.role == "decode" else 'mode="prefill_compute"'
            return self.tokens if mine in labels else recorded
        return {"num_running_reqs": self.running, "num_requests_total": self.finished}.get(metric, recorded)


@dataclass
class StockServer:
    """Serves the answers of a stock engine.

    Attributes:
        stock: What the engine shows.
        missing: Paths that answer 404.
        hanging: Paths that accept requests and never answer.
        gauges: Lengths by queue at which `/metrics` has stopped. `/v1/loads` shows those of `stock`.
        asked: Number of requests by path.
    """

    stock: Stock
    missing: tuple[str, ...] = ()
    hanging: tuple[str, ...] = ()
    gauges: dict[str, Any] | None = None
    asked: Counter[str] = field(default_factory=Counter)
    runner: web.AppRunner | None = None

    async def start(self, ip: str, port: int) -> "StockServer":
        """Serve until `stop`."""
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", self._answer)])
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, ip, port).start()
        return self

    async def stop(self) -> None:
        """Stop serving."""
        if self.runner is not None:
            await stop_serving(self.runner)

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked[request.path] += 1
        if request.path in self.hanging:
            await asyncio.Event().wait()
        if request.path == "/metrics" and "/metrics" not in self.missing:
            stock = self.stock if self.gauges is None else replace(self.stock, queues=self.gauges)
            return web.Response(text=stock.metrics(), content_type="text/plain")
        if request.path == "/v1/loads" and "/v1/loads" not in self.missing:
            return web.json_response(self.stock.loads())
        return web.Response(status=404)

"""External metrics for the autoscalers of one test: the aggregated API, answered from an operator's `/metrics`.

It stands in for Prometheus and an adapter. A metric is the sum of its series, or the maximum if it is an age.
"""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web
from pdpool_operator.runtime.resources import SERVICES, Resource
from prometheus_client.parser import text_string_to_metric_families

from dev.shell import run
from tests.cluster.hands import Object, eventually
from tests.cluster.operator_harness import ADDRESSES, BENCH, Bench
from tests.serving import stop_serving

API_SERVICES = Resource("apiregistration.k8s.io", "v1", "apiservices", "APIService")
GROUP, VERSION, PORT = "external.metrics.k8s.io", "v1beta1", 6443
AGES = "_seconds"
"""End of the names of metrics that are ages."""


class ExternalMetrics:
    """The requests of autoscalers, and their answers."""

    def __init__(self, metrics: Callable[[], Awaitable[str]]) -> None:
        """Store what returns the text of the operator's `/metrics`."""
        self._metrics = metrics
        self.empty: dict[str, int] = {}
        """Number of answers without a value so far, by metric."""

    async def value(self, name: str, labels: dict[str, str]) -> float | None:
        """Return a metric over all series with these labels. None if there is no such series."""
        families = text_string_to_metric_families(await self._metrics())
        found = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not found:
            return None
        return max(found) if name.endswith(AGES) else sum(found)

    async def handle(self, request: web.Request) -> web.Response:
        """Answer discovery, which has no metric in its path, or one request of an autoscaler."""
        if "metric" not in request.match_info:
            group = f"{GROUP}/{VERSION}"
            return web.json_response(
                {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": []}
            )
        name = request.match_info["metric"]
        pairs = (pair.split("=", 1) for pair in request.query["labelSelector"].split(","))
        labels = dict(pairs)
        value = await self.value(name, labels)
        if value is None:
            self.empty[name] = self.empty.get(name, 0) + 1
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        item = {"metricName": name, "metricLabels": labels, "timestamp": stamp, "value": f"{(value or 0) * 1000:.0f}m"}
        return web.json_response(
            {
                "kind": "ExternalMetricValueList",
                "apiVersion": f"{GROUP}/{VERSION}",
                "metadata": {},
                "items": [] if value is None else [item],
            }
        )


@asynccontextmanager
async def external_metrics(here: Bench, metrics: Callable[[], Awaitable[str]]) -> AsyncIterator[ExternalMetrics]:
    """Serve external metrics to the whole cluster while the block runs.

    The API server must run on this machine: it sends requests to a loopback address.
    """
    served = ExternalMetrics(metrics)
    address = next(ADDRESSES)
    runner = await _serve(served, address, here.folder)
    name = f"{VERSION}.{GROUP}"
    meta = {"name": "external-metrics", "namespace": here.namespace}
    await here.admin.make(SERVICES, {"metadata": meta, "spec": {"type": "ExternalName", "externalName": address}})
    spec = {
        "service": meta | {"port": PORT},
        "group": GROUP,
        "version": VERSION,
        "insecureSkipTLSVerify": True,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
    }
    await here.admin.make(API_SERVICES, {"metadata": {"name": name, "labels": {BENCH: here.namespace}}, "spec": spec})
    try:
        await eventually(lambda: _available(here, name))
        yield served
    finally:
        # First: while the API server knows an API that does not answer, it removes no namespace.
        await here.admin.drop(API_SERVICES, None, name)
        await stop_serving(runner)


async def _serve(served: ExternalMetrics, address: str, folder: Path) -> web.AppRunner:
    key, certificate = folder / "external-metrics.key", folder / "external-metrics.crt"
    command = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")
    run(*command, "-days", "1", "-subj", "/CN=external-metrics", "-keyout", key, "-out", certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    app = web.Application()
    root = f"/apis/{GROUP}/{VERSION}"
    app.add_routes([web.get(path, served.handle) for path in (root, root + "/namespaces/{namespace}/{metric}")])
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address, PORT, ssl_context=context).start()
    return runner


async def _available(here: Bench, name: str) -> bool:
    found: Object = await here.admin.call("get", API_SERVICES, API_SERVICES.path(None, name))
    conditions = found.get("status", {}).get("conditions", [])
    assert any(one["type"] == "Available" and one["status"] == "True" for one in conditions), conditions
    return True

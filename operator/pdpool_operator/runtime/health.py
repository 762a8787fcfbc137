"""HTTP on one port: `/healthz` (liveness), `/readyz` (readiness) and `/metrics`."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler

STALL_LIMIT_S = 120.0
"""Limit of a reconcile. Each has a shorter deadline of its own, so one that lasts longer hangs."""


def application(
    registry: CollectorRegistry, *, stalled_s: Callable[[], float], state: Callable[[], str | None]
) -> web.Application:
    """Return the application with the endpoints.

    Args:
        stalled_s: returns the seconds without progress of the work queue.
        state: returns `leader` or `standby`, or None while this process is neither yet.
    """

    async def healthz(_: web.Request) -> web.Response:
        stalled = stalled_s()
        if stalled > STALL_LIMIT_S:
            return web.Response(status=503, text=f"no reconcile has ended for {stalled:.0f} s\n")
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        what = state()
        return web.Response(text=f"{what}\n") if what else web.Response(status=503, text="starting\n")

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", make_aiohttp_handler(registry))
    return app

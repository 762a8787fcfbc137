"""HTTP on one port: `/healthz` (restart me?), `/readyz` (started?) and `/metrics`."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler

STALL_LIMIT_S = 120.0
"""A reconcile has a deadline of its own below this: what lasts longer hangs."""


def application(
    registry: CollectorRegistry, *, stalled_s: Callable[[], float], state: Callable[[], str | None]
) -> web.Application:
    """The endpoints.

    `stalled_s` says for how long the work queue has made no progress, `state` what this process is (`leader` or
    `standby`), or None while it is neither yet.
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

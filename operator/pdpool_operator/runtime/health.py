"""HTTP on one port: `/healthz` (liveness), `/readyz` (readiness) and `/metrics`."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler

STALL_LIMIT_S = 120.0
"""Limit of a reconcile. Each has a shorter deadline of its own, so one that lasts longer hangs."""
BLIND_SHOWN_S = 15.0
"""Time without sight of a resource after which the process is not ready. Shorter ones are reconnects."""
BLIND_LIMIT_S = 300.0
"""Time without sight of a resource after which a leader is not healthy. Another one may see more."""


def application(
    registry: CollectorRegistry,
    *,
    stalled_s: Callable[[], float],
    state: Callable[[], str | None],
    blind: Callable[[], tuple[float, str]],
) -> web.Application:
    """Return the application with the endpoints.

    Args:
        stalled_s: Returns the seconds without progress of the work queue.
        state: Returns `leader` or `standby`, or None while this process is neither.
        blind: Returns the seconds since a watched resource was last seen, and its name. 0 while all are seen.
    """

    async def healthz(_: web.Request) -> web.Response:
        stalled = stalled_s()
        if stalled > STALL_LIMIT_S:
            return web.Response(status=503, text=f"no reconcile has ended for {stalled:.0f} s\n")
        seconds, what = blind()
        if seconds > BLIND_LIMIT_S and state() == "leader":
            return web.Response(status=503, text=f"no {what} seen for {seconds:.0f} s\n")
        return web.Response(text=f"ok, but no {what} seen for {seconds:.0f} s\n" if seconds > BLIND_SHOWN_S else "ok\n")

    async def readyz(_: web.Request) -> web.Response:
        what = state()
        seconds, unseen = blind()
        if what and seconds > BLIND_SHOWN_S:
            return web.Response(status=503, text=f"{what}, but no {unseen} seen for {seconds:.0f} s\n")
        return web.Response(text=f"{what}\n") if what else web.Response(status=503, text="not ready\n")

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", make_aiohttp_handler(registry))
    return app

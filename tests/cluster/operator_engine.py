"""A stand-in for the processes of an engine pod."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web
from pdpool_operator.api.names import ADMIN_PORT, ENGINE_HTTP_PORT

from tests.serving import stop_serving


@dataclass
class Engine:
    """A stand-in for an engine pod's processes: enough HTTP for samplers and routers, controlled by the test."""

    ip: str
    pod_uid: str
    ranks: int = 1
    running: int = 0
    queues: dict[str, int] = field(default_factory=dict)
    oldest_s: float = 1.0
    """Age of the oldest request in each queue, in seconds."""
    held_for: dict[int, dict[str, str]] = field(default_factory=dict)
    """By rank: UID of the pod of each process for which the rank holds memory, by incarnation."""
    runners: list[web.AppRunner] = field(default_factory=list)

    async def start(self) -> "Engine":
        await self._serve(ENGINE_HTTP_PORT, [web.get(path, handler) for path, handler in self._http().items()])
        for rank in range(self.ranks):
            routes = [
                web.get("/v1/state", partial(self._state, rank)),
                web.post("/v1/fence", partial(self._fence, rank)),
            ]
            await self._serve(ADMIN_PORT + rank, routes)
        return self

    async def _serve(self, port: int, routes: list[web.RouteDef]) -> None:
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self.ip, port).start()
        self.runners.append(runner)

    async def stop(self) -> None:
        for runner in self.runners:
            await stop_serving(runner)
        self.runners.clear()

    def _http(self) -> dict[str, Any]:
        async def info(_: web.Request) -> web.Response:
            return web.json_response({"model_path": "tiny", "served_model_name": "tiny", "is_generation": True})

        async def models(_: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

        async def ok(_: web.Request) -> web.Response:
            return web.Response()

        async def loads(_: web.Request) -> web.Response:
            load = {"dp_rank": 0, "num_running_reqs": self.running, "num_waiting_reqs": 0, "disaggregation": {}}
            return web.json_response({"loads": [load]})

        paths = {"/health": ok, "/health_generate": ok, "/v1/loads": loads, "/v1/models": models}
        return paths | dict.fromkeys(("/server_info", "/get_server_info", "/model_info", "/get_model_info"), info)

    async def _state(self, rank: int, _: web.Request) -> web.Response:
        queues = {
            name: {"reqs": n, "oldest_s": self.oldest_s if n else None, "moved_total": 5}
            for name, n in self.queues.items()
        }
        held = self.held_for.get(rank, {})
        return web.json_response(
            {
                "incarnation": f"{self.ip}-{rank}",
                "ranks": self.ranks,
                "pod_uid": self.pod_uid,
                "container": f"the run at {self.ip}",
                "engine_beat_age_s": 0.01,
                "queues": queues if rank == 0 else {},
                "holds": len(held),
                "held_bytes": 4096 * len(held),
                "held_oldest_s": 5.0 if held else None,
                "held_for": [
                    {"incarnation": peer, "holds": 1, "pod_uid": uid, "container": "a run"}
                    for peer, uid in held.items()
                ],
            }
        )

    async def _fence(self, rank: int, request: web.Request) -> web.Response:
        body = await request.json()
        (proof,) = body["proofs"]
        held = self.held_for.get(rank, {})
        of_pod = proof["kind"] == "container_terminated"
        if body["incarnation"] not in held or (of_pod and held[body["incarnation"]] != proof["pod_uid"]):
            return web.json_response({"error": "of another pod"}, status=422)
        del held[body["incarnation"]]
        return web.json_response({"done": "fenced"})

"""One operator process: take part in the leader election and, while leading, run the controller."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import click
from aiohttp import web

from . import app
from .api import names
from .build.settings import BuildSettings
from .catch_up import CatchUp
from .controller.engines import Engines
from .controller.fences import Fencer
from .controller.judge import Judge
from .controller.node_fences import NodeFences
from .controller.operations import Operations
from .controller.readings import Readings
from .controller.reconcile import Controller
from .controller.repairs import Repairer
from .controller.reporter import Reporter
from .controller.served_fields import ServedFields
from .observe.cluster import Cluster
from .observe.http import session
from .observe.keys import Bindings, Key, keys_of
from .observe.lives import Lives
from .observe.pod_nodes import PodNodes
from .observe.pod_reader import CONCURRENCY, PodReader
from .observe.router_outcomes import RouterOutcomes
from .observe.routers import RouterClient
from .observe.sampler import Sampler
from .runtime import health, logs
from .runtime.api import Api
from .runtime.api_transport import connect
from .runtime.cached_reads import CachedReads
from .runtime.config import VARIABLES, Config, ConfigInvalidError, load
from .runtime.keys import Keys
from .runtime.lease import Elector
from .runtime.lease_store import CALL_TIMEOUT_S, ApiLease
from .runtime.live_metrics import LiveMetrics
from .runtime.manager import work
from .runtime.metrics import Metrics
from .runtime.queue import WorkQueue
from .runtime.recorder import Recorder
from .runtime.resources import OPERATIONS, PODS, Resource
from .runtime.steady_clock import SteadyClock
from .runtime.stopping import Signals, unless
from .runtime.store import Store
from .runtime.watch_feeds import WatchFeeds

WORKERS = 16
"""Number of concurrent reconciles.

A reconcile mostly waits. For routers and engines of a lost node it waits until the deadline of each request. This many
may do so before other objects have to wait.
"""
MADE = {names.LABEL_MANAGED_BY: names.MANAGED_BY}
"""Labels of the objects that are watched."""
STOP_WITHIN_S = 2.0
CONTROL_CONNECTIONS = 64

log = logging.getLogger("pdpool_operator")


def _stop_at_once(why: str) -> None:
    """Exit at once: another operator may be writing from now on, so no further code of this one may run."""
    log.critical("no longer the leader: %s; stopping at once", why)
    os._exit(1)


class Operator:
    """The parts of one operator process, wired up. Create it inside the event loop."""

    def __init__(self, config: Config, clients: "Clients") -> None:
        self.config = config
        self.queue: WorkQueue[Key] = WorkQueue(time.monotonic)
        self.bindings = Bindings()
        now = SteadyClock()
        self.judge = Judge(self.bindings, now, self.queue.add)
        readings = Readings(self.judge, now)
        self.metrics = Metrics(
            LiveMetrics(
                queues=readings.queues,
                holds=readings.holds,
                verdicts=readings.verdicts,
                rotation=readings.rotation,
                demands=readings.demands,
                leading=lambda: self.elector.leading,
                waiting_keys=lambda: len(self.queue),
            )
        )
        lease_api = Api(clients.lease, timeout_s=CALL_TIMEOUT_S, on_call=self.metrics.on_call)
        self.elector = Elector(
            store=ApiLease(lease_api, config.namespace, config.lease),
            me=config.identity,
            name=config.lease,
            namespace=config.namespace,
            clock=time.monotonic,
            on_lost=_stop_at_once,
            pods_version=lambda: self.feeds.version(PODS),
        )
        self.store = Store(on_gone=self._nudge)
        watching = Api(clients.watch, on_call=self.metrics.on_call)
        self.feeds = WatchFeeds(watching, (*app.PRIMARY, *app.OWNED), self.store, clock=time.monotonic)
        self.api = Api(
            clients.api,
            write_budget=self.elector.write_budget_s,
            on_call=self.metrics.on_call,
            on_stored=self._stored,
            on_deleted=self.store.drop,
        )
        reads = CachedReads(self.api, self.store, self.feeds.age_s, app.WHOLE, f"{names.GROUP}/")
        reader = PodReader(clients.pods, now=now, on_answer=self._count_answer)
        self.sampler = Sampler(reader, clock=time.monotonic, on_samples=self.judge.on_samples)
        self.router_outcomes = RouterOutcomes(
            clients.pods, now=now, on_sample=self.judge.on_router, on_reach=self.queue.add
        )
        self.lives = Lives()
        self.pod_nodes = PodNodes()
        self.keys = Keys(config.seeds, config.key_epoch)
        self.settings = BuildSettings(
            engine_image=config.engine_image,
            router_image=config.router_image,
            key_epoch=config.key_epoch,
            peers=config.peers,
            pods=config.pods,
        )
        engines = Engines(
            clients.control, self.keys, f"operator {config.identity}", write_budget=self.elector.write_budget_s
        )
        fencer = Fencer(engines, self.sampler, self.lives, self.pod_nodes, now, self._count_fence)
        self.judge.fences_due = fencer.pools_due
        self.served = ServedFields(self.api, self.metrics.report_missing_fields)
        self.catch_up = CatchUp(
            self.api,
            config.watch_namespaces or (None,),
            note_pod=self._note_pod,
            check_fields=self.served.check,
            operations=lambda: self.store.all(OPERATIONS, None, {}),
            enqueue=self.queue.add,
            nudge=self._nudge,
        )
        routers = RouterClient(clients.control, write_budget=self.elector.write_budget_s)
        recorder = Recorder(self.api, config.identity, now)
        operations = Operations(self.api, engines, self.served, recorder, self.metrics, now)
        self.controller = Controller(
            api=self.api,
            cluster=Cluster(
                reads,
                self.api,
                self.sampler,
                routers,
                self.keys.router,
                config.key_epoch,
                self.lives,
                now,
                lambda: self.catch_up.has_operations,
            ),
            routers=routers,
            router_outcomes=self.router_outcomes,
            judge=self.judge,
            fencer=fencer,
            repairs=Repairer(self.api, engines, self.bindings, self.served),
            operations=operations,
            node_fences=NodeFences(reads, self.api, self.sampler, self.pod_nodes, fencer, operations, now),
            bindings=self.bindings,
            reporter=Reporter(self.api, self.served, recorder, self.metrics, now),
            metrics=self.metrics,
            engine_settings=self._engine_settings,
            router_key=self.keys.router,
            enqueue=self.queue.add,
            now=now,
        )
        self.watching = asyncio.Event()

    def state(self) -> str | None:
        """Return the state of this process: `leader` once it watches and has listed all, `standby` while another one
        leads. A leader that cannot renew its Lease is neither.
        """
        if self.watching.is_set() and self.catch_up.listed.is_set():
            return "leader" if self.elector.leading else None
        record = self.elector.view.record
        return "standby" if record is not None and record.holder not in {"", self.config.identity} else None

    def health(self) -> web.Application:
        """Return the application of the HTTP endpoints."""
        return health.application(
            self.metrics.registry, stalled_s=self.queue.stalled_s, state=self.state, blind=self.feeds.blind
        )

    async def lead(self, stop: asyncio.Event) -> None:
        """Work as the leader until `stop` is set. If a part ends before that, raise its error."""
        holding = asyncio.create_task(self.elector.hold(), name="lease")
        if not await unless(stop, self.catch_up.wait_for_kinds()):
            await self._give_up([holding], [])
            return
        # At its end, kopf cancels all tasks that were started after it, so our own parts start first.
        workers = [asyncio.create_task(self._work(), name=f"worker {i}") for i in range(WORKERS)]
        ours = [holding, *workers, *(asyncio.create_task(part, name=name) for name, part in self._parts())]
        kopf_stop = asyncio.Event()
        watch = app.watch(
            self._nudge,
            self.feeds,
            self.config.watch_namespaces,
            identity=self.config.identity,
            stop=kopf_stop,
            ready=self.watching,
            started=Signals(stop).install,
        )
        kopf = asyncio.create_task(watch, name="kopf")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        done, _ = await asyncio.wait([*ours, kopf, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await self._give_up(ours, workers)
        kopf_stop.set()
        await asyncio.wait([kopf], timeout=STOP_WITHIN_S)
        for task in done - {stopping}:
            raise RuntimeError(f"{task.get_name()} ended unexpectedly") from task.exception()

    async def _give_up(self, ours: Sequence[asyncio.Task[None]], workers: Sequence[asyncio.Task[None]]) -> None:
        """End all parts that may write, then release the Lease.

        Workers finish their current reconcile, because the API server may still carry out a write whose connection is
        cut here.
        """
        self.queue.close()
        if workers:
            await asyncio.wait(workers, timeout=STOP_WITHIN_S)
        may_be_writing = [worker for worker in workers if not worker.done()]
        for task in ours:
            task.cancel()
        _, going_on = await asyncio.wait(ours, timeout=STOP_WITHIN_S)
        if not (may_be_writing or going_on):
            await self.elector.release()

    def _work(self) -> Coroutine[Any, Any, None]:
        return work(self.queue, self.controller.reconcile, self.metrics)

    def _parts(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        return [
            ("sampler", self.sampler.run()),
            ("router outcomes", self.router_outcomes.run()),
            ("judge", self.judge.run()),
            ("resync", self.catch_up.run(lambda: self.elector.inherited)),
        ]

    def _nudge(self, body: Any) -> None:  # noqa: ANN401 - kopf's body: a mapping
        if body.get("kind") == PODS.kind:
            self._note_pod(body)
        for key in keys_of(body, self.bindings):
            self.queue.add(key)

    def _note_pod(self, pod: Any) -> bool:  # noqa: ANN401 - kopf's body: a mapping
        """Remember what outlives a pod; return whether another of its containers has ended."""
        self.pod_nodes.note(pod)
        return self.lives.note(pod)

    def _stored(self, resource: Resource, obj: dict[str, Any]) -> None:
        """Take the operator's own write into the store. A reconcile that follows must see it."""
        if resource in app.WHOLE or (resource in app.OWNED and names.has_labels(obj, MADE)):
            self.store.put(resource, obj)

    def _engine_settings(self, namespace: str) -> BuildSettings:
        return replace(self.settings, keys=self.keys.files(namespace))

    def _count_fence(self, outcome: str) -> None:
        self.metrics.fences.labels(outcome).inc()

    def _count_answer(self, role: names.Role, source: str, outcome: str) -> None:
        self.metrics.samples.labels(str(role), source, outcome).inc()


class Clients:
    """The connections of one process: to the API server and to pods. The Lease and watches have their own.

    Requests that change a pod have their own connections. Samples of a lost node's pods occupy theirs until the
    deadline.
    """

    api: Any
    lease: Any
    watch: Any
    pods: Any
    control: Any

    async def __aenter__(self) -> "Clients":
        self.api, self.lease, self.watch = await connect(), await connect(), await connect()
        self.pods, self.control = session(CONCURRENCY), session(CONTROL_CONNECTIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in (self.api, self.lease, self.watch, self.pods, self.control):
            await client.close()


async def serve(config: Config) -> None:
    """Run until SIGTERM."""
    stop = asyncio.Event()
    Signals(stop).install()
    async with Clients() as clients:
        operator = Operator(config, clients)
        runner = web.AppRunner(operator.health(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, config.host, config.port).start()
        try:
            if await operator.elector.acquire(stop):
                log.info("leading as %s", config.identity)
                await operator.lead(stop)
        finally:
            await runner.cleanup()
    log.info("stopped")


HELP = "\n".join(
    (
        "Run the pdpool operator until SIGTERM. Its settings are environment variables, which the Helm chart sets:",
        "",
        "\b",  # click keeps the lines that follow
        *(f"{name:<25} {meaning}" for name, meaning in VARIABLES.items()),
        "",
        "It uses the rights of its pod, or of KUBECONFIG outside a cluster.",
    )
)


@click.command(help=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def main() -> None:
    """Entry point."""
    try:
        config = load()
    except ConfigInvalidError as error:
        sys.exit(f"pdpool-operator: {error}")
    logs.set_up(config.log_level)
    asyncio.run(serve(config))

"""One engine: model, cache, scheduler, connector; whether it is well, and whether it drains."""

import asyncio
import logging
import time
from collections.abc import Callable

from pdpool_connector import ConnectorConfig, ConnectorStats, DecodeConnector, PrefillConnector
from pdpool_connector.layout.pairing import ModelShard
from pdpool_connector.runtime.metrics import ConnectorCollector
from pdpool_connector.version import VERSION
from prometheus_client import CollectorRegistry

from pdpool_reference import tokenizer as tokenizers
from pdpool_reference import weights
from pdpool_reference.disaggregation import DecodeSide, PrefillSide, UnifiedSide
from pdpool_reference.frame_faults import FrameFaults
from pdpool_reference.kv import PAGE_TOKENS, PageAllocator, PagedKV
from pdpool_reference.metrics import Counters, Gauges
from pdpool_reference.model import Model
from pdpool_reference.options import EngineOptions
from pdpool_reference.rank_handoffs import RankedDecode, RankedPrefill
from pdpool_reference.rank_orders import Connect, RankSpec
from pdpool_reference.ranks import Ranks
from pdpool_reference.request import GenerationRequest
from pdpool_reference.request_handoffs import RequestHandoffs
from pdpool_reference.scheduler import Scheduler
from pdpool_reference.scheduler_core import Core, Limits, Side
from pdpool_reference.shard import shards_of

SCHEDULER_SILENT_S = 20.0
CONNECTOR_SILENT_S = 5.0
"""A loop that has not turned for so long makes /health answer 503."""
STOP_S = 10.0
TURN_S = 0.5
"""An engine that stops gives its scheduler so long to end hand-offs with their reasons. It does not wait for a longer
step before it closes the connector: a kubelet may leave 2 s."""
DRAIN_POLL_S = 0.05
"""A drain polls: the connector's statistics are snapshots without notice of a change."""

log = logging.getLogger(__name__)


class Engine:
    """Everything behind the HTTP server.

    Args:
        options: the command line.
        crashed: called on the scheduler's thread when it raised.
    """

    def __init__(self, options: EngineOptions, crashed: Callable[[], None]) -> None:
        self.options = options
        self._draining = False
        self.frame_faults = FrameFaults()
        self.config, loaded = weights.open_model(options.model_path)
        self.tokenizer = tokenizers.load(options.model_path)
        self.tokenizer.limit(self.max_tokens)
        self.registry = CollectorRegistry()
        self._shards = self._cut()
        self._kv = PagedKV(self.config, options.kv_pages, shard=self._shards[0])
        model = Model(self.config, loaded, self._kv)
        self.connector = self._make_connector()
        self.ranks = self._make_ranks(model) if len(self._shards) > 1 else None
        self._ranked = self._make_ranked()
        self.handoffs = self._make_handoffs()
        limits = Limits()
        self.scheduler = Scheduler(
            mode=options.mode,
            model=self.ranks or model,
            total_pages=options.kv_pages,
            max_queued=limits.max_queued,
            make_core=lambda on_end: self._make_core(limits, on_end),
            on_crash=crashed,
        )
        self.registry.register(Gauges(lambda: self.scheduler.report, options.served_model_name))

    @property
    def max_tokens(self) -> int:
        """Most tokens of one sequence: prompt and answer, in a prefill engine the prompt alone."""
        return min(self.config.max_context, self.options.kv_pages * PAGE_TOKENS)

    def start(self) -> None:
        """Start connector, other ranks and scheduler. Raises RankLostError when a rank does not start."""
        if self.ranks is not None:
            self.ranks.wait_up()
        if self.connector is not None:
            self.connector.start()
            if self.ranks is not None:
                self.ranks.connect({rank: Connect(self._config_of(rank)) for rank in self.ranks.numbers})
            self.registry.register(ConnectorCollector(self._connector_stats))
        self.scheduler.start()

    def stop(self) -> None:
        """Stop everything. Requests that are left fail at once, here and at peers."""
        self.scheduler.stop()
        self.scheduler.join(TURN_S)
        if self.connector is not None:
            self.connector.close(STOP_S)
        if not self.scheduler.join(STOP_S):
            log.error("the scheduler did not stop within %.0f s", STOP_S)
        if self.ranks is not None:
            self.ranks.stop()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused: after SIGTERM, or after a drain over the connector's admin socket."""
        return self._draining or (self.connector is not None and self.connector.draining)

    def drain(self) -> None:
        """Take no new requests from now on. Requests that have arrived go on: their hand-offs are open."""
        if not self._draining:
            log.info("draining: no new requests are taken")
        self._draining = True
        if self.connector is not None:
            self.connector.drain()

    def running(self) -> int:
        """Return how many sequences the engine has: those that have not ended, and ended ones with held pages."""
        return self.scheduler.open_sequences + self.scheduler.report.held

    def drained(self) -> bool:
        """Whether the engine drains and has no sequence left, and no page that a peer may touch."""
        return self.draining and self.running() == 0 and all(stats.drained for stats in self._connector_stats())

    def unwell(self) -> str | None:
        """Return why this engine should get no requests, or None."""
        if self.draining:
            return "draining"
        if (age := self.scheduler.beat_age_s()) > SCHEDULER_SILENT_S:
            return f"the scheduler has not turned for {age:.0f} s"
        if self.connector is not None and (lag := self.connector.stats().loop_lag_s) > CONNECTOR_SILENT_S:
            return f"the connector has not turned for {lag:.0f} s"
        return None

    def _connector_stats(self) -> list[ConnectorStats]:
        """Return the statistics of all ranks."""
        if self.connector is None:
            return []
        return [self.connector.stats(), *(self.ranks.stats() if self.ranks is not None else [])]

    def _cut(self) -> tuple[ModelShard, ...]:
        try:
            return shards_of(self.config, self.options.tp_size, self.options.pp_size)
        except ValueError as error:
            raise weights.WeightsError(str(error)) from None

    def _make_connector(self) -> PrefillConnector | DecodeConnector | None:
        if self.options.mode == "unified":
            return None
        kind = PrefillConnector if self.options.mode == "prefill" else DecodeConnector
        return kind(self._config_of(0), self._kv.memory, self._wake, running=self.running)

    def _make_ranked(self) -> RankedPrefill | RankedDecode | None:
        if self.ranks is None:
            return None
        match self.connector:
            case PrefillConnector() as connector:
                return RankedPrefill(connector, self.ranks, self._kv, self._wake)
            case DecodeConnector() as connector:
                return RankedDecode(connector, self.ranks, self._kv, self._wake)
            case _:
                return None

    def _make_handoffs(self) -> RequestHandoffs:
        opens = self._ranked or self.connector
        return RequestHandoffs(
            prefill=opens if isinstance(opens, PrefillConnector | RankedPrefill) else None,
            decode=opens if isinstance(opens, DecodeConnector | RankedDecode) else None,
        )

    def _wake(self) -> None:
        self.scheduler.wake()

    def _config_of(self, rank: int) -> ConnectorConfig:
        """The other ranks listen on the ports that follow those of rank 0."""
        options = self.options
        registry = self.connector.bootstrap_address if rank and isinstance(self.connector, PrefillConnector) else None
        return ConnectorConfig(
            advertise_host=options.advertise_host,
            control_port=options.control_port and options.control_port + rank,
            admin_port=options.admin_port and options.admin_port + rank,
            bootstrap_port=options.bootstrap_port if rank == 0 else 0,
            backend=options.transfer_backend,
            bind_host=options.host,
            frame_filter=self.frame_faults if options.enable_faults else None,
            rank=rank,
            instance=self._shards if len(self._shards) > 1 else (),
            registry=registry,
            flight_dir=options.flight_dir,
            curve=options.curve,
            curve_required=options.curve_required,
            pod_uid=options.pod_uid,
            engine=f"reference {VERSION}",
            admin_gate=options.admin_gate,
            admin_socket=options.admin_socket if rank == 0 else None,
        )

    def _make_ranks(self, model: Model) -> Ranks:
        options = self.options
        specs = [
            RankSpec(rank, rank // options.tp_size, shard, options.mode, options.model_path, options.kv_pages)
            for rank, shard in enumerate(self._shards)
            if rank
        ]
        return Ranks(model, specs, lambda: self.scheduler.stopping, lambda error: self.scheduler.crash(error))

    def _make_core(self, limits: Limits, on_end: Callable[[GenerationRequest], None]) -> Core:
        return Core(
            pages=PageAllocator(self.options.kv_pages),
            aux=PageAllocator(self._kv.memory.aux_rows),
            detokenizer=self.tokenizer.stream,
            eos_ids=frozenset(self.config.eos_ids),
            limits=limits,
            counters=Counters(self.registry, self.options.served_model_name, self.options.mode),
            on_end=on_end,
            side=self._make_side,
        )

    def _make_side(self, core: Core) -> Side:
        monitor = self._ranked or self.connector
        if monitor is None:
            return UnifiedSide(core)
        side = PrefillSide if self.options.mode == "prefill" else DecodeSide
        return side(core, monitor, self._kv)

    async def when_drained(self, timeout_s: float) -> bool:
        """Wait until drained. Returns False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not (drained := self.drained()) and time.monotonic() < deadline:  # noqa: ASYNC110 - see DRAIN_POLL_S
            await asyncio.sleep(DRAIN_POLL_S)
        return drained

"""One engine put together: model, cache, scheduler, connector; whether it is well, and whether it drains."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from pdpool_connector import Cause, ConnectorConfig, ConnectorStats, DecodeConnector, PrefillConnector
from pdpool_connector.layout.pairing import ModelShard
from pdpool_connector.protocol.states import PrefillState
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.metrics import ConnectorCollector
from pdpool_connector.runtime.validation import RefusalCause
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
from pdpool_reference.rank_orders import Connect, Drain, RankSpec
from pdpool_reference.ranks import Ranks
from pdpool_reference.request import (
    DEFAULT_DEADLINE_S,
    GenerationRequest,
    Handoff,
    RequestError,
    TooLongError,
)
from pdpool_reference.request_body import Job
from pdpool_reference.scheduler import Scheduler
from pdpool_reference.scheduler_core import Core, Limits, Side
from pdpool_reference.shard import parts_of

SCHEDULER_SILENT_S = 20.0
CONNECTOR_SILENT_S = 5.0
"""A loop that has not turned for so long makes /health say 503."""
EXPECTED_WITHIN_S = 15.0
"""How long prefill waits for the word of a decode engine that it has a request. Decode says so when the request comes,
and every 5 s after (`Timeouts.expect_s`): what has missed three was never sent, or its process is dead or frozen. A
decode that meets this prefill for the first time has to pair with it before, which takes a second or so.
Not longer: the router offers requests to a dead decode until its health checks have noticed, and each waits so long."""
STOP_S = 10.0
TURN_S = 0.5
"""So long an engine that stops lets its scheduler tell peers why their hand-offs end. One that is in a longer step does
not hold up the connector's farewell: a kubelet may leave 2 s."""
DRAIN_POLL_S = 0.05
"""The connector's state is a snapshot that nobody announces, so that a drain looks at it again and again."""

log = logging.getLogger(__name__)


class Engine:
    """Everything behind the HTTP server.

    Args:
        options: the command line.
        crashed: called on the scheduler's thread when it raised.
    """

    def __init__(self, options: EngineOptions, crashed: Callable[[], None]) -> None:
        self.options = options
        self.draining = False
        self.frame_faults = FrameFaults()
        self.config, loaded = weights.open_model(options.model_path)
        self.tokenizer = tokenizers.load(options.model_path)
        self.tokenizer.limit(self.max_tokens)
        self.registry = CollectorRegistry()
        self._parts = self._cut()
        self._kv = PagedKV(self.config, options.kv_pages, part=self._parts[0])
        model = Model(self.config, loaded, self._kv)
        self.connector = self._make_connector()
        self.ranks = self._make_ranks(model) if len(self._parts) > 1 else None
        limits = Limits(max_ahead=options.optimistic_prefill)
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
        """Most tokens that prompt and answer of one sequence may have together."""
        return min(self.config.max_context, self.options.kv_pages * PAGE_TOKENS)

    def start(self) -> None:
        """Start connector, the other ranks, and scheduler. Raises RankLostError when one of those does not come up."""
        if self.ranks is not None:
            self.ranks.wait_up()
        if self.connector is not None:
            self.connector.start()
            if self.ranks is not None:
                self.ranks.connect({rank: Connect(self._config_of(rank)) for rank in self.ranks.numbers})
            self.registry.register(ConnectorCollector(self._connector_stats))
        self.scheduler.start()

    def stop(self) -> None:
        """Stop both; what is left of requests fails at once, here and at peers."""
        self.scheduler.stop()
        self.scheduler.join(TURN_S)
        if self.connector is not None:
            self.connector.close(STOP_S)
        if not self.scheduler.join(STOP_S):
            log.error("the scheduler did not stop within %.0f s", STOP_S)
        if self.ranks is not None:
            self.ranks.stop()

    def drain(self) -> None:
        """Take no new requests from now on."""
        if self.draining:
            return
        log.info("draining: no new requests are taken")
        self.draining = True
        self.scheduler.call(lambda core: core.side.drain())
        if self.connector is not None and self.scheduler.open_sequences == 0:
            self.connector.drain()
            if self.ranks is not None:
                self.ranks.order_all(Drain())

    def announce(self, job: Job) -> None:
        """Tell prefill what has come here. Not left to the scheduler: one that stands still has the requests, too.

        Rank 0 serves the first layers and heads and so meets rank 0 of prefill, which is the one that waits for this.
        """
        if isinstance(self.connector, DecodeConnector):
            for rid, handoff in _halves(job):
                self.connector.expect(
                    handoff.prefill,
                    handoff.room,
                    rid,
                    sibling=handoff.sibling,
                    prompt=handoff.prompt,
                    deadline_s=DEFAULT_DEADLINE_S,
                )

    def turn_away(self, job: Job, error: RequestError) -> None:
        """Tell the other engine that a request is not served here."""
        cause: RefusalCause = Cause.TOO_LONG if isinstance(error, TooLongError) else Cause.REFUSED
        why = error.message
        for rid, at in _halves(job):
            if isinstance(self.connector, DecodeConnector):
                self.connector.refuse(at.prefill, at.room, rid, why, cause=cause, sibling=at.sibling, prompt=at.prompt)
            elif self.connector is not None:
                self.connector.refuse(at.room, rid, why, cause=cause, sibling=at.sibling, prompt=at.prompt)

    def drain_state(self) -> dict[str, Any]:
        """How far the drain is. Drained: no sequence anywhere, and no page that a peer may still touch."""
        report = self.scheduler.report
        running = self.scheduler.open_sequences
        connectors = self._connector_stats()
        quiet = running == 0 and report.held == 0 and all(_settled(stats) for stats in connectors)
        return {
            "draining": self.draining,
            "drained": self.draining and quiet,
            "running": running,
            "queues": report.queues(),
            "holds": max(report.held, *(stats.holds for stats in connectors), 0),
        }

    def unwell(self) -> str | None:
        """Why this engine should get no requests, or None."""
        if self.draining:
            return "draining"
        if (age := self.scheduler.beat_age_s()) > SCHEDULER_SILENT_S:
            return f"the scheduler has not turned for {age:.0f} s"
        if self.connector is not None and (lag := self.connector.stats().loop_lag_s) > CONNECTOR_SILENT_S:
            return f"the connector has not turned for {lag:.0f} s"
        return None

    def _connector_stats(self) -> list[ConnectorStats]:
        """Of all ranks."""
        if self.connector is None:
            return []
        return [self.connector.stats(), *(self.ranks.stats() if self.ranks is not None else [])]

    def _cut(self) -> tuple[ModelShard, ...]:
        try:
            return parts_of(self.config, self.options.tp_size, self.options.pp_size)
        except ValueError as error:
            raise weights.WeightsError(str(error)) from None

    def _make_connector(self) -> PrefillConnector | DecodeConnector | None:
        if self.options.mode == "unified":
            return None
        kind = PrefillConnector if self.options.mode == "prefill" else DecodeConnector
        return kind(self._config_of(0), self._kv.memory, self._wake)

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
            instance=self._parts if len(self._parts) > 1 else (),
            registry=registry,
            flight_dir=options.flight_dir,
            timing=Timeouts(expected_within_s=EXPECTED_WITHIN_S if rank == 0 else None),
            curve=options.curve,
            curve_required=options.curve_required,
            pod_uid=options.pod_uid,
            admin_gate=options.admin_gate,
        )

    def _make_ranks(self, model: Model) -> Ranks:
        options = self.options
        specs = [
            RankSpec(rank, rank // options.tp_size, part, options.mode, options.model_path, options.kv_pages)
            for rank, part in enumerate(self._parts)
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
        ranks = self.ranks
        match self.connector:
            case PrefillConnector() as connector:
                prefill = (
                    RankedPrefill(connector, ranks, self._kv, lambda: self.scheduler.wake()) if ranks else connector
                )
                return PrefillSide(core, prefill, self._kv)
            case DecodeConnector() as connector:
                decode = RankedDecode(connector, ranks, self._kv, self._wake) if ranks else connector
                return DecodeSide(core, decode, self._kv)
            case _:
                return UnifiedSide(core)

    async def when_drained(self, timeout_s: float) -> bool:
        """Wait until drained. Returns whether it came to that in time."""
        deadline = time.monotonic() + timeout_s
        while not (drained := self.drain_state()["drained"]) and time.monotonic() < deadline:  # noqa: ASYNC110 - see DRAIN_POLL_S
            await asyncio.sleep(DRAIN_POLL_S)
        return bool(drained)


def _halves(job: Job) -> Iterator[tuple[str, Handoff]]:
    for rid, handoff in zip(job.rids, job.handoffs, strict=True):
        if handoff is not None:
            yield rid, handoff


def _settled(stats: ConnectorStats) -> bool:
    """Whether a draining connector owes nobody anything.

    What only a peer waits for (a decode whose request never came to this prefill) is told when the connector closes.
    """
    under_way = sum(queue.reqs for state, queue in stats.attempts.items() if state != PrefillState.PARKED)
    return stats.draining and not stats.holds and not under_way

"""What the operator observes of a simulated world: pods as Kubernetes shows them, and answers of connectors."""

from datetime import UTC, datetime, timedelta

from pdpool_operator.api import names
from pdpool_operator.api.names import Role
from pdpool_operator.api.pools import DecodePool, Pool, PrefillPool
from pdpool_operator.engines.answers import EngineSample
from pdpool_operator.observe.model import ObservedInstance, ObservedPod, ObservedPool
from pdpool_operator.observe.samples import ConnectorSample, QueueSample, RankSample, Tally

from proof.queue_sim.world import Engine, Queue

T0 = datetime(2026, 1, 1, tzinfo=UTC)
RANKS = 2
STUCK_AFTER_S = 30.0


def moment(seconds: float) -> datetime:
    """Return the time so many seconds of world time after the beginning."""
    return T0 + timedelta(seconds=seconds)


def pool(role: Role) -> Pool:
    """Return a pool of the role, as the API server has it."""
    kind: type[PrefillPool | DecodePool] = PrefillPool if role is Role.PREFILL else DecodePool
    meta = {"name": "chat", "namespace": "llm", "uid": f"uid-of-{role}", "generation": 1}
    return kind.parse({"metadata": meta, "spec": {"model": {"path": "/models/simulated"}}})


def observed_pool(pool: Pool, engines: list[Engine], skew_s: float) -> ObservedPool:
    """Return a pool with its pods. `skew_s`: how far the API server's clock is ahead of the operator's."""
    return ObservedPool(
        pool=pool,
        instances=tuple(_instance(pool, engine, skew_s) for engine in engines),
        objects=(),
        stuck_after_s=STUCK_AFTER_S,
    )


def _instance(pool: Pool, engine: Engine, skew_s: float) -> ObservedInstance:
    pod = ObservedPod(
        name=f"{engine.name}-0",
        uid=engine.pod_uid,
        ip=engine.ip,
        phase="Running",
        ready=engine.ready,
        terminating=False,
        spec_hash="",
        build_hash="",
        created_at=moment(engine.began_s + skew_s),
        ready_since=moment(engine.ready_s + skew_s) if engine.ready else None,
        was_ready=not engine.ready and engine.ready_s >= engine.began_s,
    )
    return ObservedInstance(
        index=engine.index,
        name=engine.name,
        uid=f"uid-of-{engine.name}",
        controller_uid=pool.metadata.uid,
        deleting=False,
        spec_hash="",
        build_hash="",
        replicas=1,
        drain_started=T0 if engine.leaving else None,
        drain_reason="",
        pod=pod,
        labels=names.instance_labels(pool.metadata.name, engine.role, engine.index),
    )


def samples(engine: Engine, now: float, at: datetime) -> list[RankSample]:
    """Return what a look at an instance finds, rank by rank.

    Args:
        engine: the instance.
        now: seconds of world time.
        at: the same moment by the operator's clock.
    """
    error = "" if engine.ready and engine.reachable else "timeout" if engine.ready else "refused"
    if error:
        return [
            RankSample(rank, engine.pod_uid, at, at, None, None, connector_error=error, engine_error=error)
            for rank in range(RANKS)
        ]
    queues, ended = _queues(engine, now), Tally(engine.done, engine.failed)
    incarnation = f"{engine.name}-{engine.process}"
    waiting = sum(request is not engine.computing for request in engine.backlog) if engine.backlog else 0
    load = EngineSample(len(engine.running) + (engine.computing is not None), waiting, {})
    return [
        RankSample(
            rank,
            engine.pod_uid,
            at,
            at,
            ConnectorSample(
                incarnation,
                engine.beat_age_s(rank, now),
                queues,
                ranks=RANKS,
                engine_queues=_shown(engine, now),
                ended=ended,
            ),
            load if rank == 0 else None,
        )
        for rank in range(RANKS)
    ]


def _queues(engine: Engine, now: float) -> dict[str, QueueSample]:
    """Return the queues as the connector counts them."""
    return _frozen(engine, now) or {
        name: _queue_of(queue, [at for request, at in queue.entered.items() if request is not engine.leaked], now)
        for name, queue in engine.queues.items()
    }


def _shown(engine: Engine, now: float) -> dict[str, QueueSample]:
    """Return the queues as the engine shows them, leaked requests included."""
    return _frozen(engine, now) or {
        name: _queue_of(queue, list(queue.entered.values()), now) for name, queue in engine.queues.items()
    }


def _frozen(engine: Engine, now: float) -> dict[str, QueueSample]:
    return {
        name: QueueSample(reqs, now - since if reqs else None, moved)
        for name, (reqs, since, moved) in (engine.frozen_gauge or {}).items()
    }


def _queue_of(queue: Queue, entered: list[float], now: float) -> QueueSample:
    return QueueSample(len(entered), now - min(entered) if entered else None, queue.moved)

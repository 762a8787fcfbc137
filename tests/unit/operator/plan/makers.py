"""Short makers of observations for tests of the operator's pure half."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pdpool_operator.api import names
from pdpool_operator.api.names import Role
from pdpool_operator.api.pools import DecodePool, Pool, PrefillPool
from pdpool_operator.api.services import DisaggregatedService
from pdpool_operator.build.pool import instance_stateful_set, pool_objects
from pdpool_operator.build.settings import BuildSettings
from pdpool_operator.diagnose.track import RankTrack, follow
from pdpool_operator.observe.model import ObservedInstance, ObservedObject, ObservedPod, ObservedPool
from pdpool_operator.observe.samples import ConnectorSample, EngineSample, QueueSample, RankSample

SETTINGS = BuildSettings(
    engine_image="localhost/pdpool-engine:dev",
    router_image="localhost/pdpool-router:dev",
    keys={"curve-1.json": "[]", "operator-1.pem": "-----BEGIN PUBLIC KEY-----", "router-1.key": "k"},
)
T0 = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
POOL_UID = "11111111-1111-1111-1111-111111111111"
SERVICE_UID = POOL_UID.replace("1", "3")


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def make_pool(role: Role = Role.PREFILL, name: str = "chat", **spec: Any) -> Pool:
    kind = {Role.PREFILL: PrefillPool, Role.DECODE: DecodePool}[role]
    uid = POOL_UID if role is Role.PREFILL else POOL_UID.replace("1", "2")
    spec = {**spec, "model": {"path": "/models/smollm2", **spec.get("model", {})}}
    return kind.parse({"metadata": {"name": name, "namespace": "llm", "uid": uid, "generation": 1}, "spec": spec})


def make_service(**spec: Any) -> DisaggregatedService:
    return DisaggregatedService.parse(
        {
            "metadata": {"name": "chat", "namespace": "llm", "uid": SERVICE_UID, "generation": 1},
            "spec": {"prefill": {"poolRef": {"name": "chat"}}, "decode": {"poolRef": {"name": "chat"}}, **spec},
        }
    )


def make_pod(
    name: str = "chat-prefill-0-0", *, ready: bool = True, ip: str | None = "10.0.0.1", **changes: Any
) -> ObservedPod:
    pod = ObservedPod(
        name=name,
        uid=f"uid-of-{name}",
        ip=ip,
        phase="Running",
        ready=ready,
        terminating=False,
        spec_hash="",
        build_hash="",
        created_at=T0,
    )
    return replace(pod, **changes)


def hashes(pool: Pool, index: int = 0, settings: BuildSettings = SETTINGS) -> tuple[str, str]:
    annotations = instance_stateful_set(pool, index, settings)["metadata"]["annotations"]
    return annotations[names.ANNOTATION_SPEC_HASH], annotations[names.ANNOTATION_BUILD_HASH]


def make_instance(pool: Pool, index: int = 0, *, ready: bool = True, **changes: Any) -> ObservedInstance:
    """Return an instance of the pool's current spec whose pod is Ready and idle."""
    spec_hash, build_hash = hashes(pool, index)
    name = names.instance(pool.metadata.name, pool.role, index)
    pod = make_pod(
        f"{name}-0",
        ready=ready,
        ip=f"10.0.{1 if pool.role is Role.PREFILL else 2}.{index + 1}",
        spec_hash=spec_hash,
        build_hash=build_hash,
    )
    instance = ObservedInstance(
        index=index,
        name=name,
        uid=f"uid-of-{name}",
        controller_uid=pool.metadata.uid,
        deleting=False,
        spec_hash=spec_hash,
        build_hash=build_hash,
        replicas=1,
        drain_started=None,
        drain_reason="",
        pod=pod,
        labels=names.instance_labels(pool.metadata.name, pool.role, index),
    )
    return replace(instance, **changes)


def as_observed(obj: dict[str, Any]) -> ObservedObject:
    """Return an object as it is after it was applied."""
    meta = obj["metadata"]
    return ObservedObject(
        kind=obj["kind"],
        name=meta["name"],
        uid=f"uid-of-{obj['kind']}-{meta['name']}",
        controller_uid=meta["ownerReferences"][0]["uid"] if "ownerReferences" in meta else "",
        build_hash=meta["annotations"][names.ANNOTATION_BUILD_HASH],
        labels=None if obj["kind"] == "Secret" else meta["labels"],
    )


def make_observed(pool: Pool, *instances: ObservedInstance, **changes: Any) -> ObservedPool:
    observed = ObservedPool(
        pool=pool,
        instances=instances,
        objects=tuple(as_observed(obj) for obj in pool_objects(pool, SETTINGS)),
    )
    return replace(observed, **changes)


def make_sample(
    at: datetime = T0,
    *,
    pod_uid: str = "uid-of-chat-prefill-0-0",
    queues: dict[str, tuple[int, float | None, int | None]] | None = None,
    running: int | None = 0,
    holds: int = 0,
    beat_age_s: float | None = 0.05,
    incarnation: str = "a" * 32,
    rank: int = 0,
    connector_error: str = "",
) -> RankSample:
    """Return a sample of a rank. `queues` maps name to (reqs, oldest_s, moved_total).

    With `running=None` the engine did not answer.
    """
    connector = ConnectorSample(
        incarnation=incarnation,
        beat_age_s=beat_age_s,
        queues={name: QueueSample(*queue) for name, queue in (queues or {}).items()},
        holds=holds,
    )
    return RankSample(
        rank=rank,
        pod_uid=pod_uid,
        at=at,
        asked_at=at,
        connector=None if connector_error else connector,
        engine=None if running is None else EngineSample(running, 0, {}),
        connector_error=connector_error,
        engine_error="timeout" if running is None else "",
    )


def follow_all(samples: Iterable[RankSample]) -> RankTrack | None:
    """Return the track after a series of samples, oldest first."""
    track = None
    for sample in samples:
        track = follow(track, sample)
    return track

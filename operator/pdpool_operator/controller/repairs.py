"""Repairs instances at fault, as `plan.repair` decides: stores the intent first, and acts on what was read back."""

import asyncio
import contextlib
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from ..api.pools import PoolStatus, RepairRecord
from ..api.services import RepairMode
from ..build.pool import pool_spec_hash
from ..diagnose.evidence import current_connector
from ..diagnose.model import SOURCES, Diagnosis, Subject, Verdict
from ..diagnose.outcomes import WINDOW
from ..observe.cluster import Cluster
from ..observe.keys import Bindings, Key
from ..observe.model import ObservedPool
from ..plan.model import Purged
from ..plan.purge import PurgeOrder, PurgeProgress, purge_progress
from ..plan.repair import plan_repair
from ..plan.repair_model import AssessedInstance, Health, RepairPlan, purges_under_way
from ..plan.selection import AT_FAULT
from ..runtime.api import Api
from ..runtime.resources import PODS, POOL_RESOURCES
from ..status.serving import serving
from .engines import Engines
from .served_fields import ServedFields

TRIED = 2
"""A failing instance is at fault when it has also failed its trial."""
_RESOURCES = {resource.kind: resource for resource in POOL_RESOURCES.values()}


class Repairer:
    """Decides and carries out repairs, one pool after the other, so that pools of one service share its budget."""

    def __init__(self, api: Api, engines: Engines, bindings: Bindings, served: ServedFields) -> None:
        self._api, self._engines, self._bindings, self._served = api, engines, bindings, served
        self._deciding = asyncio.Lock()
        self._purged: dict[Key, dict[str, dict[int, Purged]]] = {}
        """The last answer of each rank to each purge under way: by pool, then by UID of the pod. An operator that has
        just started knows none, and asks again."""

    async def look(
        self,
        key: Key,
        body: dict[str, Any],
        observed: ObservedPool,
        diagnoses: Iterable[Diagnosis],
        now: datetime,
        cluster: Cluster,
    ) -> RepairPlan:
        """Return the repairs of a pool. If they are decided from live state, also carry them out.

        Raises:
            ApiError: the intent could not be stored, or the deed failed. The next reconcile decides again.
            NotLeaderError: another operator may be the leader.
        """
        diagnoses = tuple(diagnoses)
        spec = observed.repair
        if not self._can_store(key.kind) and spec.mode is RepairMode.ENFORCE:
            spec = spec.model_copy(update={"mode": RepairMode.OBSERVE})  # an intent could not be stored
        records = observed.pool.status.repairs
        progress = self._progress(key, observed, records, now)
        async with self._deciding if cluster.is_live else contextlib.nullcontext():
            partners = await self._records_of_partners(key, cluster)
            plan = plan_repair(spec, assessed(observed, diagnoses, now), records, partners, now, progress)
            if plan.intends and cluster.is_live:
                status = {**(body.get("status") or {}), "repairs": [record.to_dict() for record in plan.records]}
                await self._api.apply_status(_RESOURCES[key.kind], body, self._served.storable(key.kind, status))
        for pod in plan.restarts if cluster.is_live else ():
            await self._api.delete(PODS, key.namespace, pod.name, pod.uid, pod.grace_period_s)
        if cluster.is_live:
            await self._purge(key, plan)
        return plan

    def _can_store(self, kind: str) -> bool:
        """Whether the installed CRD has all fields by which an intent is read back."""
        intent = {"repairs": [dict.fromkeys(("action", "node", "podUID", "state"), "")]}
        return self._served.storable(kind, intent) == intent

    def _progress(
        self, key: Key, observed: ObservedPool, records: Iterable[RepairRecord], now: datetime
    ) -> dict[str, PurgeProgress]:
        """Return how far the intended purges of the pool are, by UID of the pod."""
        under_way, answers = purges_under_way(records), self._purged.pop(key, {})
        if under_way:
            self._purged[key] = {uid: answers.get(uid, {}) for uid in under_way}
        return {
            pod.uid: purge_progress(
                PurgeOrder(observed.stuck_after_s, under_way[pod.uid].since, f"repair of {instance.name}"),
                instance,
                answers.get(pod.uid, {}).values(),
                now,
            )
            for instance in observed.instances
            if (pod := instance.pod) is not None and pod.uid in under_way
        }

    async def _purge(self, key: Key, plan: RepairPlan) -> None:
        for answer in await asyncio.gather(*(self._engines.purge(purge) for purge in plan.purges)):
            self._purged[key].setdefault(answer.purge.pod_uid, {})[answer.purge.rank] = answer

    async def _records_of_partners(self, key: Key, cluster: Cluster) -> list[RepairRecord]:
        pools = sorted(self._bindings.partners(key))
        bodies = [await cluster.body(_RESOURCES[pool.kind], pool.namespace, pool.name) for pool in pools]
        return [record for body in bodies if body for record in _records(body)]


def _records(body: dict[str, Any]) -> tuple[RepairRecord, ...]:
    try:
        return PoolStatus.model_validate(body.get("status") or {}).repairs
    except ValueError:
        return ()  # a status of another version, which its own reconcile replaces


def assessed(observed: ObservedPool, diagnoses: Iterable[Diagnosis], now: datetime) -> tuple[AssessedInstance, ...]:
    """Return the instances of a pool that have a pod, as repair sees them."""
    diagnoses = tuple(diagnoses)
    serve = {instance.index for instance in serving(observed, diagnoses)}
    by_index = {diagnosis.subject.index: diagnosis for diagnosis in diagnoses}
    spec_hash = pool_spec_hash(observed.pool, observed.keys)
    return tuple(
        AssessedInstance(
            index=instance.index,
            pod=instance.pod.name,
            pod_uid=instance.pod.uid,
            terminating=instance.pod.terminating or instance.deleting,
            health=health(by_index.get(instance.index)),
            serves=instance.index in serve,
            useless=_useless(by_index.get(instance.index), now),
            purgeable=_purgeable(by_index.get(instance.index), now),
            node=instance.pod.node,
            movable=instance.spec_hash == spec_hash,
            avoids_node=instance.avoids_node,
            evidence=by_index[instance.index].message if instance.index in by_index else "",
        )
        for instance in observed.own
        if instance.pod is not None
    )


def health(diagnosis: Diagnosis | None) -> Health:
    """Return what a verdict means for repair."""
    if diagnosis is None:
        return Health.UNKNOWN
    standing = diagnosis.subject.standing
    tried = standing is not None and standing.times >= TRIED
    if diagnosis.verdict is Verdict.STUCK or (diagnosis.verdict is Verdict.FAILING and tried):
        return Health.AT_FAULT
    return Health.WELL if diagnosis.verdict.works else Health.UNKNOWN


def _purgeable(diagnosis: Diagnosis | None, now: datetime) -> bool:
    """Whether an instance is Stuck, and a connector of it answers. Engines without pdpool's connector have none."""
    if diagnosis is None or diagnosis.verdict is not Verdict.STUCK:
        return False
    return any(current_connector(track, now) is not None for track in diagnosis.subject.tracks)


def _useless(diagnosis: Diagnosis | None, now: datetime) -> bool:
    """Whether requests are counted at an instance at fault, and none has finished within a minute."""
    if diagnosis is None or diagnosis.verdict not in AT_FAULT:
        return False
    return _is_counted(diagnosis.subject) and not any(
        (done := diagnosis.subject.last_done(source)) is not None and now - done <= WINDOW for source in SOURCES
    )


def _is_counted(subject: Subject) -> bool:
    return bool(subject.routers) or any(track.ended is not None for track in subject.tracks)

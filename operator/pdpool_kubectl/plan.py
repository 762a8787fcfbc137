"""`plan`: what the operator would do if these pools and services were applied. Reads only.

The selection, the hashes and the drains are the operator's own functions. The file's spec counts as the whole spec,
except `replicas`: without it, the live number stays.
"""

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from pdpool_operator.api import names
from pdpool_operator.api.base import SpecInvalid
from pdpool_operator.api.key_epochs import FIRST_KEYS, KeyEpochs
from pdpool_operator.api.operations import PoolOperation
from pdpool_operator.api.pools import POOL_KINDS, Pool
from pdpool_operator.api.services import DisaggregatedService
from pdpool_operator.build.pool import instance_stateful_set, pool_spec_hash
from pdpool_operator.build.router import router_deployment, router_spec_hash
from pdpool_operator.build.settings import BuildSettings, PodDefaults
from pdpool_operator.build.template import TemplateInvalid
from pdpool_operator.observe import parse
from pdpool_operator.observe.kept_out import with_operations
from pdpool_operator.observe.model import ObservedInstance
from pdpool_operator.observe.stateful_sets import pods_by_owner
from pdpool_operator.plan.drain import needs_drain
from pdpool_operator.plan.selection import AT_FAULT, Selection, Selector
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.api_errors import ForbiddenError, InvalidError
from pdpool_operator.runtime.resources import (
    OPERATIONS,
    PODS,
    POOL_RESOURCES,
    SERVICES_PD,
    STATEFUL_SETS,
    Object,
    Resource,
)

from .plan_warnings import pool_warnings, service_warnings

KINDS: Mapping[str, Resource] = {kind.kind: POOL_RESOURCES[kind] for kind in POOL_KINDS} | {
    DisaggregatedService.kind: SERVICES_PD
}
ASSUMED = (
    BuildSettings("first", "first"),
    BuildSettings("second", "second", pods=PodDefaults("Always", ("second",), {}, {})),
)
"""Take the place of the operator's own settings, which users cannot read. Two specs that render the same pod with each
of these do so with the operator's."""
NOT_ALLOWED = " cannot "
"""In the refusal of a user without the right: `User "x" cannot patch resource …`. Admission refuses in other words."""
UNSAVED_UID = "not-created"


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """What would happen to one object and its instances."""

    kind: str
    namespace: str
    name: str
    exists: bool = True
    refusals: tuple[str, ...] = ()
    steps: tuple[tuple[str, str, str], ...] = ()
    """Instance or router, what is done (`restart`, `add`, `remove`, `update`), and how."""
    notes: tuple[str, ...] = ()
    """What the steps wait for, and what is not known."""
    unknown: bool = False
    """The steps are not known."""

    def to_dict(self) -> Object:
        """Return it for JSON."""
        return {
            "kind": self.kind,
            "namespace": self.namespace,
            "name": self.name,
            "exists": self.exists,
            "refusals": list(self.refusals),
            "steps": [{"name": name, "action": action, "how": how} for name, action, how in self.steps],
            "notes": list(self.notes),
            "known": not self.unknown,
        }


async def plan_objects(api: Api, bodies: list[Object], now: datetime) -> list[ObjectPlan]:
    """Return what would happen to each object if all of them were applied.

    Raises:
        ApiError: the API server refuses a read of pools or services, or does not answer.
    """
    return [await _plan(api, body, bodies, now) for body in bodies]


async def _plan(api: Api, body: Object, bodies: list[Object], now: datetime) -> ObjectPlan:
    resource, meta = KINDS[body["kind"]], body["metadata"]
    live = await api.get(resource, meta["namespace"], meta["name"])
    wanted = _wanted(live, body)
    refusals, notes = await _ask(api, resource, live, wanted)
    plan = ObjectPlan(body["kind"], meta["namespace"], meta["name"], live is not None, notes=notes)
    try:
        if resource == SERVICES_PD:
            before = DisaggregatedService.parse(live) if live is not None else None
            return _service_planned(replace(plan, refusals=refusals), before, DisaggregatedService.parse(wanted))
        kind = next(kind for kind in POOL_KINDS if kind.kind == body["kind"])
        pool = kind.parse(wanted)
        old = kind.parse(live) if live is not None else None
    except SpecInvalid as invalid:
        return replace(plan, refusals=refusals or (str(invalid),))
    if refusals:
        return replace(plan, refusals=refusals)
    try:
        observed = await _instances(api, pool, now) if live else []
    except ForbiddenError as error:
        return replace(plan, notes=(*notes, f"its instances are not known: {error}"), unknown=True)
    facts = _Facts(pool, old, observed, live or {}, await _routed(api, pool, bodies), now)
    return facts.planned(plan)


def _wanted(live: Object | None, body: Object) -> Object:
    """Return the object as it would be stored: what the operator keeps in `metadata` stays."""
    if live is None:
        meta = {"uid": UNSAVED_UID} | body["metadata"]
        return body | {"metadata": meta}
    annotations = (live["metadata"].get("annotations") or {}) | (body["metadata"].get("annotations") or {})
    spec = dict(body.get("spec") or {})
    replicas = (live.get("spec") or {}).get("replicas")
    if replicas is not None:
        spec.setdefault("replicas", replicas)
    return live | {"metadata": live["metadata"] | {"annotations": annotations}, "spec": spec}


async def _ask(
    api: Api, resource: Resource, live: Object | None, wanted: Object
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Let the API server judge the object. Return its refusals, and why it was not asked."""
    meta = wanted["metadata"]
    try:
        if live is None:
            created = {key: value for key, value in meta.items() if key != "uid"}
            await api.try_create(resource, wanted | {"metadata": created})
        else:
            changes = {"metadata": {"annotations": meta["annotations"]}}
            changes["spec"] = _changes(live.get("spec") or {}, wanted["spec"])
            await api.try_merge(resource, meta["namespace"], meta["name"], changes)
    except InvalidError as error:
        return (error.message,), ()
    except ForbiddenError as error:
        if NOT_ALLOWED not in error.message:
            return (error.message,), ()
        return (), (f"the API server did not check it: {error}",)
    return (), ()


def _changes(old: Object, new: Object) -> Object:
    """Return the JSON merge patch that turns `old` into `new`."""
    gone: Object = dict.fromkeys(old.keys() - new.keys())
    return gone | {
        key: _changes(old[key], value) if isinstance(value, dict) and isinstance(old.get(key), dict) else value
        for key, value in new.items()
        if old.get(key) != value
    }


async def _instances(api: Api, pool: Pool, now: datetime) -> list[ObservedInstance]:
    meta, role = pool.metadata, pool.role
    labels = names.pool_labels(meta.name, role)
    selector = names.selector_string(names.pool_selector(meta.name, role))
    sets = [sts async for sts in api.list(STATEFUL_SETS, meta.namespace, selector)]
    pods = [pod async for pod in api.list(PODS, meta.namespace, selector)]
    by_owner = pods_by_owner(pods)
    found = []
    for sts in sets:
        named = names.parse_instance(sts["metadata"]["name"])
        pod = by_owner.get(sts["metadata"]["uid"])
        if named is not None:
            found.append(parse.observed_instance(named[2], sts, pod, labels, now))
    operations = [one async for one in _operations(api, meta.namespace)]
    ours = (with_operations(one, operations) for one in found if one.belongs_to(meta.uid))
    return sorted(ours, key=lambda one: one.index)


async def _operations(api: Api, namespace: str) -> AsyncIterator[PoolOperation]:
    """Yield the operations that fit their model. The operator leaves the others alone."""
    async for body in api.list(OPERATIONS, namespace):
        with contextlib.suppress(SpecInvalid):
            yield PoolOperation.parse(body)


async def _routed(api: Api, pool: Pool, bodies: Iterable[Object]) -> bool:
    """Whether a service with a router binds the pool, once the file is applied."""
    namespace = pool.metadata.namespace
    services = {one["metadata"]["name"]: one async for one in api.list(SERVICES_PD, namespace)}
    services |= {
        one["metadata"]["name"]: one
        for one in bodies
        if one["kind"] == DisaggregatedService.kind and one["metadata"]["namespace"] == namespace
    }
    for body in services.values():
        spec = body.get("spec") or {}
        bound = ((spec.get(str(pool.role)) or {}).get("poolRef") or {}).get("name")
        if bound == pool.metadata.name and (spec.get("router") or {}).get("enabled", True):
            return True
    return False


@dataclass(frozen=True, slots=True)
class _Facts:
    pool: Pool
    """As it would be."""
    old: Pool | None
    instances: list[ObservedInstance]
    live: Object
    routed: bool
    now: datetime

    @property
    def keys(self) -> KeyEpochs:
        """The newest keys of the pool's pods. A rotation of keys is not part of the file."""
        return max((one.pod.keys for one in self.instances if one.pod), default=FIRST_KEYS)

    def planned(self, plan: ObjectPlan) -> ObjectPlan:
        """Return the plan with its steps."""
        try:
            builds = self._builds()
            if self.pool.spec.replicas > 0:
                instance_stateful_set(self.pool, 0, ASSUMED[0], self.keys)
        except TemplateInvalid as invalid:
            return replace(plan, refusals=(f"The operator refuses the template: {invalid}",))
        selector = Selector(self.pool, pool_spec_hash(self.pool, self.keys), builds, self._at_fault(), self.now)
        selection = selector.select(self.instances)
        notes = (*plan.notes, *pool_warnings(self.old, self.pool))
        if len({one.pod.keys for one in self.instances if one.pod}) > 1:
            notes = (*notes, "a rotation of keys is under way; it replaces pods, whatever the file says")
        paused = [one for one in self.instances if one.kept_out_by]
        if paused and any(selector.outdated(one) for one in selection.kept):
            notes = (*notes, f"restarts wait for the end of PoolOperation {paused[0].kept_out_by}")
        return replace(plan, steps=tuple(self._steps(selector, selection)), notes=notes)

    def _builds(self) -> dict[int, str]:
        """Return the build hash of each pod that the new spec renders as the old one does, by index."""
        same: dict[int, str] = {}
        for one in self.instances:
            made = one.pod or one
            if self.old is None or made.spec_hash != pool_spec_hash(self.old, self.keys):
                continue
            if self._builds_of(self.old, one.index) == self._builds_of(self.pool, one.index):
                same[one.index] = made.build_hash
        return same

    def _builds_of(self, pool: Pool, index: int) -> list[str]:
        built = [instance_stateful_set(pool, index, settings, self.keys) for settings in ASSUMED]
        return [str(one["metadata"]["annotations"][names.ANNOTATION_BUILD_HASH]) for one in built]

    def _at_fault(self) -> set[int]:
        instances = (self.live.get("status") or {}).get("instances") or ()
        return {one["index"] for one in instances if one.get("verdict") in AT_FAULT}

    def _steps(self, selector: Selector, selection: Selection) -> Iterator[tuple[str, str, str]]:
        added = [names.instance(self.pool.metadata.name, self.pool.role, index) for index in selection.missing]
        for name in added:
            yield name, "add", "it takes over before the old instance goes" if selection.surge else "a new instance"
        for one in selection.surplus:
            yield one.name, "remove", self._way(one)
        outdated = selector.in_turn([one for one in selection.kept if selector.outdated(one)])
        for one in outdated:
            if selection.surge and added:
                yield one.name, "remove", f"once {added[0]} serves; {self._way(one)}"
            else:
                yield one.name, "restart", f"{self._way(one)}; one instance at a time"

    def _way(self, one: ObservedInstance) -> str:
        if needs_drain(one, routed=self.routed):
            return f"drained for up to {self.pool.spec.drain_timeout_seconds} s"
        if one.pod is not None and one.pod.ready:
            return "no router of pdpool's sends it requests: its grace period ends them"
        return "at once, unless the operator knows of requests there"


def _service_planned(plan: ObjectPlan, old: DisaggregatedService | None, new: DisaggregatedService) -> ObjectPlan:
    if plan.refusals:
        return plan
    try:
        router_deployment(new, ASSUMED[0])
    except TemplateInvalid as invalid:
        return replace(plan, refusals=(f"The operator refuses the template: {invalid}",))
    return replace(plan, steps=tuple(_router_steps(old, new)), notes=(*plan.notes, *service_warnings(old, new)))


def _router_steps(old: DisaggregatedService | None, new: DisaggregatedService) -> Iterator[tuple[str, str, str]]:
    name = names.router(new.metadata.name)
    before = old is not None and not old.spec.watches and old.spec.router.enabled
    after = not new.spec.watches and new.spec.router.enabled
    if after and not before:
        yield name, "add", f"{new.spec.router.replicas} replicas"
    if before and not after:
        yield name, "remove", "with its Service: clients lose their address"
    if old is None or not (before and after):
        return
    if router_spec_hash(old) != router_spec_hash(new):
        yield name, "restart", "a rolling update of its Deployment"
    if old.spec.router.replicas != new.spec.router.replicas:
        yield name, "scale", f"from {old.spec.router.replicas} to {new.spec.router.replicas} replicas"


def plan_lines(plans: Iterable[ObjectPlan]) -> Iterator[str]:
    """Yield the text of `plan`."""
    for plan in plans:
        yield f"{plan.kind} {plan.namespace}/{plan.name}: {_summary(plan)}"
        yield from (f"  ! {text}" for text in plan.refusals)
        yield from (f"  {name}: {action}: {how}" for name, action, how in plan.steps)
        yield from (f"  ? {text}" for text in plan.notes)


def _summary(plan: ObjectPlan) -> str:
    if plan.refusals:
        return "refused"
    if plan.unknown:
        return "not known"
    if not plan.steps:
        return "changes nothing that runs" if plan.exists else "is created, and starts nothing"
    counts: dict[str, int] = {}
    for _, action, _ in plan.steps:
        counts[action] = counts.get(action, 0) + 1
    return ", ".join(f"{count} to {action}" for action, count in counts.items())

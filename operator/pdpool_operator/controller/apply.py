"""Carries out a plan. Only this module writes objects that the operator owns, and to routers."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..api.reasons import Reason
from ..observe.http import Unanswered
from ..observe.routers import RouterClient
from ..plan.model import Fault, Plan, WorkerAction, WorkerChange
from ..runtime.api import Api
from ..runtime.api_errors import ApiError, ForbiddenError, InvalidError, NameConflictError
from ..runtime.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    PODS,
    SECRETS,
    SERVICES,
    STATEFUL_SETS,
)

RESOURCES = {
    resource.kind: resource
    for resource in (
        STATEFUL_SETS,
        DEPLOYMENTS,
        SERVICES,
        DISRUPTION_BUDGETS,
        NETWORK_POLICIES,
        CONFIG_MAPS,
        SECRETS,
        PODS,
    )
}
RouterKey = Callable[[str, int], str]
"""Key of a namespace's routers of one epoch."""

WORKLOADS = {STATEFUL_SETS.kind, DEPLOYMENTS.kind}


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """Result of carrying out a plan."""

    faults: tuple[Fault, ...] = ()
    """The API server's refusals, in its own words."""
    unsettled: tuple[str, ...] = ()
    """Changes of worker lists that a router refused, or that its list does not show yet, as text."""
    workers: tuple[WorkerChange, ...] = ()
    """Changes of worker lists that routers accepted. The next plan has only those that the lists do not show yet."""


@dataclass(frozen=True, slots=True)
class _Changed:
    """Result of one change of a worker list."""

    change: WorkerChange
    accepted: bool
    unsettled: str = ""
    """Why the list does not show the change. Empty if it does."""


async def carry_out(plan: Plan, namespace: str, api: Api, routers: RouterClient, router_key: RouterKey) -> ApplyResult:
    """Carry out the plan in its order.

    If the API server refuses an object, the other objects are still applied. Disruptive steps are then skipped, because
    the plan assumed that object. Worker lists are changed in any case, because an engine that left the rotation must
    not get requests.

    Raises:
        ApiError: the API server failed (busy, conflict). The next reconcile makes a new plan.
    """
    failure: ApiError | None = None
    faults: list[Fault] = []
    try:
        await _write(plan, namespace, api, faults)
    except ApiError as error:
        failure = error
    changed = await _change_workers(plan.workers, routers, lambda epoch: router_key(namespace, epoch))
    if failure is not None:
        raise failure
    return ApplyResult(
        faults=tuple(faults),
        unsettled=tuple(one.unsettled for one in changed if one.unsettled),
        workers=tuple(one.change for one in changed if one.accepted),
    )


async def _write(plan: Plan, namespace: str, api: Api, faults: list[Fault]) -> None:
    """Write the plan's objects. Add refusals to `faults`."""
    for orphan in plan.adopt:
        await api.adopt(RESOURCES[orphan.kind], namespace, orphan.name, orphan.uid, orphan.owner)
    for obj in plan.verify:
        faults += await _apply(api, obj, dry_run=True)
    for obj in () if faults else plan.apply:
        refused = await _apply(api, obj)
        faults += refused
        if refused and obj["kind"] == SECRETS.kind:
            break  # the Service applied next would claim that the Secret exists
    for patch in plan.put_back if faults else plan.patch:
        await api.merge(RESOURCES[patch.kind], namespace, patch.name, patch.body)
    for gone in () if faults else plan.delete:
        await api.delete(RESOURCES[gone.kind], namespace, gone.name, gone.uid, gone.grace_period_s)


async def _apply(api: Api, obj: Mapping[str, Any], *, dry_run: bool = False) -> list[Fault]:
    kind, name = obj["kind"], obj["metadata"]["name"]
    try:
        if kind == SECRETS.kind:
            await api.apply_unread(SECRETS, obj)
        else:
            await api.apply(RESOURCES[kind], obj, dry_run=dry_run)
    except NameConflictError as conflict:
        return [Fault(Reason.NAME_CONFLICT, str(conflict))]
    except InvalidError as invalid:
        reason = Reason.TEMPLATE_INVALID if kind in WORKLOADS else Reason.APPLY_FAILED
        return [Fault(reason, f"The API server refuses {kind} {name}: {invalid.message}")]
    except ForbiddenError as forbidden:
        return [Fault(Reason.APPLY_FAILED, f"The API server refuses {kind} {name}: {forbidden.message}")]
    return []


async def _change_workers(
    changes: tuple[WorkerChange, ...], routers: RouterClient, key: Callable[[int], str]
) -> list[_Changed]:
    """Change the lists of all routers at the same time, each in the plan's order."""
    by_router: dict[str, list[WorkerChange]] = {}
    for change in changes:
        by_router.setdefault(change.router, []).append(change)
    changed = await asyncio.gather(*(_change_router(some, routers, key) for some in by_router.values()))
    return [one for some in changed for one in some]


async def _change_router(
    changes: list[WorkerChange], routers: RouterClient, key: Callable[[int], str]
) -> list[_Changed]:
    """Change one list in the plan's order. Consecutive changes of one kind run at the same time.

    Changes after additions wait until the additions show, because they may remove the last engine of a side.
    """
    changed: list[_Changed] = []
    for action, some in itertools.groupby(changes, key=lambda change: change.action):
        results = await asyncio.gather(*(_change(change, routers, key(change.key_epoch)) for change in some))
        changed += results
        if action is WorkerAction.ADD and any(result.unsettled for result in results):
            break
    return changed


async def _change(change: WorkerChange, routers: RouterClient, key: str) -> _Changed:
    """Make one change."""
    what = f"{change.router}: {change.action} {change.role} {change.url}"
    try:
        if change.action is WorkerAction.REMOVE:
            shows = await routers.remove(change.router_ip, key, change.worker_id)
        else:
            shows = await routers.add(change.router_ip, key, change.url, change.role, change.bootstrap_port)
    except Unanswered as silence:
        return _Changed(change, accepted=False, unsettled=f"{what}: {silence}")
    return _Changed(change, accepted=True, unsettled="" if shows else f"{what}: does not show yet")

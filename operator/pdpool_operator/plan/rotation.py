"""Computes the worker list that each router replica should have, and the changes that lead to it.

Per role, let  serving  be the engines that are Ready, neither drain nor terminate, and have an address. Let  out  be
those that are failing, stuck or unfit, or that avoid a cut between engines (`ObservedInstance.out`). Then

    desired = serving and not out          if there are any
    desired = serving                      otherwise, if there are any
    desired = listed so far and present    otherwise

A pool that does not exist may have left engines (`kubectl delete --cascade=orphan`). Those that are listed, Ready and
do not terminate stay listed, so that they serve until a pool of that name adopts them.

where *present* engines have a pod with that address that neither drains nor terminates. So neither an outage of
readiness nor a verdict empties a list. Routers check health themselves, and a list with unhealthy workers is better
than an empty one.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..api import names
from ..api.names import Role
from ..observe.model import ObservedInstance, ObservedPool, ObservedRouter, ObservedService, RouterWorker
from .model import WorkerAction, WorkerChange


@dataclass(frozen=True, slots=True)
class Rotation:
    """Pod addresses of the engines that routers should list."""

    prefill: frozenset[str]
    decode: frozenset[str]

    def roles_by_url(self) -> dict[str, Role]:
        """Role of each engine by its URL."""
        return {
            **{names.engine_url(ip): Role.PREFILL for ip in self.prefill},
            **{names.engine_url(ip): Role.DECODE for ip in self.decode},
        }


def desired_rotation(observed: ObservedService) -> Rotation:
    """Compute the desired rotation from the pods. If none of a role is Ready, the present list counts."""
    listed = _listed_urls(observed.workers_json)
    return Rotation(
        _addresses(observed.prefill, listed) or _orphans(observed, Role.PREFILL, listed),
        _addresses(observed.decode, listed) or _orphans(observed, Role.DECODE, listed),
    )


def receiving(pool: ObservedPool) -> frozenset[str]:
    """Return the addresses of a pool's Ready engines that should get requests."""
    return _addresses(pool, frozenset())


def worker_changes(router: ObservedRouter, rotation: Rotation) -> tuple[WorkerChange, ...]:
    """Return the changes for one router whose list is known, in the order in which to make them.

    Removals come first, because an address with a changed role can be added only after its old entry is removed.
    Removals that would leave a side without an engine come last.
    """
    if router.workers is None or router.pod.ip is None:
        return ()
    desired = rotation.roles_by_url()
    right = {worker.url for worker in router.workers if _is_right(worker, desired)}
    missing = {url: role for url, role in desired.items() if url not in right}
    bare = set(missing.values()) - {desired[url] for url in right}
    removals = list(_removals(router, right))
    last = [change for change in removals if change.role in bare and change.url not in missing]
    return (*(change for change in removals if change not in last), *_additions(router, missing), *last)


def _removals(router: ObservedRouter, right: set[str]) -> Iterator[WorkerChange]:
    assert router.workers is not None
    assert router.pod.ip is not None
    for worker in sorted(router.workers, key=lambda worker: worker.url):
        if worker.url not in right:
            yield WorkerChange(
                router=router.pod.name,
                router_ip=router.pod.ip,
                action=WorkerAction.REMOVE,
                url=worker.url,
                role=worker.role,
                key_epoch=router.pod.keys.newest,
                worker_id=worker.id,
            )


def _additions(router: ObservedRouter, wanted: Mapping[str, Role]) -> Iterator[WorkerChange]:
    assert router.pod.ip is not None
    for url, role in sorted(wanted.items()):
        yield WorkerChange(
            router=router.pod.name,
            router_ip=router.pod.ip,
            action=WorkerAction.ADD,
            url=url,
            role=role,
            key_epoch=router.pod.keys.newest,
            bootstrap_port=_bootstrap_port(role),
        )


def _is_right(worker: RouterWorker, desired: Mapping[str, Role]) -> bool:
    role = desired.get(worker.url)
    if role is None or role is not worker.role:
        return False
    return role is Role.DECODE or worker.bootstrap_port == _bootstrap_port(role)


def _bootstrap_port(role: Role) -> int | None:
    return names.BOOTSTRAP_PORT if role is Role.PREFILL else None


def _addresses(pool: ObservedPool | None, listed: frozenset[str]) -> frozenset[str]:
    if pool is None:
        return frozenset()
    present = {ip: instance for instance in pool.own if (ip := _address(instance)) is not None}
    serving = frozenset(ip for ip, instance in present.items() if instance.pod is not None and instance.pod.ready)
    healthy = frozenset(ip for ip in serving if not present[ip].out)
    return healthy or serving or frozenset(ip for ip in present if names.engine_url(ip) in listed)


def _orphans(observed: ObservedService, role: Role, listed: frozenset[str]) -> frozenset[str]:
    return frozenset(
        pod.ip
        for pod in observed.orphans.get(role, ())
        if pod.ip is not None and pod.takes_requests and names.engine_url(pod.ip) in listed
    )


def _address(instance: ObservedInstance) -> str | None:
    """Return the address of an engine that may be in rotation, Ready or not."""
    pod = instance.pod
    if pod is None or pod.terminating or pod.ended:
        return None
    if instance.deleting or instance.drain_started is not None:
        return None
    return pod.ip


def _listed_urls(workers_json: str | None) -> frozenset[str]:
    """Return the URLs of the last written list. A list that cannot be parsed counts as empty, and is rewritten soon."""
    try:
        lists = json.loads(workers_json or "{}")
        return frozenset(str(entry["url"]) for role in ("prefill", "decode") for entry in lists.get(role, []))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return frozenset()

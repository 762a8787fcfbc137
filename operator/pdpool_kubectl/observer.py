"""What the operator would observe in a look of a recording: pools, sides of fleets, and the pods that it samples.

`record` asks exactly these pods, and `replay` judges them.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pdpool_operator.api import names
from pdpool_operator.api.base import SpecInvalid
from pdpool_operator.api.pools import POOL_KINDS, Pool
from pdpool_operator.api.services import STUCK_AFTER_S, DisaggregatedService
from pdpool_operator.observe import parse
from pdpool_operator.observe.fleet_sides import bindings_of, fleet_side
from pdpool_operator.observe.keys import FLEET_PREFIX, Bindings, Key
from pdpool_operator.observe.model import ObservedPool
from pdpool_operator.observe.stateful_sets import pods_by_owner
from pdpool_operator.observe.targets import Target, pool_targets

from .recording import Look


@dataclass(frozen=True, slots=True)
class Observed:
    """A pool, or one side of a fleet in the shape of a pool."""

    key: Key
    pool: ObservedPool
    targets: tuple[Target, ...]
    """The pods that the operator samples."""


class Observer:
    """Observes the looks of one namespace, in order.

    A pod that two services select stays with the service that watched it first.
    """

    def __init__(self) -> None:
        self.bindings = Bindings()
        self._services: frozenset[Key] = frozenset()
        self._targets: dict[str, Target] = {}
        """By UID of the pod."""

    def observe(self, look: Look) -> list[Observed]:
        """Return all pools and sides that a look shows."""
        services = list(parsed_services(look.services))
        self._bind(services)
        seen = [self._watch(_pool(pool, look, self._stuck_after_s(pool, services))) for pool in _pools(look)]
        for service in services:
            if service.spec.watches:
                seen += [self._watch(self._side(service, kind, look)) for kind in POOL_KINDS]
        self._targets = {target.pod_uid: target for one in seen for target in one.targets}
        return seen

    def _bind(self, services: Sequence[DisaggregatedService]) -> None:
        for service in services:
            spec, fleet = service.spec, f"{FLEET_PREFIX}{service.metadata.name}"
            pools = (fleet, fleet) if spec.watches else (spec.prefill.pool_name, spec.decode.pool_name)
            self.bindings.bind(_key(service), *pools)
        present = frozenset(map(_key, services))
        for gone in self._services - present:
            self.bindings.drop(gone)
        self._services = present

    def _stuck_after_s(self, pool: Pool, services: Sequence[DisaggregatedService]) -> float:
        bound = self.bindings.services(_key(pool))
        return min(
            (float(one.spec.stuck_after_seconds) for one in services if _key(one) in bound), default=STUCK_AFTER_S
        )

    def _side(self, service: DisaggregatedService, kind: type[Pool], look: Look) -> Observed:
        selected = {
            role: [pod for pod in look.pods if names.has_labels(pod, binding.selector or {})]
            for role, binding in bindings_of(service).items()
        }
        side = fleet_side(service, kind, selected, self._targets.get)
        return Observed(_key(side.pool), side.observed(lambda _: {}), side.targets)

    def _watch(self, one: Observed) -> Observed:
        """Remember the targets in place of earlier ones of the same pool or side."""
        role = one.pool.pool.role
        others = {uid: t for uid, t in self._targets.items() if (t.pool, t.role) != (one.key.name, role)}
        self._targets = others | {target.pod_uid: target for target in one.targets}
        return one


def _key(one: Pool | DisaggregatedService) -> Key:
    return Key(one.kind, one.metadata.namespace, one.metadata.name)


def parsed_services(bodies: Iterable[dict[str, Any]]) -> Iterator[DisaggregatedService]:
    """Yield the services. One whose spec does not fit is left out, as by the operator."""
    for body in bodies:
        with contextlib.suppress(SpecInvalid):
            yield DisaggregatedService.parse(body)


def _pools(look: Look) -> Iterator[Pool]:
    for kind in POOL_KINDS:
        for body in (body for body in look.pools if body["kind"] == kind.kind):
            with contextlib.suppress(SpecInvalid):
                yield kind.parse(body)


def _pool(pool: Pool, look: Look, stuck_after_s: float) -> Observed:
    labels = names.pool_labels(pool.metadata.name, pool.role)
    by_owner = pods_by_owner(look.pods)
    now = datetime.fromisoformat(look.at)
    instances = [
        parse.observed_instance(int(index), sts, by_owner.get(sts["metadata"]["uid"]), labels, now)
        for sts in look.stateful_sets
        if names.has_labels(sts, labels) and (index := sts["metadata"]["labels"].get(names.LABEL_INSTANCE))
    ]
    ordered = tuple(sorted(instances, key=lambda instance: instance.index))
    observed = ObservedPool(pool=pool, instances=ordered, objects=(), stuck_after_s=stuck_after_s)
    return Observed(_key(pool), observed, tuple(pool_targets(pool, ordered)))

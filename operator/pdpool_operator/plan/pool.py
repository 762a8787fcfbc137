"""Plans the next safe actions for one pool.

Let n = spec.replicas and H = the hash of the user's spec without replicas. An instance (one StatefulSet) is

    surplus     the pool has too many, and `selection` chose it

    outdated    its pod was built from another spec than H (without a pod: its StatefulSet)

    available   its pod is Ready, does not terminate, and the instance does not drain

Goal: exactly n instances exist, none is outdated, none drains. Each call takes all steps below that apply. The state
between calls is only in the cluster: two annotations on the StatefulSet. An operator that is killed at any point
continues from there.

1. Create every missing instance. Create or update the pool's other objects that are missing or built differently.
2. Update StatefulSets where that disturbs no pod. A cause is a template whose pod is already of H. Others are a changed
   `replicas`, removed labels, and an edit by another manager of what this operator built. Repair may let the next pod
   of an instance avoid a node.
3. Cancel drains whose reason no longer holds.
4. Continue drains. When an instance is drained, or its time is over, remove it (surplus) or replace it (outdated).
   To replace means: apply the new template, then delete the pod by its UID.
5. Remove surplus instances that need no drain. If nothing drains, begin one drain: of the first surplus instance,
   else of the first outdated one. `selection` has the order. An outdated instance that needs no drain is replaced.

Step 5 takes an outdated instance only while every instance of H is available and not at fault. An instance of H that is
not available was just replaced, was just created, or fails. This rule has three effects. A serving instance is taken
only if all others are available. At most one instance at a time is unavailable because of the operator. A spec that
does not start stops at the first instance. The only instance of a pool is taken when a second one serves.

Nothing is taken out of service while the template is invalid, a name is taken, or the API server refuses an object.
Desired instances that drain return to service, because the error may last long. Their drain starts again when the error
is fixed.

A `PoolOperation` may keep an instance out of the rotation. Step 4 leaves such an instance alone. While there is one,
step 5 takes no outdated instance. A surplus one is still removed, and the one that is kept out goes first.

Steps 1 and 2 are in `pool_workloads`, steps 3 to 5 in `pool_drains`.

A change of what the builders render under an unchanged H (another operator version) is no step: see `UpdateAvailable`.
Kubernetes restarts failed pods, as long as the StatefulSet exists.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from ..api.names import ANNOTATION_BUILD_HASH
from ..api.reasons import Reason
from ..build.pool import instance_stateful_set, pool_objects, pool_spec_hash
from ..build.settings import BuildSettings
from ..build.template import TemplateInvalid
from ..observe.model import ObservedPool
from .model import Fault, Plan, join
from .objects import ExistingObject, blocked, missing_or_changed, restored, surplus_policies
from .pool_drains import begin, cancel, go_on, put_back
from .pool_reports import built_otherwise, lacking_room, same_build, waiting_for
from .pool_state import PoolState
from .pool_workloads import align, create
from .repair_model import avoided_nodes
from .selection import Selector


def plan_pool(
    observed: ObservedPool, settings: BuildSettings, now: datetime, at_fault: Collection[int] = frozenset()
) -> Plan:
    """Return the next actions for the pool. Empty if the goal is reached.

    Args:
        observed: The pool as it is.
        settings: For the builders.
        now: The present time.
        at_fault: Indexes of the instances whose verdict is one of `selection.AT_FAULT`.
    """
    pool = observed.pool
    if pool.metadata.deletion_timestamp is not None:
        return Plan()
    ours = observed.own
    keys, avoided = observed.keys, avoided_nodes(pool.status.repairs, now)
    invalid: TemplateInvalid | None = None
    wanted: dict[int, dict[str, Any]] = {}

    def built(indexes: Iterable[int]) -> dict[int, dict[str, Any]]:
        return {one: instance_stateful_set(pool, one, settings, keys, avoided.get(one, "")) for one in indexes}

    try:
        wanted = built(instance.index for instance in ours)
    except TemplateInvalid as error:
        invalid = error
    builds = {index: sts["metadata"]["annotations"][ANNOTATION_BUILD_HASH] for index, sts in wanted.items()}
    selector = Selector(pool, pool_spec_hash(pool, keys), builds, at_fault, now)
    selection = selector.select(ours)
    surplus = tuple(instance.name for instance in selection.surplus)
    needed_again = put_back(ours, selection)
    if taken := blocked(pool, _standing(observed)):
        return replace(taken, patch=needed_again, surplus=surplus)
    try:
        wanted |= built(selection.missing)
    except TemplateInvalid as error:
        invalid = error
    if invalid is not None and pool.spec.replicas > 0:
        return Plan(faults=(Fault(Reason.TEMPLATE_INVALID, str(invalid)),), patch=needed_again, surplus=surplus)
    state = PoolState(pool, observed, selector, selection, wanted, avoided, now)
    objects = pool_objects(pool, settings)
    support = missing_or_changed(objects, observed.objects)
    events = restored(objects, observed.objects, set_up=pool.status.observed_generation > 0)
    lacking = lacking_room(state)
    plan = join(
        [
            lacking,
            Plan(apply=support, events=events, delete=surplus_policies(objects, observed.objects)),
            create(state),
            align(state),
            cancel(state),
            go_on(state),
            begin(state),
        ]
    )
    return replace(
        plan,
        put_back=needed_again,
        progress=plan.progress or waiting_for(state),
        surplus=surplus,
        stops_serving=lacking.progress.message if lacking.progress else "",
        same_build=same_build(state),
        update_available=built_otherwise(state),
    )


def _standing(observed: ObservedPool) -> list[tuple[str, ExistingObject]]:
    return [
        *(("StatefulSet", instance) for instance in observed.instances),
        *((obj.kind, obj) for obj in observed.objects),
    ]

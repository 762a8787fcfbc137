"""A small deterministic Kubernetes for planners.

It has StatefulSets under OnDelete, pods that start, serve and end, and one router. One `tick` is a second. Plans are
carried out as the runtime does it. They may be cut after any number of actions, as when the operator is killed.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from pdpool_operator.api import names
from pdpool_operator.api.names import Role
from pdpool_operator.api.pools import Pool
from pdpool_operator.build.settings import BuildSettings
from pdpool_operator.observe import parse
from pdpool_operator.observe.model import ObservedInstance, ObservedObject, ObservedPool
from pdpool_operator.plan.model import Delete, Patch, Plan
from pdpool_operator.plan.pool import plan_pool

from tests.unit.operator.plan.makers import SETTINGS, T0, as_observed, make_pod, make_pool, make_sample, seconds

STARTS_IN = 3
ENDS_IN = 2
BAD_MODEL = "/models/bad"


@dataclass
class Pod:
    uid: str
    template: dict[str, Any]
    age: int = 0
    load: int = 0
    terminating_for: int | None = None
    failing: bool = False

    @property
    def ready(self) -> bool:
        bad = f"--model-path={BAD_MODEL}" in self.template["spec"]["containers"][0]["args"]
        return self.age >= STARTS_IN and not bad and not self.failing and self.terminating_for is None

    def annotation(self, key: str) -> str:
        return str(self.template["metadata"]["annotations"][key])


@dataclass
class Sts:
    uid: str
    body: dict[str, Any]
    annotations: dict[str, str]
    labels: dict[str, str]
    pod: Pod | None = None
    listed: bool = False


@dataclass
class World:
    pool: Pool = field(default_factory=lambda: make_pool(drainTimeoutSeconds=20))
    settings: BuildSettings = SETTINGS
    work_per_pod: int = 3
    now: int = 0
    sets: dict[str, Sts] = field(default_factory=dict)
    objects: dict[tuple[str, str], ObservedObject] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    """Names of desired instances that the operator took out of service and that do not serve again yet."""
    trace: list[str] = field(default_factory=list)
    """Executed actions, in short words."""
    serial: int = 0

    def want(self, **spec: Any) -> None:
        """Edit the pool's spec."""
        merged = {**self.pool.spec.to_dict(), **spec}
        self.pool = self.pool.model_copy(update={"spec": type(self.pool.spec).model_validate(merged)})

    def observe(self) -> ObservedPool:
        instances = [self._observe(name, sts) for name, sts in self.sets.items()]
        return ObservedPool(
            pool=self.pool,
            instances=tuple(sorted(instances, key=lambda instance: instance.index)),
            objects=tuple(self.objects.values()),
        )

    def plan(self) -> Plan:
        return plan_pool(self.observe(), self.settings, T0 + seconds(self.now))

    def carry_out(self, plan: Plan, actions: int | None = None) -> None:
        """Carry out the first actions of a plan, as many as given."""
        steps = [*plan.apply, *plan.patch, *plan.delete]
        for step in steps[:actions]:
            if isinstance(step, Patch):
                self._patch(step)
            elif isinstance(step, Delete):
                self._delete(step)
            else:
                self._apply(step)

    def tick(self) -> None:
        """One second passes: the StatefulSet controller, kubelets, clients and the router act."""
        self.now += 1
        for name, sts in self.sets.items():
            pod = sts.pod
            if pod is None:
                sts.pod = self._new_pod(sts)
                continue
            pod.age += 1
            if pod.terminating_for is not None:
                pod.terminating_for += 1
                if pod.terminating_for >= ENDS_IN:
                    sts.pod = None
            in_rotation = pod.ready and names.ANNOTATION_DRAIN_STARTED not in sts.annotations
            sts.listed = in_rotation
            pod.load = self.work_per_pod if in_rotation else max(0, pod.load - 1)
            if in_rotation and name in self.taken:
                self.taken.remove(name)
        self.taken = [name for name in self.taken if name in self.sets]

    def settle(self, limit: int = 400) -> None:
        """Plan and carry out, second by second, until the goal is reached.

        Raises:
            AssertionError: it is not reached in time.
        """
        for _ in range(limit):
            plan = self.plan()
            if not plan.acts and plan.progress is None:
                return
            self.carry_out(plan)
            self.tick()
        raise AssertionError(f"not settled after {limit} s: {self.plan().progress}; {self.trace[-10:]}")

    def fail(self, *names: str) -> None:
        """These pods become unready, have no work, and have left the router's list."""
        for name in names:
            sts = self.sets[name]
            assert sts.pod is not None
            sts.pod.failing, sts.pod.load, sts.listed = True, 0, False

    def index(self, name: str) -> int:
        return int(name.rsplit("-", 1)[1])

    def _uid(self) -> str:
        self.serial += 1
        return f"uid-{self.serial}"

    def _new_pod(self, sts: Sts) -> Pod:
        return Pod(self._uid(), sts.body["spec"]["template"])

    def _apply(self, obj: dict[str, Any]) -> None:
        kind, name = obj["kind"], obj["metadata"]["name"]
        if kind != "StatefulSet":
            self.objects[kind, name] = as_observed(obj)
            self.trace.append(f"apply {kind}")
            return
        verb = "update" if name in self.sets else "create"
        self.trace.append(f"{verb} {self.index(name)}")
        if name in self.sets:
            applied, annotations = self.sets[name].body["metadata"]["annotations"], self.sets[name].annotations
            kept = {key: value for key, value in annotations.items() if key not in applied}
            self.sets[name].body = obj
            self.sets[name].annotations = kept | obj["metadata"]["annotations"]
            self.sets[name].labels |= obj["metadata"]["labels"]
        else:
            meta = obj["metadata"]
            self.sets[name] = Sts(self._uid(), obj, dict(meta["annotations"]), dict(meta["labels"]))

    def _patch(self, patch: Patch) -> None:
        sts = self.sets[patch.name]
        assert patch.body["metadata"]["uid"] == sts.uid
        for key, value in patch.body["metadata"].get("annotations", {}).items():
            if value is None:
                sts.annotations.pop(key, None)
            else:
                sts.annotations[key] = value
        draining = names.ANNOTATION_DRAIN_STARTED in sts.annotations
        if "annotations" in patch.body["metadata"]:
            self.trace.append(f"{'drain' if draining else 'undrain'} {self.index(patch.name)}")
        if draining and sts.annotations[names.ANNOTATION_DRAIN_REASON] == "Update" and patch.name not in self.taken:
            self.taken.append(patch.name)
        if labels := patch.body["metadata"].get("labels"):
            sts.labels |= labels
            self.trace.append(f"label {self.index(patch.name)}")
        if "spec" in patch.body:
            sts.body = {**sts.body, "spec": {**sts.body["spec"], **patch.body["spec"]}}
            self.trace.append(f"resize {self.index(patch.name)}")

    def _delete(self, deletion: Delete) -> None:
        if deletion.kind == "StatefulSet":
            sts = self.sets.pop(deletion.name)
            assert deletion.uid == sts.uid
            self.trace.append(f"remove {self.index(deletion.name)}")
            return
        for name, sts in self.sets.items():
            if sts.pod is not None and sts.pod.uid == deletion.uid:
                if sts.pod.ready and name not in self.taken:
                    self.taken.append(name)
                sts.pod.terminating_for = 0
                self.trace.append(f"kill {self.index(name)}")

    def _observe(self, name: str, sts: Sts) -> ObservedInstance:
        pod = sts.pod
        index = self.index(name)
        instance = ObservedInstance(
            index=index,
            name=name,
            uid=sts.uid,
            controller_uid=sts.body["metadata"]["ownerReferences"][0]["uid"],
            deleting=False,
            spec_hash=sts.annotations[names.ANNOTATION_SPEC_HASH],
            build_hash=sts.annotations[names.ANNOTATION_BUILD_HASH],
            replicas=sts.body["spec"]["replicas"],
            drain_started=parse.moment(sts.annotations.get(names.ANNOTATION_DRAIN_STARTED, "")),
            drain_reason=sts.annotations.get(names.ANNOTATION_DRAIN_REASON, ""),
            pod=None,
            drain_seen=parse.moment(sts.annotations.get(names.ANNOTATION_DRAIN_STARTED, "")),
            labels=sts.labels,
            avoids_node=sts.annotations.get(names.ANNOTATION_AVOID_NODE, ""),
        )
        if pod is None:
            return instance
        observed = make_pod(
            f"{name}-0",
            ready=pod.ready,
            ip=f"10.0.0.{index + 1}",
            uid=pod.uid,
            terminating=pod.terminating_for is not None,
            spec_hash=pod.annotation(names.ANNOTATION_SPEC_HASH),
            build_hash=pod.annotation(names.ANNOTATION_BUILD_HASH),
        )
        sample = make_sample(T0 + seconds(self.now), pod_uid=pod.uid, running=pod.load)
        ranks = {0: sample} if pod.age >= STARTS_IN else {}
        return replace(instance, pod=observed, listed_by=("router",) if sts.listed else (), ranks=ranks)


def settled(replicas: int, *, role: Role = Role.PREFILL, **spec: Any) -> World:
    """Return a world whose pool is at its goal, with an empty trace."""
    world = World(make_pool(role, replicas=replicas, **{"drainTimeoutSeconds": 20, **spec}))
    world.settle()
    world.trace.clear()
    return world

"""Pods that something else runs, selected by labels: which are watched, and what the status says of them."""

from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from pdpool_operator.api.base import SpecInvalid
from pdpool_operator.api.engine import EngineType
from pdpool_operator.api.names import Role
from pdpool_operator.api.pools import MAX_INSTANCES
from pdpool_operator.api.services import DisaggregatedService, DisaggregatedServiceStatus
from pdpool_operator.diagnose.model import Diagnosis, Verdict
from pdpool_operator.diagnose.pools import diagnose, subjects_of
from pdpool_operator.observe.fleets import FleetReads
from pdpool_operator.observe.model import ObservedFleet
from pdpool_operator.observe.samples import EngineSample, RankSample
from pdpool_operator.observe.targets import Target
from pdpool_operator.status.fleet import fleet_status

from tests.unit.operator.plan.makers import follow_all

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SPEC = {"prefill": {"selector": {"app": "p"}}, "decode": {"selector": {"app": "d"}, "port": 8001}}


def service(spec: Mapping[str, Any] = SPEC, name: str = "chat") -> DisaggregatedService:
    return DisaggregatedService.parse({"metadata": {"name": name, "namespace": "llm", "uid": "u"}, "spec": spec})


def pod(name: str, app: str, *, ready: bool = True, phase: str = "Running", **labels: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "llm",
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app": app, **labels},
        },
        "status": {
            "phase": phase,
            "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T23:59:59Z"}],
        },
    }


class Pods:
    """The API server's pods."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.pods = pods

    async def list(
        self, _resource: object, _namespace: str | None, labels: str = "", *_: str, **_options: bool
    ) -> AsyncIterator[dict[str, Any]]:
        wanted = dict(part.split("=") for part in labels.split(","))
        for one in self.pods:
            if wanted.items() <= one["metadata"]["labels"].items():
                yield one


class Sampled:
    """Takes the place of the sampler, and remembers what is to be sampled."""

    def __init__(self) -> None:
        self.targets: dict[str, Target] = {}

    async def watch(self, namespace: str, pool: str, role: Role, targets: Iterable[Target]) -> None:
        mine = (namespace, pool, role)
        self.targets = {u: t for u, t in self.targets.items() if (t.namespace, t.pool, t.role) != mine}
        self.targets |= {target.pod_uid: target for target in targets}

    def target(self, uid: str) -> Target | None:
        return self.targets.get(uid)

    def newest(self, _uid: str) -> Mapping[int, RankSample]:
        return {}


async def observe(
    *pods: dict[str, Any], spec: Mapping[str, Any] = SPEC, sampler: Sampled | None = None
) -> ObservedFleet:
    return await FleetReads(Pods(*pods), sampler or Sampled()).observe(service(spec))  # type: ignore[arg-type]


def judge(fleet: ObservedFleet, engine: EngineSample | None) -> tuple[Diagnosis, ...]:
    def of(side: int) -> tuple[Any, ...]:
        pool = fleet.sides[side]
        tracks = {}
        for one in pool.instances:
            assert one.pod is not None
            sample = RankSample(0, one.pod.uid, NOW, NOW, None, engine, "", "timeout", has_connector=False)
            track = follow_all([sample])
            assert track is not None
            tracks[one.pod.uid] = {0: track}
        return subjects_of(pool, tracks)

    both = of(0), of(1)
    return tuple(d for own, others in (both, both[::-1]) for d in diagnose(own, others, stuck_after_s=30, now=NOW))


def conditions(status: DisaggregatedServiceStatus) -> dict[str, tuple[str, str, str]]:
    return {c.type: (str(c.status), c.reason, c.message) for c in status.conditions}


async def test_each_selected_pod_is_an_instance_and_is_sampled_on_its_port() -> None:
    sampler = Sampled()
    fleet = await observe(pod("b", "p"), pod("a", "p"), pod("c", "d"), pod("x", "other"), sampler=sampler)
    assert [[i.name for i in side.instances] for side in fleet.sides] == [["a", "b"], ["c"]]
    found = {t.pod_uid: (t.role, t.port, t.engine, t.has_connector) for t in sampler.targets.values()}
    sglang = EngineType.SGLANG
    assert found == {
        "uid-a": (Role.PREFILL, 30000, sglang, False),
        "uid-b": (Role.PREFILL, 30000, sglang, False),
        "uid-c": (Role.DECODE, 8001, sglang, False),
    }


async def test_ended_pods_are_no_instances() -> None:
    fleet = await observe(pod("a", "p", phase="Failed"), pod("b", "p"), pod("c", "d"))
    assert [i.name for i in fleet.prefill.instances] == ["b"]


async def test_pod_that_does_not_run_yet_is_not_sampled() -> None:
    sampler = Sampled()
    fleet = await observe(pod("a", "p", phase="Pending"), pod("c", "d"), sampler=sampler)
    assert [i.name for i in fleet.prefill.instances] == ["a"]
    assert set(sampler.targets) == {"uid-c"}


async def test_pods_beyond_the_limit_are_not_watched() -> None:
    fleet = await observe(*(pod(f"p-{number:03}", "p") for number in range(MAX_INSTANCES + 1)))
    assert len(fleet.prefill.instances) == MAX_INSTANCES
    assert fleet.refusals == (f"prefill.selector selects {MAX_INSTANCES + 1} pods; only {MAX_INSTANCES} are watched",)


async def test_engines_that_answer_are_idle_at_once_and_named_by_pod() -> None:
    fleet = await observe(pod("a", "p"), pod("c", "d"))
    status = fleet_status(fleet, judge(fleet, EngineSample(0, 0, {})), NOW)
    assert [(i.pod, i.role, i.verdict) for i in status.instances] == [("a", "prefill", "Idle"), ("c", "decode", "Idle")]
    assert status.ready == "1/1 prefill, 1/1 decode"
    assert status.url == ""
    found = conditions(status)
    assert {found[kind][0] for kind in ("Available", "Ready", "QueuesHealthy")} == {"True"}
    assert "1 prefill and 1 decode pods and changes nothing" in found["Ready"][2]


async def test_a_side_that_is_not_ready_is_not_available() -> None:
    fleet = await observe(pod("a", "p"), pod("c", "d", ready=False))
    status = fleet_status(fleet, judge(fleet, EngineSample(0, 0, {})), NOW)
    assert conditions(status)["Available"][:2] == ("False", "PoolsNotReady")
    assert "decode" in conditions(status)["Available"][2]


async def test_a_selector_without_pods_is_named() -> None:
    fleet = await observe(pod("a", "p"))
    found = conditions(fleet_status(fleet, judge(fleet, EngineSample(0, 0, {})), NOW))
    assert found["Ready"] == ("False", "NoPods", "decode.selector selects no pod in this namespace")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"app.kubernetes.io/managed-by": "pdpool"}, "which pdpool runs"),
        ({}, "both select a"),
    ],
)
async def test_pods_that_must_not_be_watched_are_refused(labels: dict[str, str], words: str) -> None:
    spec = SPEC if labels else {**SPEC, "decode": {"selector": {"app": "p"}}}
    sampler = Sampled()
    fleet = await observe(pod("a", "p", **labels), spec=spec, sampler=sampler)
    status = fleet_status(fleet, (), NOW)
    assert conditions(status)["Stalled"][1] == "SpecInvalid"
    assert words in conditions(status)["Ready"][2]
    assert sampler.targets == {}


async def test_a_pod_of_two_services_stays_with_the_first() -> None:
    sampler = Sampled()
    await sampler.watch(
        "llm", "service/first", Role.PREFILL, [Target("llm", "service/first", Role.PREFILL, 0, "uid-a", "127.0.0.1")]
    )
    fleet = await observe(pod("a", "p"), pod("c", "d"), sampler=sampler)
    assert fleet.refusals == ("prefill.selector selects a, which service/first already watches; remove one",)
    assert sampler.targets["uid-a"].pool == "service/first"


async def test_a_silent_engine_is_unknown_once_it_answered_nothing_for_long() -> None:
    early = pod("a", "p")
    early["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    fleet = await observe(early, pod("c", "d"))
    found = {d.subject.name: d.verdict for d in judge(fleet, None)}
    assert found == {"a": Verdict.UNKNOWN, "c": Verdict.STARTING}


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ({}, {"selector": {"a": "b"}}, "exactly one of poolRef and selector"),
        ({"poolRef": {"name": "x"}, "selector": {"a": "b"}}, {"selector": {"a": "b"}}, "exactly one of"),
        ({"selector": {}}, {"selector": {"a": "b"}}, "at least one label"),
        ({"poolRef": {"name": "x"}}, {"selector": {"a": "b"}}, "both have poolRef, or both selector"),
        ({"poolRef": {"name": "x"}, "port": 1}, {"poolRef": {"name": "x"}}, "engine, port and connector"),
    ],
)
def test_sides_that_do_not_fit_are_refused(prefill: Any, decode: Any, words: str) -> None:
    with pytest.raises(SpecInvalid, match=words):
        service({"prefill": prefill, "decode": decode})

"""`queues`: live lengths of the hand-off queues, from the metrics of the operator that leads.

The status of a pool holds no lengths. They are read through the API server's proxy of pods. Where a network policy or
missing rights refuse that, the verdicts of the status remain, and the reason is printed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdpool_operator.api import names
from pdpool_operator.observe.keys import FLEET_PREFIX
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.api_errors import ApiError
from pdpool_operator.runtime.resources import PODS
from prometheus_client.parser import text_string_to_metric_families

from .fleet import Fleet, PoolView
from .text import seconds, table

OPERATOR_PODS = "app.kubernetes.io/name=pdpool,app.kubernetes.io/component=operator"
METRICS_PORT = 8080

Place = tuple[str, str, str, str, str, str]
"""Namespace, pool, role, instance, rank, queue."""


@dataclass(frozen=True, slots=True)
class Queue:
    """One hand-off queue of one rank. A value that the operator does not know is None."""

    reqs: int
    oldest_s: float | None
    moved_total: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """All queues at one moment, or why they cannot be read."""

    queues: Mapping[Place, Queue]
    error: str = ""


async def read_queues(api: Api, operator_namespace: str) -> Reading:
    """Read the metrics of the operator that leads. An error becomes the reading's reason."""
    errors: list[str] = []
    try:
        pods = [pod["metadata"]["name"] async for pod in api.list(PODS, operator_namespace, OPERATOR_PODS)]
    except ApiError as error:
        return Reading({}, str(error))
    for pod in pods:
        path = f"{PODS.path(operator_namespace)}/{pod}:{METRICS_PORT}/proxy/metrics"
        try:
            samples = _samples(await api.text(PODS, path))
            if samples.get("pdpool_leader") == {(): 1.0}:
                return Reading(_queues(samples))
        except (ApiError, ValueError, OverflowError) as error:
            errors.append(str(error))
        else:
            errors.append(f"{pod} does not lead")
    return Reading({}, "; ".join(errors) or f"no pod of the operator runs in the namespace {operator_namespace}")


def _samples(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return values by name of the sample, then by namespace, pool, role, instance, rank and queue."""
    labels = ("namespace", "pool", "role", "instance", "rank", "queue")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "pdpool_leader" or sample.name.startswith("pdpool_queue_"):
                place = tuple(sample.labels[name] for name in labels if name in sample.labels)
                found.setdefault(sample.name, {})[place] = sample.value
    return found


def _queues(samples: Mapping[str, Mapping[tuple[str, ...], float]]) -> dict[Place, Queue]:
    oldest, moved = samples.get("pdpool_queue_oldest_seconds", {}), samples.get("pdpool_queue_moved_total", {})
    return {
        (place[0], place[1], place[2], place[3], place[4], place[5]): Queue(
            int(reqs), oldest.get(place), int(moved[place]) if place in moved else None
        )
        for place, reqs in samples.get("pdpool_queue_reqs", {}).items()
        if len(place) == 6
    }


@dataclass(frozen=True, slots=True)
class _Shown:
    """One instance of a status: of a pool, or a pod that something else runs."""

    where: tuple[str, str, str, str]
    """Namespace, pool, role and instance, as in the metrics."""
    instance: int | str
    """Index in its pool, or name of the pod."""
    name: str
    verdict: str


def _shown(fleet: Fleet) -> Iterator[_Shown]:
    for view in fleet.views():
        if isinstance(view, PoolView):
            for one in view.status.instances:
                where = (view.namespace, view.name, str(view.role), str(one.index))
                yield _Shown(where, one.index, names.instance(view.name, view.role, one.index), one.verdict)
        else:
            for pod in view.status.instances:
                where = (view.namespace, f"{FLEET_PREFIX}{view.name}", pod.role, pod.pod)
                yield _Shown(where, pod.pod, pod.pod, pod.verdict)


def _by_instance(reading: Reading) -> dict[tuple[str, ...], list[tuple[Place, Queue]]]:
    """Return the queues of each instance, by rank and name. The numbers of ranks are in text: rank 10 comes last."""
    found: dict[tuple[str, ...], list[tuple[Place, Queue]]] = {}
    for place, queue in sorted(reading.queues.items(), key=lambda one: (len(one[0][4]), one[0][4:])):
        found.setdefault(place[:4], []).append((place, queue))
    return found


def queue_lines(fleet: Fleet, reading: Reading, before: Reading | None = None, passed_s: float = 0.0) -> Iterator[str]:
    """Yield the table. With an earlier reading, the column MOVED/S shows the rate since then."""
    rows = []
    queues = _by_instance(reading)
    for one in _shown(fleet):
        rows += [
            (
                one.where[0],
                one.name,
                place[4],
                place[5],
                str(queue.reqs),
                "-" if queue.oldest_s is None else seconds(queue.oldest_s),
                _rate(queue, before.queues.get(place) if before else None, passed_s),
                one.verdict,
            )
            for place, queue in queues.get(one.where, ())
        ] or [(one.where[0], one.name, "-", "-", "?", "?", "?", one.verdict)]
    if not rows:
        yield "no instances"
        return
    yield from table(("NAMESPACE", "INSTANCE", "RANK", "QUEUE", "WAITING", "OLDEST", "MOVED/S", "VERDICT"), rows)


def _rate(queue: Queue, before: Queue | None, passed_s: float) -> str:
    if before is None or queue.moved_total is None or before.moved_total is None or passed_s <= 0:
        return "-"
    moved = queue.moved_total - before.moved_total
    return f"{moved / passed_s:.1f}" if moved >= 0 else "-"  # fewer: the engine has started anew


def queues_json(fleet: Fleet, reading: Reading) -> dict[str, Any]:
    """Return what `-o json` prints. Lengths of an instance that are not known are left out.

    `instance` is the index in a pool, or the name of a pod that something else runs.
    """
    queues = _by_instance(reading)
    return {
        "live": not reading.error,
        "error": reading.error,
        "instances": [
            {
                "namespace": one.where[0],
                "pool": one.where[1],
                "role": one.where[2],
                "instance": one.instance,
                "verdict": one.verdict,
                "queues": [
                    {
                        "rank": int(place[4]),
                        "queue": place[5],
                        "reqs": queue.reqs,
                        "oldestSeconds": queue.oldest_s,
                        "movedTotal": queue.moved_total,
                    }
                    for place, queue in queues.get(one.where, ())
                ],
            }
            for one in _shown(fleet)
        ],
    }

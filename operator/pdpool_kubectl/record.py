"""`record`: reads what an operator reads, for some seconds, through the API server."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from pdpool_operator.api import names
from pdpool_operator.api.base import SpecInvalid
from pdpool_operator.api.pools import POOL_KINDS, Pool
from pdpool_operator.engines import engine_of
from pdpool_operator.engines.answers import MAX_RANKS
from pdpool_operator.observe.cluster import POOL_RESOURCES, SERVICES_PD
from pdpool_operator.observe.keys import POOL_KIND_OF_ROLE
from pdpool_operator.runtime.api import PODS, STATEFUL_SETS, Api, ApiError, Resource

from .recording import Answers, Look, kept

EVERY_S = 3.0
"""As often as the operator samples."""
CONCURRENCY = 16
ANSWER_S = 3.0
"""Longest wait for one answer of a pod. Pods that hang must not stretch a look, because samples of 15 s are too old."""

Object = dict[str, Any]


async def record(
    api: Api, namespace: str, seconds: float, progress: Callable[[str], None], *, every_s: float = EVERY_S
) -> list[Look]:
    """Take looks at a namespace for some seconds, at least one.

    Raises:
        ApiError: the API server refuses, or does not answer.
    """
    loop = asyncio.get_running_loop()
    looks: list[Look] = []
    began = loop.time()
    while True:
        due = began + every_s * (len(looks) + 1)
        look = await _look(api, namespace)
        looks.append(look)
        progress(_summary(look, len(looks)))
        if due - began > seconds:
            return looks
        await asyncio.sleep(max(0.0, due - loop.time()))


def unanswered(looks: list[Look]) -> tuple[str, ...]:
    """Return why pods could not be asked, each reason once."""
    errors = (
        one["error"]
        for look in looks
        for answers in look.answers.values()
        for one in (*answers.connectors, answers.engine)
        if "error" in one
    )
    return tuple(dict.fromkeys(errors))


def _summary(look: Look, number: int) -> str:
    silent = sum("error" in one for answers in look.answers.values() for one in (*answers.connectors, answers.engine))
    return f"look {number}: {len(look.pools)} pools, {len(look.answers)} engine pods, {silent} questions unanswered"


async def _look(api: Api, namespace: str) -> Look:
    bodies = [body for kind in POOL_KINDS for body in await _list(api, POOL_RESOURCES[kind], namespace)]
    pools = {
        (kind.kind, body["metadata"]["name"]): body
        for kind in POOL_KINDS
        for body in bodies
        if body["kind"] == kind.kind
    }
    services = await _list(api, SERVICES_PD, namespace)
    sets = await _list(api, STATEFUL_SETS, namespace, names.SELECT_MADE)
    pods = await _list(api, PODS, namespace, names.SELECT_MADE)
    slots = asyncio.Semaphore(CONCURRENCY)
    asked = [(pod, pool) for pod in pods if (pool := _pool_of(pod, pools)) is not None and _runs(pod)]
    answers = await asyncio.gather(*(_ask(api, namespace, pod, pool, slots) for pod, pool in asked))
    return Look(
        at=_now(),
        services=[kept(body, _without_template(body.get("spec") or {}, "router")) for body in services],
        pools=[kept(body, _without_template(body.get("spec") or {})) for body in bodies],
        stateful_sets=[kept(body, {"replicas": (body.get("spec") or {}).get("replicas", 1)}) for body in sets],
        pods=[kept(body, {"nodeName": (body.get("spec") or {}).get("nodeName", "")}, status=True) for body in pods],
        answers={pod["metadata"]["uid"]: one for (pod, _), one in zip(asked, answers, strict=True)},
    )


async def _list(api: Api, resource: Resource, namespace: str, labels: str = "") -> list[Object]:
    return [obj async for obj in api.list(resource, namespace, labels)]


def _without_template(spec: Object, part: str = "") -> Object:
    """Leave out pod templates, and arguments of the router: both may hold anything."""
    left = {key: value for key, value in spec.items() if key != "template"}
    if part and part in left:
        left[part] = {key: value for key, value in left[part].items() if key not in {"template", "args", "service"}}
    return left


def _runs(pod: Object) -> bool:
    status = pod.get("status") or {}
    return status.get("phase") == "Running" and bool(status.get("podIP"))


def _pool_of(pod: Object, pools: dict[tuple[str, str], Object]) -> Pool | None:
    """Return the pool of an engine pod. One whose spec does not fit is left out, as the operator leaves it."""
    labels = pod["metadata"].get("labels") or {}
    kind = POOL_KIND_OF_ROLE.get(labels.get(names.LABEL_ROLE, ""), "")
    body = pools.get((kind, labels.get(names.LABEL_POOL, "")))
    try:
        return next((one.parse(body) for one in POOL_KINDS if body and one.kind == kind), None)
    except SpecInvalid:
        return None


async def _ask(api: Api, namespace: str, pod: Object, pool: Pool, slots: asyncio.Semaphore) -> Answers:
    name, asked_at = pod["metadata"]["name"], _now()
    engine = engine_of(pool.spec.engine.type)

    async def get(port: int, path: str) -> Object:
        async with slots:
            try:
                url = f"{PODS.path(namespace, f'{name}:{port}')}/proxy{path}"
                async with asyncio.timeout(ANSWER_S):
                    return {"body": json.loads(await api.text(PODS, url))}
            except TimeoutError:
                return {"error": f"no answer within {ANSWER_S:.0f} s"}
            except (ApiError, ValueError) as error:
                return {"error": str(error)}

    first = [await get(names.ADMIN_PORT, "/v1/state")] if engine.has_connector(pool) else []
    ranks = _ranks(first[0]) if first else 0
    rest = [get(names.ADMIN_PORT + rank, "/v1/state") for rank in range(1, ranks)]
    *others, loads = await asyncio.gather(*rest, get(names.ENGINE_HTTP_PORT, engine.loads_path))
    return Answers(asked_at, _now(), [*first, *others], loads)


def _ranks(answer: Object) -> int:
    """Return the number of ranks that a connector reports, if it is one."""
    body = answer.get("body")
    ranks = body.get("ranks") if isinstance(body, dict) else None
    return ranks if isinstance(ranks, int) and 1 <= ranks <= MAX_RANKS else 1


def _now() -> str:
    return datetime.now(UTC).isoformat()

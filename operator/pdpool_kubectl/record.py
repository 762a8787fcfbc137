"""`record`: reads what an operator reads, for some seconds, through the API server."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

from pdpool_operator.api import names
from pdpool_operator.api.pools import POOL_KINDS
from pdpool_operator.observe.fleet_sides import bindings_of
from pdpool_operator.observe.fleets import selected_pods
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.api_errors import UnavailableError
from pdpool_operator.runtime.resources import PODS, POOL_RESOURCES, SERVICES_PD, STATEFUL_SETS, Object, Resource

from .observer import Observer, parsed_services
from .questions import Questions, now
from .recording import Answers, Look, kept
from .text import counted

EVERY_S = 3.0
"""As often as the operator samples."""


async def record(
    api: Api, namespace: str, seconds: float, progress: Callable[[str], None], *, every_s: float = EVERY_S
) -> list[Look]:
    """Take looks at a namespace for some seconds, at least one.

    A look is left out if the API server does not answer then. A task that is cancelled returns the looks so far.

    Raises:
        ApiError: the API server refuses, or does not answer at the first look.
    """
    looks: list[Look] = []
    try:
        async for look in _looks(api, namespace, seconds, progress, every_s):
            looks.append(look)  # noqa: PERF401 - a comprehension would lose the looks when it is cancelled
    except asyncio.CancelledError:
        if not looks:
            raise
    return looks


async def _looks(
    api: Api, namespace: str, seconds: float, progress: Callable[[str], None], every_s: float
) -> AsyncIterator[Look]:
    loop = asyncio.get_running_loop()
    observer, questions = Observer(), Questions(api, namespace)
    began, last = loop.time(), None
    for number in itertools.count(1):
        try:
            last = await _look(api, namespace, observer, questions, last.answers if last else {})
        except UnavailableError as error:
            if last is None:
                raise
            progress(f"look {number} is left out: {error}")
            if loop.time() - began > seconds:
                return
        else:
            progress(_summary(last, number))
            yield last
        if every_s * number > seconds:
            return
        await asyncio.sleep(max(0.0, began + every_s * number - loop.time()))


async def _look(
    api: Api, namespace: str, observer: Observer, questions: Questions, known: Mapping[str, Answers]
) -> Look:
    """Read the API server, and ask the pods. `known` are the answers of the last look."""
    look = await _read(api, namespace)
    targets = [target for one in observer.observe(look) for target in one.targets]
    pods = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in look.pods}
    asked = (questions.ask(pods[t.pod_uid], t, known.get(t.pod_uid)) for t in targets)
    answers = await asyncio.gather(*asked)
    by_uid = {target.pod_uid: one for target, one in zip(targets, answers, strict=True)}
    return replace(look, at=now(), answers=by_uid)


def unanswered(looks: list[Look]) -> tuple[str, ...]:
    """Return why pods could not be asked, each reason once."""
    errors = (error for look in looks for answers in look.answers.values() for error in answers.errors)
    return tuple(dict.fromkeys(errors))


def _summary(look: Look, number: int) -> str:
    watching = sum(service.spec.watches for service in parsed_services(look.services))
    silent = sum(len(answers.errors) for answers in look.answers.values())
    counts = (
        counted(len(look.pools), "pool"),
        counted(watching, "service", "with selectors"),
        counted(len(look.answers), "engine pod"),
        counted(silent, "question", "unanswered"),
    )
    return f"look {number}: {', '.join(counts)}"


async def _read(api: Api, namespace: str) -> Look:
    """Return what the API server has, without answers of pods."""
    pools = [body for kind in POOL_KINDS for body in await _list(api, POOL_RESOURCES[kind], namespace)]
    services = await _list(api, SERVICES_PD, namespace)
    sets = await _list(api, STATEFUL_SETS, namespace, names.SELECT_MADE)
    pods = await _list(api, PODS, namespace, names.SELECT_MADE)
    sides = (side for service in parsed_services(services) for side in bindings_of(service).values())
    for selector in [side.selector for side in sides if side.selector]:
        pods += await selected_pods(api, namespace, selector)
    by_uid = {pod["metadata"]["uid"]: pod for pod in pods}
    return Look(
        at=now(),
        services=[kept(body, _without_template(body.get("spec") or {}, "router")) for body in services],
        pools=[kept(body, _without_template(body.get("spec") or {})) for body in pools],
        stateful_sets=[kept(body, {"replicas": (body.get("spec") or {}).get("replicas", 1)}) for body in sets],
        pods=[
            kept(body, {"nodeName": (body.get("spec") or {}).get("nodeName", "")}, status=True)
            for body in by_uid.values()
        ],
        answers={},
    )


async def _list(api: Api, resource: Resource, namespace: str, labels: str = "") -> list[Object]:
    return [obj async for obj in api.list(resource, namespace, labels)]


def _without_template(spec: Object, part: str = "") -> Object:
    """Leave out pod templates, and arguments of the router: both may hold anything."""
    left = {key: value for key, value in spec.items() if key != "template"}
    if part and part in left:
        left[part] = {key: value for key, value in left[part].items() if key not in {"template", "args", "service"}}
    return left

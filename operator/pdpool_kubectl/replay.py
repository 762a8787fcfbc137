"""`replay`: the operator's own diagnosis over a recording, on the recording's clock.

Counters of routers are not recorded, so Failing rests on what connectors count.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pdpool_operator.api import names
from pdpool_operator.api.base import SpecInvalid
from pdpool_operator.api.pools import POOL_KINDS, Pool
from pdpool_operator.api.services import DisaggregatedService
from pdpool_operator.controller.judge import Judge
from pdpool_operator.engines import engine_of
from pdpool_operator.observe import parse
from pdpool_operator.observe.connector_state import parse_state
from pdpool_operator.observe.http import Unanswered
from pdpool_operator.observe.keys import Bindings, Key
from pdpool_operator.observe.model import ObservedPool, RankSample
from pdpool_operator.observe.sampler import Target, parse_loads

from .recording import Answers, Look

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """The verdict on an instance changed. The first verdict counts as a change."""

    after_s: float
    """Seconds since the first look."""
    instance: str
    verdict: str
    message: str


def replay(looks: Iterable[Look]) -> Iterator[Change]:
    """Yield the changes of all verdicts, in order."""
    bindings = Bindings()
    clock: list[datetime] = []
    judge = Judge(bindings, lambda: clock[-1], lambda _: None)
    shown: dict[tuple[Key, str], str] = {}
    for look in looks:
        clock.append(datetime.fromisoformat(look.at))
        keys = _observe(judge, bindings, look)
        judge.tick()
        for key in keys:
            for diagnosis in judge.judge(key):
                name, verdict = diagnosis.subject.name, str(diagnosis.verdict)
                if shown.get((key, name)) != verdict:
                    shown[key, name] = verdict
                    yield Change((clock[-1] - clock[0]).total_seconds(), name, verdict, diagnosis.message)


def _observe(judge: Judge, bindings: Bindings, look: Look) -> list[Key]:
    """Give one look to the judge; return the pools that it shows."""
    stuck_after: dict[Key, float] = {}
    for body in look.services:
        try:
            service = DisaggregatedService.parse(body)
        except SpecInvalid:
            continue
        if service.spec.watches:
            continue  # recordings hold the pods of pools only
        key = Key(service.kind, service.metadata.namespace, service.metadata.name)
        bindings.bind(key, service.spec.prefill.pool_name, service.spec.decode.pool_name)
        for pool_key in bindings.pools(key):
            stuck_after[pool_key] = min(stuck_after.get(pool_key, 3600.0), float(service.spec.stuck_after_seconds))
    keys = []
    for kind in POOL_KINDS:
        for body in (body for body in look.pools if body["kind"] == kind.kind):
            try:
                pool = kind.parse(body)
            except SpecInvalid:
                continue
            key = Key(kind.kind, pool.metadata.namespace, pool.metadata.name)
            observed = _observed(pool, look, stuck_after.get(key, 30.0))
            judge.observed(key, observed)
            for target in _targets(observed):
                judge.on_samples(target, _samples(target, look.answers[target.pod_uid]))
            keys.append(key)
    return keys


def _observed(pool: Pool, look: Look, stuck_after_s: float) -> ObservedPool:
    labels = names.pool_labels(pool.metadata.name, pool.role)
    by_owner: dict[str, Mapping[str, Any]] = {parse.controller_uid(pod): pod for pod in look.pods}
    now = datetime.fromisoformat(look.at)
    instances = [
        parse.observed_instance(int(index), sts, by_owner.get(sts["metadata"]["uid"]), labels, now)
        for sts in look.stateful_sets
        if names.has_labels(sts, labels) and (index := sts["metadata"]["labels"].get(names.LABEL_INSTANCE))
    ]
    ordered = tuple(sorted(instances, key=lambda instance: instance.index))
    return ObservedPool(pool=pool, instances=ordered, objects=(), stuck_after_s=stuck_after_s)


def _targets(observed: ObservedPool) -> Iterator[Target]:
    """Yield the pods that the operator would have sampled."""
    pool, engine = observed.pool, engine_of(observed.pool.spec.engine.type)
    for instance in observed.instances:
        pod = instance.pod
        if pod is not None and pod.ip and pod.phase == "Running":
            yield Target(
                pool.metadata.namespace,
                pool.metadata.name,
                pool.role,
                instance.index,
                pod.uid,
                pod.ip,
                engine.type,
                engine.has_connector(pool),
            )


def _samples(target: Target, answers: Answers) -> list[RankSample]:
    """Return what the sampler would have made of the answers."""
    at, asked_at = datetime.fromisoformat(answers.at), datetime.fromisoformat(answers.asked_at)
    engines, engine_error = _parsed(answers.engine, lambda body: parse_loads(body, target.role, target.engine), {})
    if not target.has_connector:
        return [
            RankSample(rank, target.pod_uid, at, asked_at, None, engines.get(rank), "", engine_error, False)
            for rank in sorted(engines) or [0]
        ]
    samples = []
    for rank, answer in enumerate(answers.connectors):
        connector, error = _parsed(answer, parse_state, None)
        samples.append(
            RankSample(rank, target.pod_uid, at, asked_at, connector, engines.get(rank), error, engine_error)
        )
    return samples


def _parsed(answer: Object, parser: Any, missing: Any) -> tuple[Any, str]:  # noqa: ANN401 - of either source
    if "error" in answer:
        return missing, str(answer["error"])
    try:
        return parser(json.dumps(answer["body"]).encode()), ""
    except Unanswered as error:
        return missing, str(error)


def replay_lines(changes: Iterable[Change]) -> Iterator[str]:
    """Yield the text of `replay`."""
    for change in changes:
        yield f"{change.after_s:7.1f} s  {change.instance}  {change.verdict}: {change.message}"


TEST = '''"""In this recording no instance is {verdicts}. Written by `kubectl pdpool replay --as-test`."""

from pathlib import Path

from pdpool_kubectl.recording import load
from pdpool_kubectl.replay import replay

RECORDING = Path(__file__).with_name({recording!r})


def test_{name}_raises_no_alarm() -> None:
    alarms = [change for change in replay(load(RECORDING)) if change.verdict in {allowed!r}]
    assert alarms == []
'''


def as_test(recording: Path, alarms: tuple[str, ...]) -> str:
    """Return a pytest module that fails while the diagnosis gives one of these verdicts on the recording."""
    name = "".join(letter if letter.isalnum() else "_" for letter in recording.stem.lower())
    return TEST.format(verdicts=" or ".join(alarms), recording=recording.name, name=name, allowed=alarms)

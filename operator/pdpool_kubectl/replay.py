"""`replay`: the operator's own diagnosis over a recording, on the recording's clock.

Counters of routers are not recorded, so Failing rests on what connectors count.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pdpool_operator.controller.judge import Judge
from pdpool_operator.observe.keys import Key

from .observer import Observer
from .recorded_samples import RecordedSamples
from .recording import Look


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
    observer, samples = Observer(), RecordedSamples()
    clock: list[datetime] = []
    judge = Judge(observer.bindings, lambda: clock[-1], lambda _: None)
    shown: dict[tuple[Key, str], str] = {}
    present: frozenset[Key] = frozenset()
    for look in looks:
        clock.append(datetime.fromisoformat(look.at))
        seen = observer.observe(look)
        for gone in present - (present := frozenset(one.key for one in seen)):
            judge.gone(gone)
        taken = samples.of(look, [target for one in seen for target in one.targets])
        for one in seen:
            judge.observed(one.key, one.pool)
        for target, ranks in taken.items():
            judge.on_samples(target, ranks)
        judge.tick()
        for one in seen:
            for diagnosis in judge.judge(one.key):
                name, verdict = diagnosis.subject.name, str(diagnosis.verdict)
                if shown.get((one.key, name)) != verdict:
                    shown[one.key, name] = verdict
                    yield Change((clock[-1] - clock[0]).total_seconds(), name, verdict, diagnosis.message)


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

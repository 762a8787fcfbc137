"""Compares verdicts with the truth of the simulation. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdpool_operator.diagnose.model import Diagnosis, Verdict

ACCUSES = frozenset({Verdict.STUCK, Verdict.FAILING})
"""Verdicts on which an instance is repaired."""
NAMES = ACCUSES | {Verdict.LEAKED}
"""Verdicts that say that something is wrong with the instance itself."""
FLAP_S = 60.0
"""A verdict that comes back within this time after it ended has flapped."""


@dataclass(frozen=True)
class Truth:
    """What is so at one moment, by names of instances."""

    guilty: frozenset[str] = frozenset()
    """Instances that may be judged Stuck or Failing: they have a fault, or had it a short time ago."""
    due: Mapping[str, str] = field(default_factory=dict)
    """Instances that must have been named by now, with the fault."""
    leaks: frozenset[str] = frozenset()
    """Instances that may be judged Leaked."""
    suspect: frozenset[str] = frozenset()
    """Instances that may be named as what others wait for, although they have no fault: their numbers are late, or they
    have more work than they can do.
    """


@dataclass
class Score:
    """Counts of errors, and the first one as text."""

    hours: float = 0.0
    false_repairs: int = 0
    missed: int = 0
    wrong_side: int = 0
    flaps: int = 0
    faults: int = 0
    """Faults that were found."""
    said: Counter[str] = field(default_factory=Counter)
    """Errors by kind, for people."""
    examples: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there was no error and there was something to find or to mistake."""
        return self.hours > 0 and not (self.false_repairs or self.missed or self.wrong_side)

    def __str__(self) -> str:
        """Return the last line of a run."""
        return (
            f"queue-sim {'ok' if self.ok else 'FAILED'}: hours={self.hours:.0f} false_repairs={self.false_repairs} "
            f"missed={self.missed} wrong_side={self.wrong_side} flaps_per_hour={self.flaps / (self.hours or 1):.3f}"
        )


def total(scores: Iterable[Score]) -> Score:
    """Return the sum. Examples keep their order."""
    result = Score()
    for one in scores:
        result.hours += one.hours
        result.false_repairs += one.false_repairs
        result.missed += one.missed
        result.wrong_side += one.wrong_side
        result.flaps += one.flaps
        result.faults += one.faults
        result.said += one.said
        result.examples += one.examples
    return result


class Scorer:
    """Follows the verdicts of one run. An error counts once, when the verdict begins."""

    def __init__(self) -> None:
        self.score = Score()
        self._before: dict[str, tuple[Verdict, tuple[str, ...]]] = {}
        self._left: dict[tuple[str, Verdict], float] = {}
        self._missed: set[tuple[str, str]] = set()

    def see(self, now: float, diagnoses: Iterable[Diagnosis], truth: Truth, where: str) -> None:
        """Score the verdicts of one moment.

        Args:
            now: Seconds of world time.
            diagnoses: Of all instances.
            truth: Of the same moment.
            where: Text that tells the run and the moment, for examples.
        """
        accused = set()
        for diagnosis in diagnoses:
            name, said = diagnosis.subject.name, (diagnosis.verdict, diagnosis.blames)
            if diagnosis.verdict in NAMES:
                accused.add(name)
            if said != self._before.get(name):
                self._changed(now, diagnosis, truth, where)
                self._before[name] = said
        for name, fault in truth.due.items():
            if name not in accused and (name, fault) not in self._missed:
                self._missed.add((name, fault))
                self.score.missed += 1
                words = "; ".join(f"{name}: {verdict}" for name, (verdict, _) in self._before.items())
                self._error(f"missed {fault.split(' of ')[0]}", f"{name} is not named ({fault}); said: {words}", where)

    def _changed(self, now: float, diagnosis: Diagnosis, truth: Truth, where: str) -> None:
        name, verdict = diagnosis.subject.name, diagnosis.verdict
        before = self._before.get(name, (Verdict.IDLE, ()))[0]
        if verdict is not before:
            self._left[name, before] = now
            if not verdict.well and now - self._left.get((name, verdict), -FLAP_S) < FLAP_S:
                self.score.flaps += 1
        if verdict in ACCUSES and before not in ACCUSES and name not in truth.guilty:
            self.score.false_repairs += 1
            self._error(f"false {verdict}", diagnosis.message, where)
            if truth.guilty:
                self.score.wrong_side += 1
        if verdict is Verdict.LEAKED and name not in truth.leaks:
            self.score.wrong_side += 1
            self._error("false Leaked", diagnosis.message, where)
        if verdict is Verdict.BLOCKED and diagnosis.blames and not {*diagnosis.blames} & (truth.guilty | truth.suspect):
            self.score.wrong_side += 1
            self._error("wrong side", diagnosis.message, where)

    def _error(self, kind: str, message: str, where: str) -> None:
        self.score.said[kind] += 1
        self.score.examples.append(f"{kind}: {where}: {message}")

"""A short run of the simulation of queues, and wrong diagnoses that it must notice."""

from dataclasses import replace
from datetime import timedelta

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.diagnose import orphans
from pdpool_operator.diagnose.model import Diagnosis

from proof.queue_sim import observe
from proof.queue_sim.faults import Incident, Kind
from proof.queue_sim.run import Run
from proof.queue_sim.score import Score, Scorer, Truth

RATE = 0.6


def play(kind: Kind, role: Role = Role.DECODE, *, run: type[Run] = Run, seconds: float = 240.0) -> Score:
    played = run(1, [Incident(60.0, kind, role, 0, 120.0)])
    played.world.rate = lambda: RATE * played.world.factor  # type: ignore[method-assign]
    return played.play(seconds / 3600)


@pytest.mark.parametrize("kind", list(Kind))
def test_no_verdict_is_wrong(kind: Kind) -> None:
    score = play(kind)
    assert score.ok, score.examples
    if kind in {Kind.FROZEN, Kind.RANK_FROZEN, Kind.FAILS_ALL, Kind.LEAKED}:
        assert score.faults == 1


def test_hasty_diagnosis_makes_false_repairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "STUCK_AFTER_S", 3.0)
    score = play(Kind.BURST)
    assert score.false_repairs > 0
    assert str(score).startswith("queue-sim FAILED")
    assert "seed 1, hour 0." in score.examples[0]


def test_blind_diagnosis_misses_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "STUCK_AFTER_S", 3000.0)
    assert play(Kind.FROZEN).missed == 1


class Swapped(Run):
    """Swaps the verdicts of the two sides."""

    @staticmethod
    def said(diagnoses: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
        half = len(diagnoses) // 2
        swapped = (*diagnoses[half:], *diagnoses[:half])
        return tuple(replace(d, subject=other.subject) for d, other in zip(diagnoses, swapped, strict=True))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_leaked_request_is_named_on_both_sides(role: Role) -> None:
    score = play(Kind.LEAKED, role)
    assert (score.ok, score.faults) == (True, 1), score.examples


def test_swapped_sides_are_noticed() -> None:
    score = play(Kind.FROZEN, run=Swapped)
    assert not score.ok
    assert score.wrong_side > 0
    assert score.missed == 1


def test_run_of_no_time_is_not_ok() -> None:
    assert not Score().ok
    scorer = Scorer()
    scorer.see(0.0, (), Truth(due={"chat-decode-0": "frozen"}), "here")
    assert scorer.score.missed == 1


def test_leaked_request_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "LAG", timedelta(hours=1))
    assert play(Kind.LEAKED).missed == 1

"""Judges runs of drills. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from proof.cluster.percentile import percentile
from proof.cluster.words import GOOD, Expected


@dataclass(frozen=True)
class Run:
    """One run of one drill, as observed."""

    drill: str
    number: int
    asked: int
    lost: int
    wrong_tokens: int
    words: tuple[str, ...]
    stuck_after: int
    recover_s: float | None
    """Seconds from the end of the fault until all was Ready again. None: not within its limit."""
    errors: tuple[str, ...] = field(default=())
    """What went wrong: the first lost requests, and why a deed or the recovery failed."""
    failed: str = ""
    """Why the deed itself could not be done. Empty if it was done."""


def missing_words(expected: Expected, words: Sequence[str]) -> list[str]:
    """Return the patterns that no word matches."""
    return [pattern for pattern in expected.must if not any(re.fullmatch(pattern, word) for word in words)]


def unexpected_words(expected: Expected, words: Sequence[str]) -> list[str]:
    """Return the words that match no pattern."""
    patterns = (*expected.must, *expected.may, *GOOD)
    return [word for word in words if not any(re.fullmatch(pattern, word) for pattern in patterns)]


def faults(expected: Expected, run: Run) -> list[str]:
    """Return the reasons why a run is not right. Empty if it is."""
    found = [f"not given: {pattern}" for pattern in missing_words(expected, run.words)]
    found += [f"not expected: {word}" for word in unexpected_words(expected, run.words)]
    if run.failed:
        found.append(f"not played to its end: {run.failed}")
    if run.asked == 0:
        found.append("no request was sent")
    if run.lost > expected.may_lose:
        found.append(f"{run.lost} of {run.asked} requests lost, at most {expected.may_lose} may be")
    if run.wrong_tokens:
        found.append(f"{run.wrong_tokens} requests answered with other tokens")
    if run.stuck_after:
        found.append(f"{run.stuck_after} engines still hold requests or memory")
    if run.recover_s is None and not run.failed:
        found.append("not recovered in time")
    return found


def summary(expected: dict[str, Expected], runs: Sequence[Run], times: int) -> tuple[bool, str]:
    """Return whether all is well, and the last line.

    Args:
        expected: what each drill that was to be played must show, by name.
        runs: all runs.
        times: how often each drill was to be played.
    """
    played = [run for run in runs if run.drill in expected]
    wrong_words = sum(
        len(missing_words(expected[run.drill], run.words)) + len(unexpected_words(expected[run.drill], run.words))
        for run in played
    )
    # Requests that a drill must cost, because a side has no instance, do not count.
    lost = sum(max(0, run.lost - expected[run.drill].may_lose) for run in played)
    complete = all(sum(run.drill == name for run in played) >= times for name in expected)
    fine = bool(played) and complete and not any(faults(expected[run.drill], run) for run in played)
    recoveries = [run.recover_s for run in played if run.recover_s is not None]
    fields = {
        "drills": len({run.drill for run in played}),
        "runs": len(played),
        "lost": lost,
        "wrong_words": wrong_words,
        "wrong_tokens": sum(run.wrong_tokens for run in played),
        "stuck_after": sum(run.stuck_after for run in played),
        "recover_p95_s": f"{percentile(recoveries, 0.95):.1f}",
    }
    words = " ".join(f"{name}={value}" for name, value in fields.items())
    state = "ok" if fine else "failed" if complete else "incomplete"
    return fine, f"drills {state}: {words}"

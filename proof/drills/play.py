"""Plays one drill: sets the scene, runs the deed under traffic, and observes."""

import contextlib
import time
from functools import partial
from xmlrpc.client import Fault

from dev.shell import Clock, CommandError, wait_for
from proof.cluster.stage import Stage
from proof.cluster.watch import UNREACHABLE
from proof.cluster.witness import Witness, alerts, prometheus_url
from proof.drills.scenario import Scenario
from proof.drills.verdict import Run
from tests.cluster.stack_setup import Answers
from tests.cluster.stack_traffic import Traffic

STUCK_AFTER_S = 20
QUIET_WITHIN_S = 180.0
PATIENCE_S = 200.0
"""Longest wait of a client, in seconds. A prefill that waits for a lost decode ends sooner."""
LONGEST_S = 1500.0
SHOWN_ERRORS = 5
LONGEST_REASON = 600
AFTERWARDS = 30
"""Right answers that the traffic must get after the recovery."""
FAILED = (*UNREACHABLE, AssertionError, LookupError, StopIteration, Fault)


def play(scenario: Scenario, number: int, stage: Stage, expected: Answers, clock: Clock, left: str) -> Run:
    """Play a drill once.

    Args:
        scenario: The drill.
        number: Number of the run, from 1.
        stage: Where it is played.
        expected: Right answers to the prompts of the traffic.
        clock: Shows progress.
        left: The time left in all, as text.

    A drill that cannot be played, or does not recover, is a failed run.

    Raises:
        TimeoutError: before the drill, the stack is not Ready, or an alert does not end.
    """
    stage.clear()
    stage.begin(stuckAfterSeconds=STUCK_AFTER_S)
    wait_for(
        "no alert of an earlier drill",
        partial(alerts, prometheus_url(stage.stack)),
        deadline_s=QUIET_WITHIN_S,
        interval_s=1.0,
    )
    failed = ""
    recover_s: float | None = None
    traffic = Traffic(stage.stack.router_url(), expected, patience_s=PATIENCE_S, longest_s=LONGEST_S)
    witness = stage.witness = Witness(stage.stack)

    def state() -> str:
        said = f"last word: {witness.words[-1]}" if witness.words else "no word yet"
        return f"{len(traffic.outcomes)} answers, {len(traffic.errors)} errors; {said}; {left}"

    try:
        with clock.ticking(state), witness, traffic:
            failed = _deed(scenario, stage)
            recover_s = _recovery(scenario, stage)
            traffic.more(AFTERWARDS)
    except FAILED as error:
        failed = failed or shortened(error)
    wrong = [error for error in traffic.errors if "instead of" in error]
    lost = [error for error in traffic.errors if "instead of" not in error]
    return Run(
        drill=scenario.name,
        number=number,
        asked=len(traffic.outcomes),
        lost=len(lost),
        wrong_tokens=len(wrong),
        words=witness.words,
        stuck_after=_stuck_after(stage),
        recover_s=recover_s,
        errors=tuple((wrong + lost)[:SHOWN_ERRORS]),
        failed=failed,
    )


def _deed(scenario: Scenario, stage: Stage) -> str:
    """Do the deed and undo what it left. Return why that failed, empty if it did not."""
    try:
        with stage.undo:
            scenario.deed(stage)
    except FAILED as error:
        return shortened(error)
    return ""


def _recovery(scenario: Scenario, stage: Stage) -> float:
    """Return the seconds until all is Ready and listed again.

    Raises:
        TimeoutError: not within the drill's limit.
    """
    ended = time.monotonic()
    stage.settle(scenario.recovers_within_s)
    return round(time.monotonic() - ended, 1)


def shortened(error: BaseException) -> str:
    """Return an error as text that fits a line of results."""
    return f"{type(error).__name__}: {error}"[:LONGEST_REASON]


def _stuck_after(stage: Stage) -> int:
    with contextlib.suppress(CommandError, OSError):
        return stage.stuck_after()
    return 1  # Nothing is known of the engines.

"""Plays one fault: sets the scene, begins the fault under traffic, waits for verdict, repair and recovery."""

import time
from xmlrpc.client import Fault

from dev.shell import Clock, wait_for
from proof.cluster.stage import Stage
from proof.cluster.watch import UNREACHABLE
from proof.faults.deeds import PLAYS
from proof.faults.expectation import Expectation, Mode, Restart
from proof.faults.scene import Scene
from proof.faults.score import Run
from proof.faults.watch import VerdictWatch
from tests.cluster.stack_setup import Answers
from tests.cluster.stack_traffic import Traffic

PATIENCE_S = 200.0
"""Longest wait of a client, in seconds. A prefill that waits for a lost decode ends sooner."""
LONGEST_S = 900.0
REPAIRED_S = 180.0
"""Longest time from the fault to the restart, in seconds."""
RECOVERED_S = 180.0
"""Longest time from the restart, or from the fault's end, until all is well, in seconds.

An engine that failed two trials gets the next one after 2 minutes.
"""
AFTERWARDS = 30
"""Right answers that the traffic must get after the recovery."""
SHOWN_ERRORS = 5
LONGEST_REASON = 400
FAILED = (*UNREACHABLE, AssertionError, LookupError, StopIteration, Fault)


def play(name: str, wanted: Expectation, mode: Mode, number: int, stage: Stage, answers: Answers, clock: Clock) -> Run:
    """Play a scenario once. One that cannot be played, or does not recover, is a failed run.

    Args:
        name: Of the scenario.
        wanted: What must be said and done. Whether a restart is required decides how the fault ends.
        mode: Of repair.
        number: Of the run, from 1.
        stage: Where it is played.
        answers: Right answers to the prompts of the traffic.
        clock: Shows progress.

    Raises:
        TimeoutError: the stack is not Ready before the fault.
    """
    stage.clear()
    stage.begin(PLAYS[name].pools, repair={"mode": str(mode)})
    failed, guilty = "", ""
    recover_s: float | None = None
    traffic = Traffic(stage.stack.router_url(), answers, patience_s=PATIENCE_S, longest_s=LONGEST_S)
    watch = VerdictWatch(stage.stack)
    scene = Scene(stage, watch, answers, PATIENCE_S, number)

    def state() -> str:
        last = watch.verdicts[-1] if watch.verdicts else None
        said = f"{last.whom} {last.word} after {last.at_s:.0f} s" if last else "nothing said yet"
        return f"{len(traffic.outcomes)} answers, {len(traffic.errors)} errors; {said}"

    try:
        with clock.ticking(state), watch, traffic:
            with stage.undo:
                guilty = PLAYS[name].deed(scene)
                healing = mode is Mode.ENFORCE and wanted.repair is Restart.REQUIRED
                if healing:
                    _until_restarted(watch, guilty)
                    recover_s = _recovered(stage, watch)
                else:
                    time.sleep(max(0.0, PLAYS[name].lasts_s - watch.since_s))
            if not healing:
                recover_s = _recovered(stage, watch)
            traffic.more(AFTERWARDS)
    except FAILED as error:
        failed = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
    errors = [error for one in (traffic, *scene.more) for error in one.errors]
    wrong = [error for error in errors if "instead of" in error]
    return Run(
        scenario=name,
        mode=mode,
        number=number,
        guilty=guilty,
        verdicts=tuple(watch.verdicts),
        reasons=tuple(watch.reasons),
        repairs=tuple(watch.repairs),
        asked=sum(len(one.outcomes) for one in (traffic, *scene.more)),
        lost=len(errors) - len(wrong),
        wrong_tokens=len(wrong),
        recover_s=recover_s,
        errors=tuple((wrong + errors)[:SHOWN_ERRORS]),
        failed=failed,
    )


def _until_restarted(watch: VerdictWatch, guilty: str) -> None:
    def unmet() -> str | None:
        done = any(one.whom == guilty and one.word == "Done" for one in watch.repairs)
        return None if done else f"repairs are {watch.repairs}, verdicts {watch.verdicts[-4:]}"

    wait_for(f"the restart of {guilty}", unmet, deadline_s=REPAIRED_S)


def _recovered(stage: Stage, watch: VerdictWatch) -> float:
    """Wait until all is Ready, listed and judged well. Return the seconds since the fault."""
    stage.settle(RECOVERED_S)
    wait_for("all instances to be judged well", watch.well, deadline_s=RECOVERED_S)
    return watch.since_s

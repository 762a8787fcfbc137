"""Judges runs of faults. Pure.

right       <=>  `wrong(expectation, run)` is empty

side right  <=>  no instance but the one at fault is judged Stuck or Failing, and the one at fault is

false repair     a restart or purge of an instance that is not at fault, or of any instance where a restart is
                 forbidden. In the mode Observe a proposal counts like a restart, and a restart is always false
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proof.cluster.percentile import percentile
from proof.faults.expectation import ACCUSES, Expectation, Mode, Restart

NONE = "none"


@dataclass(frozen=True)
class Said:
    """A word of the operator about an instance or a pool.

    Attributes:
        at_s: Seconds since the fault.
        whom: Instance such as `decode/1`, or a side.
        word: A verdict, a reason, or the state of a repair, with the action before it if that is not a restart.
    """

    at_s: float
    whom: str
    word: str


@dataclass(frozen=True)
class Run:
    """One run of one scenario, as observed.

    Attributes:
        scenario, mode, number: Which run.
        guilty: The instance at fault, such as `decode/1`. Empty if there is none.
        verdicts: Of instances, when they began.
        reasons: Of the conditions of pools that are not as they should be, when they were first given.
        repairs: States of the records in `status.repairs`, when they were first seen.
        asked, lost, wrong_tokens: Requests of the clients.
        recover_s: Seconds from the fault until all was Ready, listed and judged well. None: not within the limit.
        errors: The first lost requests.
        failed: Why the run could not be played to its end. Empty if it was.
    """

    scenario: str
    mode: Mode
    number: int
    guilty: str
    verdicts: tuple[Said, ...]
    reasons: tuple[Said, ...]
    repairs: tuple[Said, ...]
    asked: int
    lost: int
    wrong_tokens: int
    recover_s: float | None
    errors: tuple[str, ...] = ()
    failed: str = ""


def verdict_of(wanted: Expectation, run: Run) -> Said | None:
    """Return the first accepted verdict on the instance at fault. None if there was none."""
    return next((one for one in run.verdicts if one.whom == run.guilty and one.word in wanted.verdicts), None)


def reason_of(wanted: Expectation, run: Run) -> Said | None:
    """Return the first accepted reason of the pool at fault. None if there was none."""
    return next((one for one in run.reasons if one.whom == wanted.side and one.word in wanted.reasons), None)


def accused(run: Run) -> tuple[Said, ...]:
    """Return the verdicts on which an instance is repaired."""
    return tuple(one for one in run.verdicts if one.word in ACCUSES)


def wrongly_accused(wanted: Expectation, run: Run) -> list[Said]:
    """Return the accusations of instances that are not at fault."""
    return [one for one in accused(run) if not wanted.verdicts or one.whom != run.guilty]


def side_right(wanted: Expectation, run: Run) -> bool:
    """Return whether exactly the instance at fault was named, or none where none is at fault."""
    return not wrongly_accused(wanted, run) and (not wanted.verdicts or verdict_of(wanted, run) is not None)


def false_repairs(wanted: Expectation, run: Run) -> list[Said]:
    """Return the repairs that should not be. In Observe, the proposals as well."""
    forbidden = {"Intended", "Done"} if run.mode is Mode.ENFORCE else {"Proposed", "Intended", "Done"}
    allowed: set[str] = set()
    if wanted.repair is not Restart.FORBIDDEN:
        allowed = {"Intended", "Done"} if run.mode is Mode.ENFORCE else {"Proposed"}
    return [
        one
        for one in run.repairs
        if _state(one) in forbidden and not (one.whom == run.guilty and _state(one) in allowed)
    ]


def _state(repair: Said) -> str:
    """Return the state of a repair of any action."""
    return repair.word.rpartition(" ")[2]


def repaired(run: Run) -> Said | None:
    """Return when the instance at fault was restarted. None if it was not."""
    return next((one for one in run.repairs if one.whom == run.guilty and one.word == "Done"), None)


def wrong(wanted: Expectation, run: Run) -> list[str]:
    """Return the reasons why a run is not right. Empty if it is."""
    found = list(_wrong_words(wanted, run))
    found += [f"repaired or proposed, but not at fault: {one.whom} {one.word}" for one in false_repairs(wanted, run)]
    if wanted.repair is Restart.REQUIRED:
        mine = [one for one in run.repairs if one.whom == run.guilty]
        if run.mode is Mode.ENFORCE and repaired(run) is None:
            found.append(f"no restart of {run.guilty} is Done")
        if run.mode is Mode.OBSERVE and not any(_state(one) == "Proposed" for one in mine):
            found.append(f"no repair of {run.guilty} is Proposed")
    if run.failed:
        found.append(f"not played to its end: {run.failed}")
    if run.asked == 0:
        found.append("no request was sent")
    if run.lost > wanted.may_lose:
        found.append(f"{run.lost} of {run.asked} requests lost, at most {wanted.may_lose} may be")
    if run.wrong_tokens:
        found.append(f"{run.wrong_tokens} requests answered with other tokens")
    if run.recover_s is None and not run.failed:
        found.append("not recovered in time")
    return found


def _wrong_words(wanted: Expectation, run: Run) -> Iterator[str]:
    for one in wrongly_accused(wanted, run):
        yield f"{one.whom} is not at fault and was judged {one.word} after {one.at_s:.1f} s"
    for one in run.reasons:
        if one.word in wanted.never:
            yield f"reason {one.word} was given for {one.whom} after {one.at_s:.1f} s"
    for what, words, said in (
        ("verdict", wanted.verdicts, verdict_of(wanted, run)),
        ("reason", wanted.reasons, reason_of(wanted, run)),
    ):
        if not words:
            continue
        if said is None:
            yield f"{what} {' or '.join(words)} was not given for {run.guilty or wanted.side}"
        elif wanted.within_s is not None and said.at_s > wanted.within_s:
            yield f"{what} {said.word} came after {said.at_s:.1f} s, at most {wanted.within_s:.0f} s are allowed"


def confusion(wanted: Mapping[str, Expectation], runs: Sequence[Run]) -> Counter[tuple[str, str]]:
    """Return how often each truth met each first accusation. Both are text such as `decode Stuck`, or `none`."""
    found: Counter[tuple[str, str]] = Counter()
    for run in runs:
        one = wanted[run.scenario]
        first = next(iter(accused(run)), None)
        truth = f"{one.side} {'/'.join(one.verdicts)}" if one.verdicts else NONE
        found[truth, f"{first.whom.partition('/')[0]} {first.word}" if first else NONE] += 1
    return found


def summary(wanted: Mapping[str, Expectation], runs: Sequence[Run], due: int) -> tuple[bool, str]:
    """Return whether all is well, and the last line.

    Args:
        wanted: Expectations by name of scenario.
        runs: Those that were played.
        due: How many were to be played.
    """
    right = sum(not wrong(wanted[run.scenario], run) for run in runs)
    sides = sum(side_right(wanted[run.scenario], run) for run in runs)
    false = sum(len(false_repairs(wanted[run.scenario], run)) for run in runs)
    named = [said.at_s for run in runs if (said := verdict_of(wanted[run.scenario], run)) is not None]
    healed = [run.recover_s for run in runs if repaired(run) and run.recover_s is not None]
    fine = bool(runs) and len(runs) >= due and right == len(runs)
    fields = {
        "scenarios": len({run.scenario for run in runs}),
        "right": f"{right}/{len(runs)}",
        "side_right": f"{sides}/{len(runs)}",
        "mttd_p50_s": f"{percentile(named, 0.5):.1f}",
        "mttd_p95_s": f"{percentile(named, 0.95):.1f}",
        "mttr_p50_s": f"{percentile(healed, 0.5):.1f}",
        "mttr_p95_s": f"{percentile(healed, 0.95):.1f}",
        "false_repairs": false,
    }
    words = " ".join(f"{name}={value}" for name, value in fields.items())
    missing = "" if len(runs) >= due else f" not_played={due - len(runs)}"
    return fine, f"faults {'ok' if fine else 'failed'}: {words}{missing}"

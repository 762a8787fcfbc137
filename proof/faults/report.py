"""Shows results: one line for a run, the confusion matrix, and the table of docs/faults.md."""

from collections.abc import Iterator, Mapping, Sequence

from proof.faults.expectation import Expectation
from proof.faults.score import Run, accused, confusion, repaired, verdict_of, wrong


def line(wanted: Expectation, run: Run) -> str:
    """Return the result of one run."""
    said, done, found = verdict_of(wanted, run), repaired(run), wrong(wanted, run)
    others = ", ".join(f"{one.whom} {one.word} after {one.at_s:.1f} s" for one in accused(run) if one is not said)
    words = [
        f"{said.whom} {said.word} after {said.at_s:.1f} s" if said else "none named" if not others else "",
        others,
        f"restarted after {done.at_s:.1f} s" if done else _proposed(run),
        "not recovered" if run.recover_s is None else f"well after {run.recover_s:.1f} s",
        f"{run.lost} of {run.asked} requests lost",
    ]
    text = f"{run.scenario} {run.mode} #{run.number}: {'right' if not found else 'WRONG'}: "
    return text + "; ".join(filter(None, words)) + "".join(f"\n    {reason}" for reason in found)


def _proposed(run: Run) -> str:
    first = next((one for one in run.repairs if one.word.endswith("Proposed")), None)
    return f"repair of {first.whom} proposed after {first.at_s:.1f} s" if first else "no repair"


def matrix(wanted: Mapping[str, Expectation], runs: Sequence[Run]) -> Iterator[str]:
    """Yield the confusion matrix, one line for each pair of truth and first accusation."""
    for (truth, said), times in sorted(confusion(wanted, runs).items()):
        yield f"at fault: {truth:16} named first: {said:16} {times:3}"


def table(wanted: Mapping[str, Expectation], runs: Sequence[Run]) -> str:
    """Return the results in Markdown, one row for each scenario and mode that was run."""
    rows = ["| scenario | mode | runs | right | slowest verdict | slowest recovery | requests lost |"]
    rows.append("|---|---|---|---|---|---|---|")
    keys = [(name, mode) for name in wanted for mode in sorted({run.mode for run in runs if run.scenario == name})]
    for name, mode in keys:
        of_it = [run for run in runs if (run.scenario, run.mode) == (name, mode)]
        named = [said.at_s for run in of_it if (said := verdict_of(wanted[name], run))]
        well = [run.recover_s for run in of_it if run.recover_s is not None]
        right = sum(not wrong(wanted[name], run) for run in of_it)
        rows.append(
            f"| `{name}` | {mode} | {len(of_it)} | {right} | {_slowest(named)} | {_slowest(well)} | "
            f"{sum(run.lost for run in of_it)} of {sum(run.asked for run in of_it)} |"
        )
    missing = ", ".join(f"`{name}`" for name in wanted if not any(run.scenario == name for run in runs))
    return "\n".join(rows) + (f"\n\nNot run: {missing}." if missing else "")


def _slowest(seconds: Sequence[float]) -> str:
    return f"{max(seconds):.1f} s" if seconds else "none"

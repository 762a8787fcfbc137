"""Shows results: one block of lines for a run, and the table of docs/drills.md."""

from collections.abc import Iterator, Sequence

from proof.drills.scenario import Scenario
from proof.drills.verdict import Run, faults


def lines(scenario: Scenario, run: Run) -> Iterator[str]:
    """Yield the result of one run as text."""
    found = faults(scenario.expected, run)
    recovered = "not recovered" if run.recover_s is None else f"recovered in {run.recover_s:.1f} s"
    yield (
        f"{run.drill} #{run.number}: {'ok' if not found else 'FAILED'}: {run.asked} requests, {run.lost} lost, "
        f"{run.wrong_tokens} with wrong tokens, {recovered}, {run.stuck_after} stuck after"
    )
    yield "  words: " + "; ".join(run.words)
    yield from (f"  request: {error}" for error in run.errors)
    yield from (f"  {reason}" for reason in found)


def table(drills: Sequence[Scenario], runs: Sequence[Run]) -> str:
    """Return the results as a table in Markdown, one row for each drill."""
    rows = ["| drill | runs | requests | lost | wrong tokens | stuck after | slowest recovery | as expected |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for drill in drills:
        of_it = [one for one in runs if one.drill == drill.name]
        if not of_it:
            rows.append(f"| `{drill.name}` | 0 | | | | | | not run |")
            continue
        recoveries = [one.recover_s for one in of_it if one.recover_s is not None]
        right = sum(not faults(drill.expected, one) for one in of_it)
        rows.append(
            f"| `{drill.name}` | {len(of_it)} | {sum(one.asked for one in of_it)} | {sum(one.lost for one in of_it)} | "
            f"{sum(one.wrong_tokens for one in of_it)} | {sum(one.stuck_after for one in of_it)} | "
            f"{f'{max(recoveries):.1f} s' if recoveries else 'none'} | {right} of {len(of_it)} |"
        )
    return "\n".join(rows)

"""Writes results into a page of the documentation."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from dev.paths import CHECKOUT
from dev.shell import run, write_text

END: Final = "<!-- end of results -->"


def begin_mark(target: str) -> str:
    """Return the line before the results of a `make` target."""
    return f"<!-- results: written by `make {target}` -->"


def write(page: Path, target: str, results: str, last_line: str) -> None:
    """Put results, the date and the commit between the marks of a page.

    Args:
        page: A file in Markdown.
        target: The `make` target that made the results.
        results: Markdown.
        last_line: The line that the target prints last.

    Raises:
        ValueError: the page lacks the marks.
    """
    text, begin = page.read_text(), begin_mark(target)
    if begin not in text or END not in text:
        raise ValueError(f"{page}: the lines {begin!r} and {END!r} are missing: put them around the results")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(END)
    body = f"Run on {datetime.now(UTC):%Y-%m-%d} at commit `{_commit()}`:\n\n{results}\n\n"
    write_text(page, f"{before}{begin}\n\n{body}```text\n{last_line}\n```\n\n{END}{after}")


def _commit() -> str:
    found = run("git", "-C", CHECKOUT, "rev-parse", "--short=8", "HEAD").strip()
    clean = subprocess.run(["git", "-C", CHECKOUT, "diff", "--quiet", "HEAD"], check=False).returncode == 0
    return found if clean else f"{found}, with changes"

"""Keeps a generated page of the docs in step with its source."""

import sys
from pathlib import Path

import click


def keep(file: Path, text: str, *, module: str, check: bool) -> None:
    """Write the page if it differs from the file.

    Args:
        file: The committed page.
        text: The page as it is generated now.
        module: Module whose command writes it, for the message.
        check: Write nothing. End with exit code 1 if the file differs.
    """
    if file.exists() and file.read_text("utf-8") == text:
        return
    if check:
        click.echo(f"{file}: differs; run python -m {module} {file}", err=True)
        sys.exit(1)
    file.write_text(text, "utf-8")
    click.echo(f"wrote {file}")

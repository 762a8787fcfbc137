"""`python -m dev.tools build | path NAME`."""

import sys

import click

from dev.tools.build import BuildError, binary, build_all


@click.group()
def main() -> None:
    """Pinned Go programs that the local cluster runs."""


@main.command()
def build() -> None:
    """Build what is missing or changed."""
    build_all()


@main.command()
@click.argument("name")
def path(name: str) -> None:
    """Print where the built binary NAME lies."""
    print(binary(name))


try:
    main()
except BuildError as error:
    sys.exit(f"tools: {error}")

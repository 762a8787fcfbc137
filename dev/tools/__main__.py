"""`python -m dev.tools build | path NAME | run NAME ARGUMENTS`."""

import os
import sys

import click

from dev.tools.build import BuildError, binary, build, module_of


@click.group()
def main() -> None:
    """Pinned Go programs: those the local cluster runs, kubectl and helm."""


@main.command("build")
def build_command() -> None:
    """Build what is missing or changed."""
    build()


@main.command()
@click.argument("name")
def path(name: str) -> None:
    """Print where the built binary NAME lies."""
    print(binary(name))


@main.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(name: str, arguments: tuple[str, ...]) -> None:
    """Become the binary NAME, built first if need be."""
    build([module_of(name)])
    os.execv(binary(name), [name, *arguments])


try:
    main()
except BuildError as error:
    sys.exit(f"tools: {error}")

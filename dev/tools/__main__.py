"""`python -m dev.tools build | path NAME | run NAME ARGUMENTS`."""

import os
import sys

import click

from dev.tools.build import BuildError, binary, build, module_of


@click.group()
def main() -> None:
    """Pinned Go programs: those of the local cluster, kubectl and helm."""


@main.command("build")
def build_command() -> None:
    """Build missing or changed programs."""
    build()


@main.command()
@click.argument("name")
def path(name: str) -> None:
    """Print the path of the built binary NAME."""
    print(binary(name))


@main.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(name: str, arguments: tuple[str, ...]) -> None:
    """Run the binary NAME in place of this process. Build it first if needed."""
    build([module_of(name)])
    os.execv(binary(name), [name, *arguments])


try:
    main()
except BuildError as error:
    sys.exit(f"tools: {error}")

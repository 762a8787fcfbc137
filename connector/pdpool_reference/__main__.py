"""`python -m pdpool_reference`: one engine."""

import sys

import click

from pdpool_reference.options import engine_options, make_options


@click.command()
@engine_options
def main(**values: object) -> None:
    """Run a reference engine: a small real model on the CPU, behind SGLang's HTTP interface."""
    options = make_options(values)
    from pdpool_reference.server_process import run_engine

    sys.exit(run_engine(options))


if __name__ == "__main__":
    main()

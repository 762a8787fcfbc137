"""`pdpool engine` and `pdpool demo`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
from pdpool_connector.installed import install_command

from pdpool_reference.options import engine_options, make_options


@click.command()
@engine_options
def engine(**values: object) -> None:
    """Run a reference engine: a small real model on the CPU, behind SGLang's HTTP interface."""
    options = make_options(values)
    with _extra_named():
        from pdpool_reference.server_process import run_engine
    sys.exit(run_engine(options))


@click.command()
@click.option(
    "--model", "model_path", default=None, help="Converted model, or `tiny`.  [default: SmolLM2, fetched once]"
)
@click.option(
    "--transfer-backend", type=click.Choice(("auto", "nixl", "mooncake", "local")), default="auto", show_default=True
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the router.  [default: a free one]")
@click.option("--once", is_flag=True, help="Exit after the answer.")
@click.argument("question", default="What is the capital of France?")
def demo(model_path: str | None, transfer_backend: str, port: int, *, once: bool, question: str) -> None:
    """Run prefill, decode and router on this machine, without root or cluster. Ctrl-C ends them."""
    with _extra_named():
        from pdpool_reference.demo.story import run_demo
    sys.exit(run_demo(question, model_path=model_path, backend=transfer_backend, port=port, once=once))


@contextmanager
def _extra_named() -> Iterator[None]:
    """Name the extra to install when one of its packages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed; this command needs the extra `demo`: {install_command('demo')}"
        raise click.ClickException(message) from error

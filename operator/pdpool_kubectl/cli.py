"""The commands of `kubectl pdpool`. Exit codes are those of `EXIT_CODES`."""

import asyncio
import functools
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
from pdpool_operator.runtime.api import Api, ApiError

from .access import Access, AccessError
from .explain import explain_lines
from .fleet import Fleet, MissingError, NotInstalledError, read_fleet
from .queues import Reading, queue_lines, queues_json, read_queues
from .status import status_lines

EXIT_CODES = """\b
Exit codes:
  0  nothing needs attention
  1  something needs attention
  2  an argument is wrong
  3  the API server cannot be reached, refuses, or has no such object"""
ATTENTION, FAILED = 1, 3
OPERATOR_NAMESPACE = "pdpool-system"

Result = TypeVar("Result")
Command = Callable[..., None]


class CommandError(click.ClickException):
    """The command could not do its work."""

    exit_code = FAILED


def _options(command: Command) -> Command:
    """Add the options that every command has. They become the argument `access`."""

    @functools.wraps(command)
    def wrapped(
        *,
        kubeconfig: str | None,
        context: str | None,
        namespace: str | None,
        all_namespaces: bool,
        **others: Any,  # noqa: ANN401 - click's own
    ) -> None:
        if namespace and all_namespaces:
            raise click.UsageError("-n and -A exclude each other")
        command(access=Access(kubeconfig, context, namespace, all_namespaces), **others)

    for option in (
        click.option("--kubeconfig", metavar="FILE", help="Kubeconfig to use. Default: as kubectl."),
        click.option("--context", metavar="NAME", help="Context of the kubeconfig."),
        click.option("-A", "--all-namespaces", is_flag=True, help="Read all namespaces."),
        click.option("-n", "--namespace", metavar="NAME", help="Namespace. Default: that of the context."),
        click.option(
            "-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of what is printed."
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def _operator_namespace(command: Command) -> Command:
    return click.option(
        "--operator-namespace",
        default=OPERATOR_NAMESPACE,
        show_default=True,
        metavar="NAME",
        help="Namespace of the operator.",
    )(command)


def _run(access: Access, work: Callable[[Api], Awaitable[Result]]) -> Result:
    """Run a command's work with an open client, and turn its errors into messages and exit codes."""

    async def with_api() -> Result:
        async with access.api() as api:
            return await work(api)

    coroutine: Coroutine[Any, Any, Result] = with_api()
    try:
        return asyncio.run(coroutine)
    except (AccessError, ApiError, NotInstalledError, MissingError) as error:
        raise CommandError(str(error)) from error


async def _fleet(api: Api, access: Access, name: str | None) -> Fleet:
    fleet = await read_fleet(api, access.scope())
    return fleet if name is None else fleet.named(name)


def _print(lines: Any) -> None:  # noqa: ANN401 - lines or JSON
    if isinstance(lines, dict):
        click.echo(json.dumps(lines, indent=2))
        return
    text = "\n".join(lines).rstrip()
    click.echo(text)


def _now() -> datetime:
    return datetime.now(UTC)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
def cli() -> None:
    """Look at prefill/decode serving on Kubernetes, with your own rights.

    Every command takes --context, --kubeconfig, -n and -A, as kubectl does.
    """


@cli.command(epilog=EXIT_CODES)
@click.argument("name", required=False)
@_options
def status(*, access: Access, name: str | None, output: str) -> None:
    """Show services and pools with conditions, instances and verdicts.

    NAME is that of a service or pool. Default: all of the namespace.
    """
    fleet = _run(access, lambda api: _fleet(api, access, name))
    _print(fleet.to_dict() if output == "json" else status_lines(fleet, _now()))
    sys.exit(ATTENTION if fleet.needs_attention else 0)


@cli.command(epilog=EXIT_CODES)
@click.argument("name", required=False)
@_options
def explain(*, access: Access, name: str | None, output: str) -> None:
    """Say in sentences what needs attention, which side is at fault, and where to look next.

    NAME is that of a service or pool. Default: all of the namespace.
    """
    fleet = _run(access, lambda api: _fleet(api, access, name))
    lines = list(explain_lines(fleet, access, _now()))
    if output == "json":
        _print({"needsAttention": fleet.needs_attention, "lines": [line for line in lines if line]})
    else:
        _print(lines)
    sys.exit(ATTENTION if fleet.needs_attention else 0)


@cli.command(epilog=EXIT_CODES)
@click.argument("name", required=False)
@click.option("-w", "--watch", is_flag=True, help="Print again and again until interrupted.")
@click.option("--interval", "interval_s", type=click.FloatRange(0.5, 3600), default=3.0, show_default=True)
@_operator_namespace
@_options
def queues(
    *, access: Access, name: str | None, output: str, watch: bool, interval_s: float, operator_namespace: str
) -> None:
    """Show the live lengths of hand-off queues, by rank.

    The lengths come from the operator's metrics, through the API server's proxy of pods. That needs the right to get
    pods/proxy in the operator's namespace. Without it, the verdicts are shown, and the reason on stderr.
    """
    try:
        fleet = _run(access, lambda api: _queues(api, access, name, output, watch, interval_s, operator_namespace))
    except KeyboardInterrupt:
        sys.exit(0)
    sys.exit(ATTENTION if fleet.needs_attention else 0)


async def _queues(
    api: Api, access: Access, name: str | None, output: str, watch: bool, interval_s: float, operator_namespace: str
) -> Fleet:
    before: tuple[Reading, float] | None = None
    while True:
        fleet, reading, at = (
            await _fleet(api, access, name),
            await read_queues(api, operator_namespace),
            time.monotonic(),
        )
        if reading.error:
            click.echo(f"no live lengths: {reading.error}", err=True)
        if output == "json":
            _print(queues_json(fleet, reading))
        else:
            earlier, passed_s = (before[0], at - before[1]) if before else (None, 0.0)
            if watch and sys.stdout.isatty():
                click.clear()
            _print(queue_lines(fleet, reading, earlier, passed_s))
        if not watch:
            return fleet
        before = reading, at
        await asyncio.sleep(interval_s)

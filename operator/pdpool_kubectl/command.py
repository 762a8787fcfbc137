"""What all commands of `kubectl pdpool` share: options, an open client, exit codes, and how they print."""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import click
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.api_errors import ApiError

from .access import Access, AccessError
from .fleet import MissingError, NotInstalledError
from .operate import LostError

ATTENTION, FAILED = 1, 3

Result = TypeVar("Result")
Command = Callable[..., None]
Option = Callable[[Command], Command]
"""Decorator that adds an option or argument to a command."""


class CommandError(click.ClickException):
    """The command could not do its work."""

    exit_code = FAILED


def options(command: Command) -> Command:
    """Add the options that every command has. They become the argument `access`."""
    return _options(command, _ALL_NAMESPACES)


def options_of_one_namespace(command: Command) -> Command:
    """Add the same options without -A, for a command that is about one namespace."""
    return _options(command)


_ALL_NAMESPACES = click.option("-A", "--all-namespaces", is_flag=True, help="Read all namespaces.")


def _options(command: Command, *more: Option) -> Command:
    @functools.wraps(command)
    def wrapped(
        *,
        kubeconfig: str | None,
        context: str | None,
        namespace: str | None,
        all_namespaces: bool = False,
        **others: Any,  # noqa: ANN401 - click's own
    ) -> None:
        if namespace and all_namespaces:
            raise click.UsageError("-n and -A exclude each other")
        command(access=Access(kubeconfig, context, namespace, all_namespaces), **others)

    added: tuple[Option, ...] = (
        click.option("--kubeconfig", metavar="FILE", help="Kubeconfig to use. Default: as kubectl."),
        click.option("--context", metavar="NAME", help="Context of the kubeconfig."),
        *more,
        click.option("-n", "--namespace", metavar="NAME", help="Namespace. Default: that of the context."),
        click.option(
            "-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of what is printed."
        ),
    )
    decorated: Command = wrapped
    for option in added:
        decorated = option(decorated)
    return decorated


def run(access: Access, work: Callable[[Api], Awaitable[Result]]) -> Result:
    """Run a command's work with an open client, and turn its errors into messages and exit codes."""

    async def with_api() -> Result:
        async with access.api() as api:
            return await work(api)

    coroutine: Coroutine[Any, Any, Result] = with_api()
    try:
        return asyncio.run(coroutine)
    except ApiError as error:
        hint = (
            "; if the API server does not know pdpool's kinds, install the chart first" if error.status == 404 else ""
        )
        raise CommandError(f"{error}{hint}") from error
    except (AccessError, LostError, NotInstalledError, MissingError) as error:
        raise CommandError(str(error)) from error


def namespace_of(access: Access) -> str:
    """Return the namespace of a command with `options_of_one_namespace`, with errors as `run` turns them."""
    try:
        return access.scope() or ""
    except AccessError as error:
        raise CommandError(str(error)) from error


def print_out(lines: Any) -> None:  # noqa: ANN401 - lines or JSON
    """Print lines, or a dict as JSON."""
    if isinstance(lines, dict):
        click.echo(json.dumps(lines, indent=2))
        return
    text = "\n".join(lines).rstrip()
    click.echo(text)

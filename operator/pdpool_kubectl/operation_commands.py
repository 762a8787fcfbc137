"""The commands `drain`, `restart`, `purge` and `fence`."""

import functools
import re
import sys

import click
from pdpool_operator.api.names import parse_instance
from pdpool_operator.api.operations import (
    INSTANCE_RULE,
    MAX_PURGE_AGE_S,
    NODE_PATTERN,
    NODE_RULE,
    PURGE_AGE_S,
    OperationType,
)
from pdpool_operator.runtime.api import Api

from .access import Access
from .command import ATTENTION, Command, Option, namespace_of, options_of_one_namespace, print_out, run
from .operate import Seen, create, follow

WARNING = """\
You declare that the node {node} is switched off or erased, and that no process on it runs any more.
Engines in the namespace {namespace} will then reuse the memory that they hold for its processes.
If one of these processes still runs, it CORRUPTS that memory: other requests get wrong answers, without an error.
A node that does not answer, or is NotReady, is not off. Look at its power supply or at the cloud's console first.
"""
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def _age(_context: click.Context, _option: click.Parameter, text: str) -> int:
    """Read a number of seconds, minutes or hours: `60s`, `5m`, `1h`."""
    found = re.fullmatch(r"([0-9]{1,9})([smh])", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no age: give a whole number with s, m or h, such as 90s or 5m")
    age_s = int(found[1]) * _SECONDS[found[2]]
    if age_s > MAX_PURGE_AGE_S:
        raise click.BadParameter(f"{text} is more than a day")
    return age_s


def _run(
    access: Access,
    type_: OperationType,
    target: str,
    output: str,
    *,
    wait: bool,
    older_than_s: int | None = None,
) -> None:
    named, namespace = "", namespace_of(access)

    async def work(api: Api) -> Seen:
        nonlocal named
        operation = await create(api, namespace, type_, target, older_than_s)
        named = operation.name
        click.echo(f"created PoolOperation {named}", err=True)
        return await follow(api, operation, functools.partial(click.echo, err=True)) if wait else operation

    try:
        seen = run(access, work)
    except KeyboardInterrupt:
        click.echo(f"PoolOperation {named} goes on, unless you delete it" if named else "interrupted", err=True)
        sys.exit(ATTENTION)
    print_out(seen.to_dict() if output == "json" else _outcome(access, seen))
    sys.exit(ATTENTION if seen.failed else 0)


def _outcome(access: Access, seen: Seen) -> list[str]:
    if not seen.phase.finished:
        return [f"kubectl get poolop {seen.name} {access.flags(seen.namespace)}  # shows how far it is"]
    if seen.failed or seen.type is not OperationType.DRAIN:
        return [seen.line()]
    return [seen.line(), f"kubectl delete poolop {seen.name} {access.flags(seen.namespace)}  # takes it back in"]


OPERATION_EXIT_CODES = """\b
Exit codes:
  0  the operation has succeeded, or was created with --no-wait
  1  it has failed, or you interrupted the command
  2  an argument is wrong
  3  the API server cannot be reached or refuses, the operation was deleted, or no operator ends it"""


def _waiting(command: Command) -> Command:
    words = "Follow the operation until it has ended, or only create it. Default: follow."
    return click.option("--wait/--no-wait", default=True, help=words)(command)


def _on_instance(type_: OperationType, what: str, *more: Option) -> click.Command:
    """Return the command that creates an operation of this type on an instance, and follows it.

    Args:
        type_: The type. Its name is that of the command.
        what: What it does, as text of the help.
        more: Other options.
    """

    def command(*, access: Access, instance: str, output: str, wait: bool, older_than_s: int | None = None) -> None:
        if parse_instance(instance) is None:
            raise click.UsageError(INSTANCE_RULE)
        _run(access, type_, instance, output, wait=wait, older_than_s=older_than_s)

    made: Command = options_of_one_namespace(command)
    added: tuple[Option, ...] = (_waiting, *more, click.argument("instance"))
    for option in added:
        made = option(made)
    target = "INSTANCE is the name of an instance or of its pod. The progress is on stderr."
    return click.command(type_.lower(), help=f"{what}\n\n{target}", epilog=OPERATION_EXIT_CODES)(made)


drain = _on_instance(OperationType.DRAIN, "Take INSTANCE out of the rotation, until the operation is deleted.")
restart = _on_instance(
    OperationType.RESTART, "Drain INSTANCE, replace its pod, and wait until the new one is back in the rotation."
)
purge = _on_instance(
    OperationType.PURGE,
    "End old hand-offs of INSTANCE, which stays in the rotation.\n\n"
    "Nothing is restarted. Both sides answer the requests with HTTP 503, and a router tries them again.",
    click.option(
        "--older-than",
        "older_than_s",
        callback=_age,
        default=f"{PURGE_AGE_S}s",
        show_default=True,
        metavar="AGE",
        help="Age of the hand-offs that end: 90s, 5m, 1h. 0s ends all.",
    ),
)


def _confirm(node: str, namespace: str) -> None:
    """Ask for the name of the node. Exit if another text is given, or none."""
    click.echo(WARNING.format(node=node, namespace=namespace), err=True)
    try:
        given = click.prompt("Type the name of the node to go on", default="", show_default=False, err=True)
    except click.Abort:
        given = ""
    if given != node:
        click.echo("nothing was created", err=True)
        sys.exit(ATTENTION)


@click.command(epilog=OPERATION_EXIT_CODES)
@click.argument("node")
@click.option("-y", "--yes", is_flag=True, help="Do not ask. For scripts.")
@_waiting
@options_of_one_namespace
def fence(*, access: Access, node: str, output: str, wait: bool, yes: bool) -> None:
    """Declare that NODE is switched off or erased, so that memory held for its processes is released.

    Engines in the namespace hold memory for processes of a lost node until there is proof that they have ended. Your
    word is this proof. A WRONG DECLARATION CORRUPTS MEMORY: if a process still runs, it overwrites the cache of other
    requests, and their answers are wrong without an error. A node that only does not answer is not off.

    NODE must be gone from the cluster, or have the taint node.kubernetes.io/out-of-service. The progress is on stderr.
    """
    if re.fullmatch(NODE_PATTERN, node) is None:
        raise click.UsageError(NODE_RULE)
    if not yes:
        _confirm(node, namespace_of(access))
    _run(access, OperationType.FENCE, node, output, wait=wait)

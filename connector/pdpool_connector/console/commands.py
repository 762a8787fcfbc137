"""The commands of `pdpool connector`."""

import math
import sys
from pathlib import Path

import click

from pdpool_connector.console.story import event_line, story
from pdpool_connector.flight.record import RecordError, decode_record
from pdpool_connector.flight.replay import replay as run_again
from pdpool_connector.installed import install_command
from pdpool_connector.protocol.frames import shown
from pdpool_connector.transport.address import parse_address


@click.group()
def connector() -> None:
    """Look at connectors, live or after the fact."""


@connector.command()
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def replay(file: Path, *, quiet: bool) -> None:
    """Print the flight record of a failed hand-off, and run it through the state machine again.

    The connector writes a record to its `flight_dir` when a hand-off fails. Exit code 0: the machine of this version
    does the same. 1: it does not; the first difference is shown. 2: FILE is no record, or cannot be replayed.
    """
    try:
        record = decode_record(file.read_bytes())
        if not quiet:
            for line in story(record):
                click.echo(line)
        result = run_again(record)
    except (OSError, RecordError) as error:
        click.echo(shown(f"{file}: {error}"), err=True)
        sys.exit(2)
    counts = f"events={result.events} effects={result.effects}"
    if (difference := result.difference) is None:
        click.echo(f"replay ok: {counts} differences=0")
        return
    click.echo(shown(f"step {difference.step}, {event_line(difference.event)}"))
    click.echo(shown(f"  recorded: {difference.recorded}"))
    click.echo(shown(f"  replayed: {difference.replayed}"))
    click.echo(f"replay differs: {counts} first difference at step {difference.step}")
    sys.exit(1)


@connector.command()
@click.option("--once", is_flag=True, help="Print one look and exit.")
@click.option("--interval", "interval_s", type=click.FloatRange(0.2, 3600), default=2.0, show_default=True)
@click.argument("addresses", nargs=-1, required=True, metavar="HOST:PORT...")
def top(addresses: tuple[str, ...], interval_s: float, *, once: bool) -> None:
    """Watch connectors: queues, ages, holds, rates, peers.

    HOST:PORT is a connector's admin endpoint, port 9400 in pdpool's pods. From outside the cluster, forward it
    first:

    \b
        kubectl port-forward -n NAMESPACE pod/POD 9400:9400
        pdpool connector top 127.0.0.1:9400

    Exit code 1: an address cannot be reached.
    """
    if math.isnan(interval_s):
        raise click.BadParameter("nan is no number of seconds", param_hint="--interval")
    for address in addresses:
        try:
            parse_address(address)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    try:
        from rich.console import Console

        from pdpool_connector.console.top import show, show_once
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed; this command needs the extra `console`: {install_command('console')}"
        raise click.ClickException(message) from error
    console = Console()
    if not once and not console.is_terminal:
        raise click.UsageError("the tables are drawn on a terminal, and this is no terminal: give --once for one look")
    sys.exit(show_once(addresses, console) if once else show(addresses, interval_s, console))

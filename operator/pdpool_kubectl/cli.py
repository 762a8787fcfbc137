"""The commands of `kubectl pdpool`. Exit codes are those of `EXIT_CODES`."""

import asyncio
import dataclasses
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import click
from pdpool_operator.diagnose.model import Verdict
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.api_errors import UnavailableError

from .access import Access
from .command import ATTENTION, Command, CommandError, namespace_of, options, options_of_one_namespace, print_out, run
from .doctor import FAILED as CHECK_FAILED
from .doctor import doctor_json, doctor_lines, examine
from .explain import explain_lines
from .fleet import Fleet, read_fleet
from .operation_commands import drain, fence, purge, restart
from .plan import plan_lines, plan_objects
from .plan_files import FileInvalidError, objects_of
from .queues import Reading, queue_lines, queues_json, read_queues
from .record import record as take_looks
from .record import unanswered
from .recording import RecordingError, dump, load
from .replay import as_test as test_of
from .replay import replay as run_again
from .replay import replay_lines
from .status import status_lines

EXIT_CODES = """\b
Exit codes:
  0  nothing needs attention
  1  something needs attention
  2  an argument is wrong
  3  the API server cannot be reached, refuses, or has no such object"""
OPERATOR_NAMESPACE = "pdpool-system"


def _operator_namespace(command: Command) -> Command:
    return click.option(
        "--operator-namespace",
        default=OPERATOR_NAMESPACE,
        show_default=True,
        metavar="NAME",
        help="Namespace of the operator.",
    )(command)


async def _fleet(api: Api, access: Access, name: str | None) -> Fleet:
    fleet = await read_fleet(api, access.scope())
    return fleet if name is None else fleet.named(name)


def _now() -> datetime:
    return datetime.now(UTC)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
def cli() -> None:
    """Look at prefill/decode serving on Kubernetes, drain, restart or purge an instance, and fence a lost node.

    The commands have your own rights.

    The commands take --context, --kubeconfig and -n, as kubectl does. Those that only show something take -A, too.
    """


@cli.command(epilog=EXIT_CODES)
@click.argument("name", required=False)
@options
def status(*, access: Access, name: str | None, output: str) -> None:
    """Show services and pools with conditions, instances and verdicts.

    NAME is that of a service or pool. Default: all of the namespace.
    """
    fleet = run(access, lambda api: _fleet(api, access, name))
    print_out(fleet.to_dict() if output == "json" else status_lines(fleet, access, _now()))
    sys.exit(ATTENTION if fleet.needs_attention else 0)


@cli.command(epilog=EXIT_CODES)
@click.argument("name", required=False)
@options
def explain(*, access: Access, name: str | None, output: str) -> None:
    """Say in sentences what needs attention, which side is at fault, and where to look next.

    NAME is that of a service or pool. Default: all of the namespace.
    """
    fleet = run(access, lambda api: _fleet(api, access, name))
    lines = list(explain_lines(fleet, access, _now()))
    if output == "json":
        print_out({"needsAttention": fleet.needs_attention, "lines": [line for line in lines if line]})
    else:
        print_out(lines)
    sys.exit(ATTENTION if fleet.needs_attention else 0)


@cli.command(epilog=EXIT_CODES)
@click.argument("name", required=False)
@click.option("-w", "--watch", is_flag=True, help="Print again and again until interrupted.")
@click.option("--interval", "interval_s", type=click.FloatRange(0.5, 3600), default=3.0, show_default=True)
@_operator_namespace
@options
def queues(
    *, access: Access, name: str | None, output: str, watch: bool, interval_s: float, operator_namespace: str
) -> None:
    """Show the live lengths of hand-off queues, by rank.

    The lengths come from the operator's metrics, through the API server's proxy of pods. That needs the right to get
    pods/proxy in the operator's namespace. Without it, the verdicts are shown, and the reason on stderr.
    """
    try:
        fleet = run(access, lambda api: _queues(api, access, name, output, watch, interval_s, operator_namespace))
    except KeyboardInterrupt:
        sys.exit(0)
    sys.exit(ATTENTION if fleet.needs_attention else 0)


async def _queues(
    api: Api, access: Access, name: str | None, output: str, watch: bool, interval_s: float, operator_namespace: str
) -> Fleet:
    before: tuple[Reading, float] | None = None
    while True:
        try:
            fleet = await _fleet(api, access, name)
        except UnavailableError as error:
            if before is None:
                raise
            click.echo(str(error), err=True)
            await asyncio.sleep(interval_s)
            continue
        reading, at = await read_queues(api, operator_namespace), time.monotonic()
        if reading.error:
            click.echo(f"no live lengths: {reading.error}", err=True)
        if output == "json":
            print_out(queues_json(fleet, reading))
        else:
            earlier, passed_s = (before[0], at - before[1]) if before else (None, 0.0)
            if watch and sys.stdout.isatty():
                click.clear()
            print_out(queue_lines(fleet, reading, earlier, passed_s))
        if not watch:
            return fleet
        before = reading, at
        await asyncio.sleep(interval_s)


@cli.command(epilog=EXIT_CODES)
@_operator_namespace
@options
def doctor(*, access: Access, output: str, operator_namespace: str) -> None:
    """Check each precondition by doing it, and print the command that repairs it.

    Checked are kinds, your rights, operator, Lease, metrics, alert rules, images, and RDMA devices. A check is unknown
    if you may not see what it needs.
    """
    checks = run(access, lambda api: examine(api, access, operator_namespace))
    print_out(doctor_json(checks) if output == "json" else doctor_lines(checks))
    sys.exit(ATTENTION if any(check.outcome == CHECK_FAILED for check in checks) else 0)


@cli.command(epilog=EXIT_CODES)
@click.argument("file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@click.option("--seconds", type=click.FloatRange(0, 3600), default=60.0, show_default=True, help="How long to record.")
@options_of_one_namespace
def record(*, access: Access, output: str, file: Path, seconds: float) -> None:
    """Record what an operator observes in a namespace into FILE, for `replay`.

    It reads pools, services, StatefulSets and pods, and asks engines through the API server's proxy, which needs the
    right to get pods/proxy. The file holds no pod templates, environment, keys or prompts. Ctrl-C ends the recording
    early. Exit code 1: an engine did not answer.
    """
    namespace = namespace_of(access)
    if not file.parent.is_dir():
        raise click.UsageError(f"{file}: there is no folder {file.parent}")

    def progress(text: str) -> None:
        click.echo(text, err=True)

    looks = run(access, lambda api: take_looks(api, namespace, seconds, progress))
    try:
        file.write_text(dump(namespace, looks), "utf-8")
    except OSError as error:
        raise CommandError(str(error)) from error
    silent = unanswered(looks)
    facts = {"file": str(file), "looks": len(looks), "unanswered": list(silent)}
    lines = [f"wrote {file}: {len(looks)} looks", *(f"! unanswered: {reason}" for reason in silent[:5])]
    print_out(facts if output == "json" else lines)
    sys.exit(ATTENTION if silent else 0)


cli.add_command(drain)
cli.add_command(restart)
cli.add_command(purge)
cli.add_command(fence)


@cli.command(
    epilog="""\b
Example:
  kubectl pdpool plan -f chat.yaml -n llm

\b
Exit codes:
  0  the API server and the operator accept the objects
  1  one of them is refused
  2  an argument or the file is wrong
  3  the API server cannot be reached, or refuses to read pools and services"""
)
@click.option("-f", "--filename", "file", type=click.File(), required=True, metavar="FILE", help="YAML; - is stdin.")
@options_of_one_namespace
def plan(*, access: Access, output: str, file: TextIO) -> None:
    """Say what would happen if the pools and services of FILE were applied. Nothing is changed.

    Each instance that would be restarted, added or removed is named, with the way in which that is done. A line that
    begins with `!` is a refusal. One that begins with `?` is a warning, something that is not known, or something that
    restarts wait for.
    """
    try:
        bodies = objects_of(file.read(), namespace_of(access))
    except (FileInvalidError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{file.name}: {error}") from error
    plans = run(access, lambda api: plan_objects(api, bodies, _now()))
    print_out({"objects": [one.to_dict() for one in plans]} if output == "json" else plan_lines(plans))
    sys.exit(ATTENTION if any(one.refusals for one in plans) else 0)


ALARMS = (str(Verdict.STUCK), str(Verdict.FAILING), str(Verdict.BLOCKED))


@cli.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--as-test", type=click.Path(dir_okay=False, path_type=Path), help="Write a pytest module, too.")
@click.option(
    "--alarm",
    "alarms",
    multiple=True,
    type=click.Choice([str(verdict) for verdict in Verdict]),
    default=ALARMS,
    show_default=True,
    help="Verdict that must not occur. Repeat it for several.",
)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of what is printed.")
def replay(*, file: Path, as_test: Path | None, alarms: tuple[str, ...], output: str) -> None:
    """Run the operator's diagnosis over a recording, and print each change of a verdict.

    It needs no cluster. With --as-test, a pytest module is written which fails while an alarm occurs. It expects FILE
    in its own folder.

    \b
    Exit codes:
      0  no alarm occurred
      1  an alarm occurred
      2  an argument is wrong
      3  FILE is no recording
    """
    if as_test is not None and as_test.resolve() == file.resolve():
        raise click.UsageError(f"--as-test {as_test} is the recording itself: give the module another name")
    try:
        changes = list(run_again(load(file)))
        if as_test is not None:
            as_test.write_text(test_of(file, alarms), "utf-8")
    except (OSError, RecordingError) as error:
        raise CommandError(str(error)) from error
    if output == "json":
        print_out({"changes": [dataclasses.asdict(change) for change in changes]})
    else:
        print_out(replay_lines(changes))
    sys.exit(ATTENTION if any(change.verdict in alarms for change in changes) else 0)

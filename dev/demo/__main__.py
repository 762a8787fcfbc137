"""`python -m dev.demo [up | down] [--engine reference | sglang | vllm] [--cluster local | current] [--registry R]`."""

import sys
from collections.abc import Callable
from typing import Any

import click
import openai

from dev.demo import down as removal
from dev.demo import story, trouble
from dev.demo.engine import ENGINES
from dev.demo.lock import alone
from dev.demo.screen import DemoError, Screen
from dev.demo.target import Target, target
from dev.shell import CommandError

FAILURES = (CommandError, DemoError, TimeoutError, openai.OpenAIError, OSError, KeyError)
CLUSTER = click.option(
    "--cluster",
    type=click.Choice(("local", "current")),
    default="local",
    show_default=True,
    help="The local Kubernetes of `make cluster`, or the current kubeconfig context.",
)
ENGINE = click.option(
    "--engine",
    type=click.Choice(tuple(ENGINES)),
    default="reference",
    show_default=True,
    help="The reference engine, or real SGLang or vLLM on CPU (7 to 9 GB of image, 12 GB of memory).",
)
REGISTRY = click.option("--registry", help="Where to push images for --cluster current: registry.example/team.")


def choose(screen: Screen, cluster: str, registry: str | None, engine: str = "reference") -> Target:
    """Return the cluster by its name, or end with a usage error."""
    if cluster == "current" and not registry:
        raise click.UsageError(
            "--cluster current needs --registry (`make demo CLUSTER=current REGISTRY=registry.example/team`): "
            "the nodes have to pull the images from somewhere"
        )
    try:
        return target(cluster, registry, screen, "make demo" + ("" if engine == "reference" else f" ENGINE={engine}"))
    except (CommandError, DemoError) as error:
        raise click.ClickException(str(error)) from error


def tell(screen: Screen, cluster: Target, engine: str) -> None:
    """Run the story. On failure, print a report and exit with 1."""
    try:
        figures = story.tell(screen, cluster, ENGINES[engine])
    except KeyboardInterrupt:
        screen.console.print(f"\ninterrupted; `{cluster.up}` continues from here, `{cluster.down}` removes everything")
        sys.exit(130)
    except FAILURES as error:
        trouble.report(screen, cluster, error)
        sys.exit(1)
    print(figures.line())


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the story."""
    return ENGINE(CLUSTER(REGISTRY(command)))


@click.group(invoke_without_command=True)
@options
@click.pass_context
def main(context: click.Context, engine: str, cluster: str, registry: str | None) -> None:
    """Pools on a real Kubernetes: install, ask, break, alert, recover."""
    if context.invoked_subcommand is None:
        context.invoke(up, engine=engine, cluster=cluster, registry=registry)


@main.command()
@options
def up(engine: str, cluster: str, registry: str | None) -> None:
    """Run the whole story. The cluster stays up."""
    screen = Screen()
    screen.say("the whole story takes some minutes; you may interrupt it at any time and run it again")
    with alone():
        tell(screen, choose(screen, cluster, registry, engine), engine)


@main.command()
@click.option("--cluster", type=click.Choice(("local", "current")), default="local", show_default=True)
@click.option("--keep-cluster", is_flag=True, help="Do not stop the local cluster.")
def down(cluster: str, keep_cluster: bool) -> None:
    """Stop the local cluster with everything in it. On another cluster, remove what the demo created."""
    screen = Screen()
    with alone():
        try:
            removal.everything(screen, choose(screen, cluster, "unused"), stops=cluster == "local" and not keep_cluster)
        except FAILURES as error:
            sys.exit(f"demo: {error}")


main()

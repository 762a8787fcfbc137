"""`python -m dev.cluster up | down | status | kubeconfig | env`."""

import json
import os
import sys
from pathlib import Path

import click

from dev.cluster import bringup, host, teardown
from dev.cluster.layout import State, state_at
from dev.shell import Clock, CommandError, exclusively
from dev.tools.build import BuildError

LOCK = Path("/run/lock/pdpool-cluster.lock")


@click.group()
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder of its files; default: in the cache.")
@click.pass_context
def main(context: click.Context, state_dir: Path | None) -> None:
    """A Kubernetes on this machine, with two real nodes."""
    record = host.read_record()
    # Every checkout and cache uses the one existing cluster.
    context.obj = state_at(Path(record.state) if record and state_dir is None else state_dir)


@main.command()
@click.option("--kwok-nodes", type=click.IntRange(0, 1000), help="Number of simulated nodes; default: as many as now.")
@click.pass_obj
def up(state: State, kwok_nodes: int | None) -> None:
    """Start the cluster, or complete it."""
    _need_root()
    clock = Clock("cluster")
    with exclusively(LOCK, "changing the cluster"):
        bringup.up(state, kwok_nodes, clock)
    click.echo(f"kubeconfig: {state.kubeconfig}\nbinaries:   {state.bin} (kubectl, helm, ctr, promtool)")


@main.command()
@click.pass_obj
def down(state: State) -> None:
    """Stop the cluster and undo its changes to this machine."""
    _need_root()
    with exclusively(LOCK, "changing the cluster"):
        if host.read_record() is None and not state.summary.exists():
            teardown.remove_leftover(state)
            click.echo("cluster: there is none")
            return
        teardown.down(state, Clock("cluster"))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_obj
def status(state: State, as_json: bool) -> None:
    """Print the state of the cluster. Exit code 1 if it is not ready."""
    found = bringup.status(state)
    if as_json:
        click.echo(json.dumps(found or {"ready": False, "reason": "there is no cluster"}, indent=2))
    elif found is None:
        click.echo("cluster: there is none; `make cluster` makes one")
    else:
        click.echo(f"cluster:    {'ready' if found['ready'] else 'NOT READY: ' + found['reason']}")
        for name, current in found["processes"].items():
            click.echo(f"  {name:26} {current}")
        for key in ("kubeconfig", "bin", "audit_log", "logs", "registry", "simulated_nodes"):
            click.echo(f"{key + ':':16} {found[key]}")
        click.echo("NetworkPolicies are accepted and NOT enforced: the nodes' bridge network has no policy engine.")
    sys.exit(0 if found and found["ready"] else 1)


@main.command()
@click.pass_obj
def kubeconfig(state: State) -> None:
    """Print the path of the kubeconfig."""
    click.echo(state.kubeconfig)


@main.command()
@click.pass_obj
def env(state: State) -> None:
    """Print shell assignments: `eval "$(python -m dev.cluster env)"`."""
    click.echo(f'export KUBECONFIG="{state.kubeconfig}"\nexport PATH="{state.bin}:$PATH"')


def _need_root() -> None:
    if os.geteuid() != 0:
        raise PermissionError("the cluster makes network bridges, mounts and cgroups: run this as root")


try:
    main()
except (BuildError, CommandError, OSError, RuntimeError, ValueError) as error:
    sys.exit(f"cluster: {error}")

"""Removes the cluster completely, even after a crash."""

import itertools
import shutil
from pathlib import Path

from dev import mounts
from dev.cluster import cgroups, host, processes, supervise
from dev.cluster.layout import NODES, State
from dev.images import store
from dev.shell import Clock, run

TASKS = "run/io.containerd.runtime.v2.task"


def down(state: State, clock: Clock) -> None:
    """End every process, undo every change outside the cache, and remove the state folder.

    Raises:
        CommandError: a change cannot be undone.
        RuntimeError: the machine's cluster has another state folder.
        TimeoutError: a process does not end.
    """
    record = host.own_record(state)
    clock.say("ending the cluster's processes")
    with clock.ticking(lambda: "waiting for their end"):
        supervise.stop(state)
        killed = processes.kill_everything(state)
    clock.say(f"ended supervisord and its programs, killed {killed} processes of pods and their shims")
    shim_sockets = _shim_sockets(state)
    unmounted = mounts.remove_below(state.root)
    for socket in shim_sockets:
        socket.unlink(missing_ok=True)
    clock.say(f"removed {unmounted} mounts, {len(shim_sockets)} sockets")
    _clean_iptables(clock)
    _clean_folders(state, record.folders if record else [])
    cgroups.remove()
    for line in host.restore():
        clock.say(f"undone: {line}")
    if mounts.below(state.root):
        raise RuntimeError(f"{state.root} still has mounts: {mounts.below(state.root)}")
    if state.root.exists():
        # Renamed first, so that an interrupted removal does not look like a usable state.
        remove_leftover(state)
        state.root.rename(_set_aside(state))
    clock.say(f"removing {state.root} with the nodes' copies of the images")
    remove_leftover(state)
    clock.say("the cluster is gone")


def remove_leftover(state: State) -> None:
    """Remove a state folder that an interrupted `down` has renamed."""
    if _set_aside(state).exists():
        shutil.rmtree(_set_aside(state))


def _set_aside(state: State) -> Path:
    return state.root.with_name(f".{state.root.name}.removed")


def _shim_sockets(state: State) -> list[Path]:
    """Return sockets of container shims. They are in a folder that all containerds of the machine share."""
    found: list[Path] = []
    for node in NODES:
        files = (state.node(node) / TASKS).glob("*/*/address")
        found += [Path(file.read_text().strip().removeprefix("unix://")) for file in files]
    return found


def _clean_iptables(clock: Clock) -> None:
    """Remove kube-proxy's chains. `kube-proxy --cleanup` leaves some, and its binary may be missing."""
    for command, table in itertools.product(("iptables", "ip6tables"), ("nat", "filter", "mangle")):
        rules = run(command, "-w", "-t", table, "-S").splitlines()
        chains = [rule.split()[1] for rule in rules if rule.startswith("-N KUBE-")]
        jumps = [r for r in rules if r.startswith("-A ") and not r.startswith("-A KUBE-") and r.split()[-1] in chains]
        if chains:
            changes = [rule.replace("-A", "-D", 1) for rule in jumps]
            changes += [f"-F {chain}" for chain in chains] + [f"-X {chain}" for chain in chains]
            run(f"{command}-restore", "--noflush", stdin="\n".join([f"*{table}", *changes, "COMMIT", ""]))
            clock.say(f"undone: {len(chains)} chains of kube-proxy in {command}'s table {table}")


def _clean_folders(state: State, made: list[str]) -> None:
    for node in NODES:
        for sandbox in (state.node(node) / "containerd/io.containerd.grpc.v1.cri/sandboxes").glob("*"):
            for cached in Path("/var/lib/cni/results").glob(f"*-{sandbox.name}-*"):
                cached.unlink()
    for link in Path("/var/log/containers").glob("*"):
        if link.is_symlink() and state.root in link.readlink().parents:
            link.unlink()
    # Device plugins connect to kubelets here. No other kubelet runs on this machine.
    for file in Path("/var/lib/kubelet/device-plugins").glob("*"):
        if "/var/lib/kubelet" in made:
            file.unlink()
    for folder in made:
        _remove_empty(Path(folder))
    # Mount point of image builds.
    _remove_empty(Path(store.SYSTEM_FOLDER))


def _remove_empty(folder: Path) -> None:
    """Remove an empty folder that the cluster created, with its empty subfolders. Files of others stay."""
    if not folder.is_dir():
        return
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            _remove_empty(child)
    if not any(folder.iterdir()):
        folder.rmdir()

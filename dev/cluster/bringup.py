"""Starts the cluster and reports its state. Each step makes only what is missing, so it can start from any state."""

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dev import packages
from dev.cluster import cgroups, host, layout, processes, simulated, supervise
from dev.cluster.certs import write_pki
from dev.cluster.components import programs
from dev.cluster.configuration import write_configuration
from dev.cluster.layout import NODES, Node, State
from dev.images.build import build
from dev.images.load import load
from dev.shell import Clock, CommandError, run, wait_for, write_text
from dev.tools.build import binary
from dev.tools.build import build as build_tools

MANIFESTS = Path(__file__).parent / "manifests"
START_S = 120.0
SYSTEM_IMAGES = ("pause", "coredns")


def up(state: State, simulated_nodes: int | None, clock: Clock) -> None:
    """Start the cluster. Processes that already run are left alone.

    Args:
        state: the cluster's files.
        simulated_nodes: number of kwok nodes. None keeps the present number.
        clock: prints progress.

    Raises:
        CommandError, RuntimeError, TimeoutError, BuildError: the message says what failed and why.
    """
    packages.ensure(clock)
    build_tools()
    count = simulated_nodes if simulated_nodes is not None else _simulated_before(state)
    clock.say(f"cluster state: {state.root} (one cluster per machine, shared by all checkouts)")
    host.prepare(state)
    cgroups.make()
    write_pki(state)
    write_configuration(state)
    _link_binaries(state)
    if supervise.process_id(state) is None:
        strays = processes.kill_strays(state)
        if strays:
            clock.say(f"ended {len(strays)} processes left by an earlier supervisord")
    before = _stored(state)
    # Marked complete only at the end, so that an interrupted start does not count as a finished one.
    write_text(state.summary, json.dumps(summary(state, count) | {"services_version": ""}, indent=2))
    wanted = programs(state, count)
    with clock.ticking(lambda: "starting the missing processes"):
        started = supervise.converge(state, wanted)
    if not started and before == summary(state, count) and _unready(state, count) is None:
        write_text(state.summary, json.dumps(before, indent=2))
        clock.say(f"all {len(wanted)} processes are running already, {len(NODES)} nodes and DNS are ready")
        return
    clock.say(f"started: {', '.join(started)}" if started else f"all {len(wanted)} processes are running already")
    for name in SYSTEM_IMAGES:
        build(name, clock)
    _load_system_images(state, clock)
    _await("API server is ready", lambda: _api_unready(state), clock)
    clock.say("API server is ready")
    _apply_manifests(state)
    simulated.converge(state, count)
    _await("nodes and DNS are ready", lambda: _unready(state, count), clock)
    write_text(state.summary, json.dumps(summary(state, count), indent=2))
    clock.say(f"{len(NODES)} nodes and DNS are ready" + (f", {count} simulated nodes" if count else ""))


def _await(what: str, unmet: Callable[[], str | None], clock: Clock) -> None:
    """Wait for a condition, and show what is missing."""
    reason: str | None = None

    def asked() -> str | None:
        nonlocal reason
        reason = unmet()
        return reason

    with clock.ticking(lambda: f"waiting until {what}" + (f": {reason}" if reason else "")):
        wait_for(what, asked, deadline_s=START_S)


def status(state: State) -> dict[str, Any] | None:
    """Return the state of the cluster, None if there is none.

    The keys are those of `summary`, and `processes` (name -> state), `ready` (bool), `reason` (why it is not ready).
    """
    stored = _stored(state)
    if stored is None:
        return None
    reason = _api_unready(state) or _unready(state, stored["simulated_nodes"])
    return stored | {"processes": supervise.states(state), "ready": reason is None, "reason": reason}


def summary(state: State, simulated_nodes: int) -> dict[str, Any]:
    """Return the facts about the cluster that other programs need. They are stored as JSON in `State.summary`."""
    return {
        "state": str(state.root),
        "kubeconfig": str(state.kubeconfig),
        "audit_log": str(state.audit_log),
        "logs": str(state.logs),
        "bin": str(state.bin),
        "registry": layout.REGISTRY,
        "nodes": [{"name": n.name, "address": n.address, "containerd": str(state.containerd_socket(n))} for n in NODES],
        "simulated_nodes": simulated_nodes,
        "services_version": _services_version(),
    }


def kubectl(state: State, *arguments: str | Path, stdin: str | None = None) -> str:
    """Run kubectl as the cluster's administrator and return its output.

    Raises:
        CommandError: kubectl failed.
    """
    return run(binary("kubectl"), f"--kubeconfig={state.kubeconfig}", "--request-timeout=10s", *arguments, stdin=stdin)


def _simulated_before(state: State) -> int:
    stored = _stored(state)
    return int(stored["simulated_nodes"]) if stored else 0


def _stored(state: State) -> dict[str, Any] | None:
    if not state.summary.exists():
        return None
    found: dict[str, Any] = json.loads(state.summary.read_text())
    return found


def _services_version() -> str:
    """Return a hash of everything that is applied and loaded into the API server. It shows whether that has changed."""
    digest = hashlib.sha256(repr([str(binary(name)) for name in SYSTEM_IMAGES]).encode())
    for manifest in sorted(MANIFESTS.iterdir()):
        digest.update(manifest.read_bytes())
    return digest.hexdigest()[:16]


def _link_binaries(state: State) -> None:
    state.bin.mkdir(parents=True, exist_ok=True)
    for name, target in [
        ("kubectl", binary("kubectl")),
        ("helm", binary("helm")),
        ("ctr", packages.program("ctr")),
        ("promtool", packages.program("promtool")),
    ]:
        draft = state.bin / f".{name}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(target)
        draft.rename(state.bin / name)


def _load_system_images(state: State, clock: Clock) -> None:
    for node in NODES:
        wait_for(
            f"container runtime of {node.name} answers", partial(_runtime_unready, state, node), deadline_s=START_S
        )
    wait_for("image registry answers", lambda: _http_unready(f"http://{layout.REGISTRY}/v2/"), deadline_s=START_S)
    for name in SYSTEM_IMAGES:
        load(name, state, clock)


def _apply_manifests(state: State) -> None:
    arguments = ("apply", "--server-side", "--force-conflicts", "--field-manager=pdpool-dev", "-f", MANIFESTS)

    def refused() -> str | None:
        try:
            kubectl(state, *arguments)
        except CommandError as error:
            return str(error)
        return None

    # A new API server answers before it has created its own namespaces and roles.
    wait_for("cluster services are applied", refused, deadline_s=30)


def _api_unready(state: State) -> str | None:
    try:
        kubectl(state, "get", "--raw=/readyz")
    except CommandError as error:
        return str(error)
    return None


def _unready(state: State, simulated_nodes: int) -> str | None:
    for node in NODES:
        # A node's condition outlives a crashed kubelet for a while, so the kubelet itself is asked.
        if reason := _http_unready(f"http://{node.address}:10248/healthz"):
            return f"kubelet of {node.name}: {reason}"
    try:
        nodes = json.loads(kubectl(state, "get", "nodes", "-o", "json"))["items"]
        dns = json.loads(kubectl(state, "-n", "kube-system", "get", "deployment", "coredns", "-o", "json"))
    except CommandError as error:
        return str(error)
    ready = {n["metadata"]["name"] for n in nodes if _condition(n, "Ready") == "True"}
    if missing := {n.name for n in NODES} - ready:
        return f"not Ready: {', '.join(sorted(missing))}"
    if (count := len([name for name in ready if name.startswith(simulated.PREFIX)])) < simulated_nodes:
        return f"{count} of {simulated_nodes} simulated nodes are Ready"
    return None if _condition(dns, "Available") == "True" else "DNS is not available"


def _condition(thing: dict[str, Any], kind: str) -> str:
    conditions = thing.get("status", {}).get("conditions", [])
    return next((str(c["status"]) for c in conditions if c["type"] == kind), "Unknown")


def _runtime_unready(state: State, node: Node) -> str | None:
    try:
        run(packages.program("ctr"), "-a", state.containerd_socket(node), "version", timeout_s=10)
    except CommandError as error:
        return str(error)
    return None


def _http_unready(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=3):
            return None
    except (urllib.error.URLError, OSError) as error:
        return f"{url}: {error}"

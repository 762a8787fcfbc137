"""Removes what the demo created."""

from typing import Any

from dev.demo import install
from dev.demo.install import OURS, RELEASE, SYSTEM
from dev.demo.screen import Screen
from dev.demo.target import Target
from dev.shell import CommandError

GONE_S = 180.0
KINDS = ("prefillpools", "decodepools", "disaggregatedservices", "pooloperations")


def remove(screen: Screen, target: Target) -> None:
    """Remove pools, release, CRDs and namespaces of the demo. Missing objects are no error, and other objects stay.

    Raises:
        CommandError: kubectl or helm failed, for example because there is no cluster.
    """
    screen.step("Removing the pools, the release, the CRDs and the namespaces")
    target.kubectl("get", "--raw", "/readyz", timeout_s=15)
    namespaces = target.get("namespaces", "-l", OURS)["items"]
    if not namespaces:
        screen.say("no demo is installed")
        return
    crds = {crd["metadata"]["name"] for crd in target.get("crds")["items"]}
    others: list[str] = []
    if crds.issuperset(f"{kind}.pdpool.dev" for kind in KINDS):
        # Pods are deleted before their namespace: its controller checks again only after the longest grace period of a
        # pod.
        install.remove_pools(screen, target)
        others = [f"{one['namespace']}/{one['name']}" for one in _pools(target)]
    commands = [
        ("helm", "uninstall", RELEASE, "-n", SYSTEM, "--ignore-not-found", "--wait"),
        ("kubectl", "delete", "namespaces", "-l", OURS, f"--timeout={GONE_S:.0f}s"),
        ("kubectl", "delete", "clusterrole,clusterrolebinding", "pdpool-dev-prometheus", "--ignore-not-found"),
    ]
    if others:
        screen.say(f"the CRDs stay, because there are pools that are not the demo's: {', '.join(others)}")
    else:
        commands.append(("kubectl", "delete", "crd", *(f"{kind}.pdpool.dev" for kind in KINDS), "--ignore-not-found"))
    for program, *arguments in commands:
        screen.command(" ".join((program, *arguments)))
        run = target.helm if program == "helm" else target.kubectl
        with screen.ticking(lambda: _still_there(target)):
            said = run(*arguments, timeout_s=GONE_S + 10)
        screen.block(said)


def _still_there(target: Target) -> str:
    """Return which namespaces of the demo exist, and how many pods they have, as text."""
    try:
        names = [one["metadata"]["name"] for one in target.get("namespaces", "-l", OURS)["items"]]
        pods = [len(target.get("pods", "-n", name)["items"]) for name in names]
    except CommandError as error:
        return f"namespaces cannot be listed: {str(error).splitlines()[-1]}"
    told = [f"{name} with {count} pods" for name, count in zip(names, pods, strict=True)]
    return f"still there: {', '.join(told)}" if told else "the namespaces are gone"


def _pools(target: Target) -> list[dict[str, Any]]:
    return [item["metadata"] for item in target.get(",".join(KINDS), "-A")["items"]]


def everything(screen: Screen, target: Target, *, stops: bool) -> None:
    """Remove what the demo created: the whole cluster if the demo owns it (`stops`), else each object.

    Raises:
        CommandError: an object could not be removed.
    """
    if not stops:
        remove(screen, target)
        return
    screen.step("Stopping the local cluster with everything in it")
    target.stop()

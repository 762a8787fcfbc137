"""Removes what the tests' cluster must not contain: a demo, and leftovers of killed test sessions."""

import json
from collections.abc import Callable

from dev.demo import down
from dev.demo import install as demo
from dev.demo.screen import Screen
from dev.demo.target import target
from dev.shell import run, wait_for
from dev.tools.build import binary
from tests.cluster.operator_harness import BENCH
from tests.cluster.stack import CRDS, KINDS, MADE, OURS, Stack

HELD_BACK = 'jsonpath={range .items[?(@.metadata.finalizers)]}{.metadata.name}{"\\n"}{end}'


def make_room(stack: Stack, say: Callable[[str], None]) -> None:
    """Remove the demo, or leftovers of killed sessions. Refuse to touch other installations.

    Raises:
        AssertionError: it names what must be removed first.
    """
    screen = Screen()
    if stack.kubectl("get", "namespaces", "-l", demo.OURS, "-o", "name"):
        say("removing the demo's release and pools: one operator at a time serves a cluster")
        down.remove(screen, target("local", None, screen, "make demo"))
    if stack.kubectl("get", "namespaces", "-l", OURS, "-o", "name"):
        say("removing the release that a killed test session left")
        remove(stack)
    if benches := stack.kubectl("get", "namespaces", "-l", BENCH, "-o", "name").split():
        # Objects of tests that have just ended are already being deleted.
        remove_benches(*benches)
    releases = json.loads(stack.helm("list", "--all-namespaces", "--all", "--output", "json"))
    foreign = [f"{one['namespace']}/{one['name']}" for one in releases if one["chart"].startswith("pdpool-")]
    assert not foreign, (
        f"pdpool is installed as {foreign}: uninstall it, because two operators would serve the same pools"
    )
    objects = _objects(stack)
    assert not objects, f"the tests remove the CRDs, which deletes these objects: delete them yourself\n{objects}"


def remove(stack: Stack) -> None:
    """Remove the release of the stack's tests and all its objects."""
    if _objects(stack):
        # Pods are deleted before their namespaces, whose controller checks again only after the longest grace period of
        # a pod.
        for name in stack.kubectl("get", "namespaces", "-l", OURS, "-o", "name").split():
            where = name.removeprefix("namespace/")
            stack.kubectl("delete", KINDS, "--all", "-n", where, "--wait=false")

            def left(where: str = where) -> str | None:
                return stack.kubectl("get", "pods,statefulsets", "-n", where, "-l", MADE, "-o", "name").strip() or None

            wait_for(f"the pods in {where} to be deleted", left, deadline_s=120)
    stack.uninstall()
    stack.kubectl("delete", "namespaces", "-l", OURS, "--timeout=120s", timeout_s=130)
    stack.kubectl("delete", "crd", *CRDS, "--ignore-not-found", "--timeout=120s", timeout_s=130)


def remove_benches(*namespaces: str) -> None:
    """Remove `namespace/NAME` of operators' tests, with pods that a finalizer holds. These pods run on no node."""
    kubectl = binary("kubectl")
    for where in (name.removeprefix("namespace/") for name in namespaces):
        # While the API server knows an API that does not answer, it removes no namespace.
        run(kubectl, "delete", "apiservice", "-l", f"{BENCH}={where}")
        for pod in run(kubectl, "get", "pods", "-n", where, "-o", HELD_BACK).split():
            run(
                kubectl,
                "patch",
                "pod",
                pod,
                "-n",
                where,
                "--type=merge",
                "--patch",
                '{"metadata": {"finalizers": null}}',
            )
    run(kubectl, "delete", "--ignore-not-found", *namespaces, "--timeout=120s", timeout_s=130)


def _objects(stack: Stack) -> str:
    kinds = ",".join(stack.kubectl("get", "crd", *CRDS, "--ignore-not-found", "-o", "name").split())
    names = kinds.replace("customresourcedefinition.apiextensions.k8s.io/", "")
    return names and stack.kubectl("get", names, "--all-namespaces").strip()

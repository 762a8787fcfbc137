"""What the tests on the cluster share: its CRDs, and one installation of the chart for the tests of the whole stack.

Those come last, for their operator serves all namespaces, and would write on other tests' objects.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from pdpool_connector.demo.launch import Children

from dev.cluster import bringup
from dev.cluster.layout import state_at
from dev.demo import down
from dev.demo import install as demo
from dev.demo.screen import Screen
from dev.demo.target import target
from dev.paths import CHECKOUT, cache_dir
from dev.shell import run, wait_for
from dev.tools.build import binary
from tests.cluster.stack import CRDS, KINDS, MADE, OURS, POOLS, SYSTEM, Stack, namespace
from tests.cluster.stack_traffic import PROMPTS, generate

LAST = "test_chart_rights.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the whole stack last; last of them what looks back at all of them."""

    def place(item: pytest.Item) -> int:
        stack = "stack" in getattr(item, "fixturenames", ())
        return stack + (stack and item.path.name == LAST)

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Say how the cluster is when a test of the stack fails."""
    report = yield
    stack = getattr(item, "funcargs", {}).get("stack")
    if report.when == "call" and report.failed and isinstance(stack, Stack):
        report.sections.append(("cluster", stack.report()))
    return report


@pytest.fixture(scope="session")
def turn() -> Iterator[IO[str]]:
    """The lock by which test sessions share the cluster; shared, until somebody needs the cluster alone."""
    path = cache_dir() / "cluster-tests.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        _take(lock, fcntl.LOCK_SH)
        yield lock


def _take(lock: IO[str], how: int) -> None:
    def busy() -> str | None:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"another test session holds {lock.name}"
        return None

    wait_for("a turn on the cluster", busy, deadline_s=150)


@pytest.fixture(scope="session", autouse=True)
def crds(turn: IO[str]) -> Iterator[None]:
    """The kinds, for operators that no chart installed; those that this session made go with it."""
    if "KUBECONFIG" not in os.environ:
        yield
        return
    kubectl = binary("kubectl")
    absent = not run(kubectl, "get", "crd", *CRDS, "--ignore-not-found", "-o", "name")
    if absent:
        run(kubectl, "apply", "--server-side", "-f", str(CHECKOUT / "crds"))
        run(kubectl, "wait", "--for=condition=Established", "crd", *CRDS, "--timeout=20s")
    yield
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    if absent:
        run(kubectl, "delete", "crd", *CRDS, "--ignore-not-found", "--timeout=60s", timeout_s=70)


@pytest.fixture(scope="session")
def stack(turn: IO[str], crds: None, pytestconfig: pytest.Config) -> Iterator[Stack]:
    """The chart, freshly installed, and an empty namespace for pools; nothing of it is left in the end."""
    state = state_at(None)
    status = bringup.status(state)
    if status is None or Path(os.environ["KUBECONFIG"]) != state.kubeconfig:
        pytest.skip("not the local cluster: pods could not be reached from here, nor the audit log be read")
    fcntl.flock(turn, fcntl.LOCK_UN)
    _take(turn, fcntl.LOCK_EX)
    one = Stack(status)
    _make_room(one, pytestconfig)
    try:
        one.kubectl("delete", "crd", *CRDS, "--ignore-not-found", "--timeout=30s")
        one.apply(namespace(SYSTEM), namespace(POOLS))
        one.install()
        yield one
    finally:
        _remove(one)


def _make_room(stack: Stack, config: pytest.Config) -> None:
    """Remove the demo, or what an interrupted session left; refuse to touch what somebody else installed."""
    screen = Screen()
    if stack.kubectl("get", "namespaces", "-l", demo.OURS, "-o", "name"):
        _say(config, "removing the demo's release and pools: one operator at a time serves a cluster")
        down.remove(screen, target("local", None, screen))
    if stack.kubectl("get", "namespaces", "-l", OURS, "-o", "name"):
        _say(config, "removing what an interrupted test session left")
        _remove(stack)
    releases = json.loads(stack.helm("list", "--all-namespaces", "--all", "--output", "json"))
    foreign = [f"{one['namespace']}/{one['name']}" for one in releases if one["chart"].startswith("pdpool-")]
    assert not foreign, f"pdpool is installed as {foreign}: uninstall it, for two operators would serve the same pools"
    # Those of other tests may still be on their way out with their namespaces.
    wait_for("all pools to be gone, for the tests remove the CRDs", lambda: _objects(stack) or None, deadline_s=60)


def _objects(stack: Stack) -> str:
    kinds = ",".join(stack.kubectl("get", "crd", *CRDS, "--ignore-not-found", "-o", "name").split())
    names = kinds.replace("customresourcedefinition.apiextensions.k8s.io/", "")
    return names and stack.kubectl("get", names, "--all-namespaces", "-o", "name")


def _remove(stack: Stack) -> None:
    if _objects(stack):
        # Before their namespaces, whose controller looks again only after the longest grace period of a pod.
        for name in stack.kubectl("get", "namespaces", "-l", OURS, "-o", "name").split():
            where = name.removeprefix("namespace/")
            stack.kubectl("delete", KINDS, "--all", "-n", where, "--wait=false")

            def left(where: str = where) -> str | None:
                return stack.kubectl("get", "pods,statefulsets", "-n", where, "-l", MADE, "-o", "name").strip() or None

            wait_for(f"the pods in {where} to be gone", left, deadline_s=120)
    stack.uninstall()
    stack.kubectl("delete", "namespaces", "-l", OURS, "--timeout=120s", timeout_s=130)
    stack.kubectl("delete", "crd", *CRDS, "--ignore-not-found", "--timeout=30s")


def _say(config: pytest.Config, text: str) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    reporter = config.pluginmanager.getplugin("terminalreporter")
    assert capture is not None
    assert reporter is not None
    with capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        reporter.write_line(text)


@pytest.fixture(scope="session")
def expected() -> dict[tuple[int, ...], tuple[int, ...]]:
    """What one engine that does both phases answers to the prompts of the traffic."""
    with Children() as children:
        url = children.engine("unified", model_path="tiny").url
        return {prompt: generate(url, prompt) for prompt in PROMPTS}


@pytest.fixture
def serving(stack: Stack) -> Stack:
    """The stack with one prefill engine, two decode engines and one router, all Ready and at rest."""
    stack.serve()
    return stack

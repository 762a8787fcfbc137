"""Shared fixtures of the cluster tests: the CRDs, and one installation of the chart for tests of the whole stack."""

import contextlib
import fcntl
import functools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

import pytest
from pdpool_reference.demo.launch import Children

from dev.cluster import bringup
from dev.cluster.layout import state_at
from dev.images.build import PRODUCT_IMAGES, build
from dev.images.load import load
from dev.paths import CHECKOUT, cache_dir
from dev.shell import Clock, exclusively, run, wait_for
from dev.tools.build import binary
from tests.cluster.leftovers import make_room, remove
from tests.cluster.operator_harness import Bench, bench
from tests.cluster.stack import CRDS, OURS, POOLS, SYSTEM, Stack, namespace
from tests.cluster.stack_traffic import PROMPTS, generate

LAST = "test_chart_rights.py"
TURN_S = 1800
"""Longest wait for other tests, in seconds: all tests of the whole stack, or of operators, on a slow machine."""
ESTABLISHED = (
    "jsonpath={range .items[*]}{.metadata.name} x{.status.conditions[?(@.type=='Established')].status}{'\\n'}{end}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the whole stack last, and the one that reviews all of them at the very end."""

    def place(item: pytest.Item) -> int:
        stack = "stack" in getattr(item, "fixturenames", ())
        return stack + (stack and item.path.name == LAST)

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the state of the cluster to the report when a test of the stack fails."""
    report = yield
    stack = getattr(item, "funcargs", {}).get("stack")
    if report.when == "call" and report.failed and isinstance(stack, Stack):
        report.sections.append(("cluster", stack.report()))
    return report


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Bench]:
    """An operator's namespace, and what plays its kubelet and engines."""
    async with bench(tmp_path) as one:
        yield one


@contextlib.contextmanager
def _turn(how: int, deadline_s: float) -> Iterator[IO[str]]:
    """Hold the lock by which tests share the cluster or use it alone.

    Raises:
        TimeoutError: other tests hold it.
    """
    path = cache_dir() / "cluster-tests.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:

        def busy() -> str | None:
            return None if _taken(lock, how) else f"other tests hold {lock.name}"

        wait_for("a turn on the cluster", busy, deadline_s=deadline_s)
        yield lock


def _taken(lock: IO[str], how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.fixture(scope="module")
def crds() -> Iterator[None]:
    """The CRDs, for operators without a chart. The last user removes them if tests created them."""
    kubectl = binary("kubectl")
    with _turn(fcntl.LOCK_SH, TURN_S) as turn:
        with exclusively(cache_dir() / "cluster-tests-crds.lock", "making the CRDs"):
            if not run(kubectl, "get", "crd", *CRDS, "--ignore-not-found", "-o", "name"):
                run(kubectl, "apply", "--server-side", "-f", str(CHECKOUT / "crds"))
                run(kubectl, "label", "crd", *CRDS, f"{OURS}=")
            wait_for("the CRDs to be established", lambda: _not_established(kubectl), deadline_s=90)
        yield
        if _taken(turn, fcntl.LOCK_EX):
            run(kubectl, "delete", "crd", "-l", OURS, "--timeout=120s", timeout_s=130)


def _not_established(kubectl: Path) -> str | None:
    """Return which CRDs are not served yet. `kubectl wait` fails for a CRD that has no conditions yet."""
    serving = run(kubectl, "get", "crd", *CRDS, "-o", ESTABLISHED)
    return ", ".join(name for name, status in map(str.split, serving.splitlines()) if status != "xTrue") or None


@pytest.fixture(scope="session")
def stack(pytestconfig: pytest.Config) -> Iterator[Stack]:
    """The freshly installed chart, and an empty namespace for pools. Both are removed at the end."""
    state = state_at(None)
    status = bringup.status(state)
    if status is None or Path(os.environ["KUBECONFIG"]) != state.kubeconfig:
        pytest.skip("not the local cluster: pods could not be reached from here, nor the audit log be read")
    one = Stack(status)
    # Its operator serves all namespaces, and would write on other tests' objects.
    with _turn(fcntl.LOCK_EX, TURN_S):
        make_room(one, functools.partial(_say, pytestconfig))
        clock = Clock("images")
        for name in PRODUCT_IMAGES:
            build(name, clock)
            load(name, state, clock)
        try:
            one.kubectl("delete", "crd", *CRDS, "--ignore-not-found", "--timeout=120s", timeout_s=130)
            one.apply(namespace(SYSTEM), namespace(POOLS))
            one.install()
            yield one
        finally:
            remove(one)


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
    """Answers of one engine that does both phases, for the prompts of the traffic."""
    with Children() as children:
        url = children.engine("unified", model_path="tiny").url
        return {prompt: generate(url, prompt) for prompt in PROMPTS}


@pytest.fixture
def serving(stack: Stack) -> Stack:
    """The stack with one prefill engine, two decode engines and one router, all Ready and idle."""
    stack.serve()
    return stack

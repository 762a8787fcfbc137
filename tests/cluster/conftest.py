"""Shared fixtures of the cluster tests: the CRDs, and one installation of the chart for tests of the whole stack."""

import fcntl
import functools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pdpool_operator.observe.http import session

from dev.cluster import bringup
from dev.cluster.layout import state_at
from dev.paths import CHECKOUT, cache_dir
from dev.shell import exclusively, run, wait_for
from dev.tools.build import binary
from tests.cluster.operator_harness import Bench, bench
from tests.cluster.operator_routers import Routers
from tests.cluster.stack import CRDS, OURS, Stack
from tests.cluster.stack_setup import Answers, installed, right_answers
from tests.cluster.turn import taken, turn

LAST = "test_chart_rights.py"
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


@pytest.fixture
async def routers(here: Bench) -> AsyncIterator[Routers]:
    """The routers of a service, none of them started."""
    async with session(8) as http:
        yield Routers(here, http)


@pytest.fixture(scope="module")
def crds() -> Iterator[None]:
    """The CRDs, for operators without a chart. The last user removes them if tests created them."""
    kubectl = binary("kubectl")
    with turn(fcntl.LOCK_SH) as lock:
        with exclusively(cache_dir() / "cluster-tests-crds.lock", "making the CRDs"):
            if not run(kubectl, "get", "crd", *CRDS, "--ignore-not-found", "-o", "name"):
                run(kubectl, "apply", "--server-side", "-f", str(CHECKOUT / "crds"))
                run(kubectl, "label", "crd", *CRDS, f"{OURS}=")
            wait_for("the CRDs to be established", lambda: _not_established(kubectl), deadline_s=90)
        yield
        if taken(lock, fcntl.LOCK_EX):
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
    with installed(state, status, functools.partial(_say, pytestconfig)) as one:
        yield one


def _say(config: pytest.Config, text: str) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    reporter = config.pluginmanager.getplugin("terminalreporter")
    assert capture is not None
    assert reporter is not None
    with capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        reporter.write_line(text)


@pytest.fixture(scope="session")
def expected() -> Answers:
    """Answers of one engine that does both phases, for the prompts of the traffic."""
    return right_answers()


@pytest.fixture
def serving(stack: Stack) -> Stack:
    """The stack with one prefill engine, two decode engines and one router, all Ready and idle."""
    stack.serve()
    return stack

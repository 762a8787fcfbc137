"""What every test shares: property tests draw the same examples in every run, and a slow machine is no failure. With
`-n`, the tests of one file, or of the whole stack, run in one process, and what takes longest begins first.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile(
    "pdpool",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pdpool")


OPERATORS = "tests/cluster/test_operator_"
"""Files whose tests need the cluster, each a namespace of it; the tests of the whole stack wait for their end."""

LONG = ("tests/integration/test_soak.py", "tests/integration/test_backend_faults.py")
"""Files that would be the last to end."""

SPLIT = (*LONG, f"{OPERATORS}leader.py")
"""Files whose tests run beside each other. Not all of the operators': each of them is a load for the API server."""

ORDER = (OPERATORS, "tests/cluster/", *LONG, "tests/integration/", "tests/simulation/", "tests/")


class Units(LoadScopeScheduling):
    """What one process runs in a row: a file, a single test of a `SPLIT` one, or all that needs the cluster alone."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/cluster/") and not nodeid.startswith(OPERATORS):
            return "cluster"
        path = nodeid.partition("::")[0]
        return nodeid if path in SPLIT else path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what takes longest, else the run would wait for it at its end."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[int, bool]:
    group = next(number for number, start in enumerate(ORDER) if item.nodeid.startswith(start))
    return group, item.get_closest_marker("long") is None


def pytest_collection_finish() -> None:
    """Have Hypothesis try the constants of what is imported by now: what a test imports later depends on the order."""
    constants = providers._get_local_constants()
    providers._get_local_constants = lambda: constants


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Units:
    """Asked only when tests run in several processes."""
    return Units(config, log)

"""What every test shares: property tests draw the same examples in every run, and a slow machine is no failure. With
`-n`, one process runs all tests of the cluster in their order, while the others run the rest."""

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("pdpool", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("pdpool")


LONG = ("tests/integration/test_soak.py", "tests/integration/test_engine_faults.py")
"""Files that would be the last to end; their tests share nothing."""


class ClusterApart(LoadScopeScheduling):
    """The cluster's tests are one unit of work, the first to be given out; every other file is one, but for `LONG`."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/cluster/"):
            return "cluster"
        path = nodeid.partition("::")[0]
        return nodeid if path in LONG else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ClusterApart:
    """Asked only when tests run in several processes."""
    return ClusterApart(config, log)

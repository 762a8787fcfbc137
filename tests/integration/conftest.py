"""Connectors in processes of their own, for the tests that name their data plane or take each."""

import signal

import pytest

from tests.integration.connector_peer import Side
from tests.integration.handoffs import TIMEOUTS
from tests.integration.instances import Instance


@pytest.fixture(params=["local", "nixl", "mooncake"])
def backend(request) -> str:
    return request.param


@pytest.fixture
def sides():
    """Make sides; all are ended, and those that were not killed must exit cleanly."""
    made: list[Side] = []

    def make(role: str, backend: str = "local", **options) -> Side:
        side = Side(role, backend, **{"timeouts": TIMEOUTS, "request_deadline_s": 60.0, **options})
        made.append(side)
        return side

    yield make
    codes = [side.end() for side in reversed(made)]
    assert set(codes) <= {0, -signal.SIGKILL}, codes


@pytest.fixture
def instances():
    """Make instances; all ranks are ended, and those that were not killed must exit cleanly."""
    made: list[Instance] = []

    def make(role: str, backend: str, ranks: dict, **options) -> Instance:
        made.append(Instance(role, backend, ranks, **options))
        return made[-1]

    yield make
    codes = {code for instance in made for code in instance.end()}
    assert codes <= {0, -signal.SIGKILL}, codes

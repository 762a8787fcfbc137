"""Workers, ended with the test."""

from collections.abc import Callable

import pytest
from pdpool_connector.backends.base import Poll

from tests.unit.runtime.scripted import Bench, ScriptedBackend


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(prepare: Callable[[ScriptedBackend], None] = lambda _: None, **memories) -> Bench:
        engine = ScriptedBackend()
        prepare(engine)
        made.append(Bench(engine, **memories))
        assert made[-1].connected.get(timeout=30) is engine.connect_error
        return made[-1]

    yield make
    for one in made:
        one.worker.close()
        while not one.worker.join(0.05):
            while not one.engine.submitted.empty():
                one.engine.submitted.get().outcome = Poll.DONE
        assert one.gone.is_set()

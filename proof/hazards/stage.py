"""Where scenarios run: processes with a connector each, and the memory of both that the parent looks into."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import numpy as np

from tests.integration import handoffs
from tests.integration.connector_peer import Side
from tests.integration.handoffs import HALF_REGISTERED, TIMEOUTS
from tests.integration.instances import Instance
from tests.integration.ports import KeptPort

CANARY: Final = 0xC5
SEED: Final = 1
QUIESCE_S: Final = 1.0
"""After this a clock would release what only a proof may."""
PLANES: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "nixl-tcp": ("nixl", {"UCX_TLS": "tcp"}),
    "mooncake": ("mooncake", {}),
}
"""By name: backend and environment. NIXL over TCP rather than over CMA, for there bytes can come late."""


class NotApplicableError(Exception):
    """The connector has nothing that this hazard could happen to; the message says why."""


Scenario = Callable[["Stage"], str]


@dataclass(frozen=True)
class Hazard:
    """One entry of the catalogue: its number, what goes wrong in such systems, and how to try it here."""

    number: int
    name: str
    scenario: Scenario


CATALOGUE: Final[dict[int, Hazard]] = {}


def hazard(number: int, name: str) -> Callable[[Scenario], Scenario]:
    """Add a scenario to the catalogue. It returns what was observed; an AssertionError means that it is present."""

    def enter(scenario: Scenario) -> Scenario:
        assert number not in CATALOGUE, f"H{number} is there twice"
        CATALOGUE[number] = Hazard(number, name, scenario)
        return scenario

    return enter


class Stage:
    """One data plane: a standing pair that every scenario must leave clean, and extra processes for one scenario.

    `seed` and the number of the scenario make `random`, which draws the points at which a scenario interferes.
    """

    def __init__(self, plane: str, seed: int = SEED) -> None:
        self.plane = plane
        self.seed = seed
        self.random = random.Random(seed)
        self.backend, self._environment = PLANES[plane]
        self._rooms = count(1000)
        self._names = count(1)
        self._extra: list[Side] = []
        self._ports: list[KeptPort] = []
        self._prefill: Side | None = None
        self._decode: Side | None = None

    @property
    def prefill(self) -> Any:  # noqa: ANN401 - the tests' driver is not typed
        """Of the standing pair."""
        if self._prefill is None:
            self._prefill = self._make("prefill")
        return self._prefill

    @property
    def decode(self) -> Any:  # noqa: ANN401 - the tests' driver is not typed
        """Of the standing pair."""
        if self._decode is None:
            self._decode = self._make("decode")
        return self._decode

    def extra(self, role: str, **options: object) -> Any:  # noqa: ANN401 - the tests' driver is not typed
        """A process for this scenario only."""
        side = self._make(role, **options)
        self._extra.append(side)
        return side

    def instance(self, role: str, ranks: dict[str, Any], **options: object) -> Any:  # noqa: ANN401 - as above
        """An instance of several ranks for this scenario only, each a process."""
        with self.surroundings():
            made = Instance(role, self.backend, ranks, **{"timeouts": TIMEOUTS, **options})
        self._extra += made.ranks
        self._ports.append(made.port)
        return made

    def restart(self, instance: Instance, rank: int) -> None:
        """Start a killed rank again."""
        with self.surroundings():
            instance.restart(rank)
        self._extra.append(instance.ranks[rank])

    def fragile_decode(self) -> Any:  # noqa: ANN401 - the tests' driver is not typed
        """A decode for this scenario only, to which a write can be made to fail."""
        return self.extra("decode", **HALF_REGISTERED)

    def room(self) -> int:
        """A room that is unused."""
        return next(self._rooms)

    def name(self) -> str:
        """A request id that is unused."""
        return f"q{next(self._names)}"

    def open_both(self, *, name: str = "", room: int | None = None, **more: object) -> tuple[str, int]:
        """Open both halves on the standing pair; name and room, new ones unless given. `more`: see `offer`."""
        name, room = name or self.name(), self.room() if room is None else room
        handoffs.open_both(self.prefill, self.decode, room, name=name, **more)
        return name, room

    def write_on_its_way(self, **how: object) -> tuple[str, int]:
        """A hand-off of two pages whose write is submitted at prefill and not begun; name and room."""
        self.prefill.call("hold_writes")
        name, room = self.open_both(**how)  # type: ignore[arg-type]
        self.prefill.send(name, [1, 2])
        self.held()
        return name, room

    def serve(self, *, room: int | None = None, source: int = 40, target: int = 50) -> None:
        """One whole hand-off on the standing pair, which must bring the right bytes."""
        name, _ = self.open_both(room=room, pages=[target])
        self.prefill.send(name, [source])
        assert self.decode.until(name, "done")["cause"] is None
        assert self.same([source], [target]), "the hand-off brought other bytes"

    def same(self, source: object, target: object) -> bool:
        """Whether decode's target pages hold what prefill's source pages hold."""
        return bool((self.decode.pages[:, target] == self.prefill.pages[:, source]).all())

    def stays_held(self, side: Any, *names: str, for_s: float) -> None:  # noqa: ANN401 - the tests' driver is not typed
        """Check that nothing releases what these hand-offs hold at `side` for so long."""
        time.sleep(for_s)
        for name in names:
            assert not side.status(name)["releasable"], f"{name} was released with a write in flight"

    def blank(self, pages: object) -> bool:
        """Whether these pages of decode's are as they were."""
        return bool((self.decode.pages[:, pages] == CANARY).all())

    def held(self, count: int = 1) -> None:
        """Wait until so many writes wait at prefill, submitted and not begun."""
        self.prefill.settle(lambda stats: stats["held_writes"] >= count)

    @contextmanager
    def act(self, number: int) -> Iterator[None]:
        """Around one scenario: known bytes before it, nothing left behind after it, a new pair when it failed."""
        self.random = random.Random(f"{self.seed} {number}")
        self.decode.pages[:] = self.decode.aux[:] = CANARY
        content = np.random.default_rng(1)
        self.prefill.pages[:] = content.integers(1, 256, self.prefill.pages.shape, dtype=np.uint8)
        self.prefill.aux[:] = content.integers(1, 256, self.prefill.aux.shape, dtype=np.uint8)
        try:
            yield
            for side in (self.prefill, self.decode):
                side.settle(lambda stats: stats["rows"] == stats["kept"] == stats["holds"] == 0, within_s=20)
                assert side.stats()["faults"] == 0, "a fault inside the connector"
        except NotApplicableError:
            raise
        except BaseException:
            self.close()
            raise
        finally:
            while self._extra:
                _end(self._extra.pop())
            self._close_ports()

    def close(self) -> None:
        """End all processes."""
        for side in (self._decode, self._prefill, *self._extra):
            if side is not None:
                _end(side)
        self._decode = self._prefill = None
        self._extra.clear()
        self._close_ports()

    def _close_ports(self) -> None:
        while self._ports:
            self._ports.pop().close()

    def _make(self, role: str, **options: object) -> Side:
        with self.surroundings():
            return Side(role, self.backend, **{"timeouts": TIMEOUTS, "request_deadline_s": 60.0, **options})

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """The environment that the data plane needs in a process that is started within."""
        before = dict(os.environ)
        os.environ.update(self._environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def _end(side: Any) -> None:  # noqa: ANN401 - the tests' driver is not typed
    if side.process.poll() is None:
        side.signal(signal.SIGCONT)  # a scenario that failed may have left it stopped
        side.process.kill() if side.process.stdin is None else side.end()
    else:
        side.end()

"""Incidents of a simulated service as data: which ones there are, and when they happen."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pdpool_operator.api.names import Role

HOUR_S = 3600.0
SLOT_S = 2400.0
"""One incident begins in each slot. The service recovers within the rest of the slot."""


class Kind(StrEnum):
    """What happens to an instance, to the operator, or to the traffic."""

    FROZEN = "frozen"
    """The engine's loop stops. Its connector still answers."""
    RANK_FROZEN = "rank frozen"
    """The loop of one rank stops. The other rank's loop runs, but no request moves."""
    FAILS_ALL = "fails all"
    PEER_FAILING = "peer failing"
    """Hand-offs between one prefill and one decode instance fail."""
    LEAKED = "leaked request"
    GAUGE_FROZEN = "gauge frozen"
    """The numbers of the queues do not change, although requests move."""
    SLOW = "slow"

    RESTART = "restart"
    ROLL_OUT = "roll-out"
    SCRAPE_GAP = "scrape gap"
    OPERATOR_RESTART = "operator restart"
    CLOCK_STEP = "clock step"
    ROUTER_RESTART = "router restart"
    BURST = "burst"
    QUIET = "quiet"
    """No requests arrive."""


FAULTS = (
    Kind.FROZEN,
    Kind.RANK_FROZEN,
    Kind.FAILS_ALL,
    Kind.PEER_FAILING,
    Kind.LEAKED,
    Kind.GAUGE_FROZEN,
    Kind.SLOW,
)
BENIGN = tuple(kind for kind in Kind if kind not in FAULTS)


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident. `role` and `index` name its instance, if the kind concerns one."""

    at_s: float
    kind: Kind
    role: Role
    index: int
    lasts_s: float

    def __str__(self) -> str:
        """Name the incident and its instance."""
        return f"{self.kind} of {self.role} {self.index} at {self.at_s / HOUR_S:.3f} h for {self.lasts_s:.0f} s"


def incidents(seed: int, hours: float, *, faults: bool, instances: int) -> Iterator[Incident]:
    """Return the incidents of one run, in order of time. Every second one is a fault, if there are faults."""
    rng = random.Random(f"incidents {seed}")
    for slot in range(int(hours * HOUR_S / SLOT_S)):
        kinds = FAULTS if faults and slot % 2 else BENIGN
        yield Incident(
            at_s=slot * SLOT_S + rng.uniform(60, 300),
            kind=rng.choice(kinds),
            role=rng.choice((Role.PREFILL, Role.DECODE)),
            index=rng.randrange(instances),
            lasts_s=rng.uniform(60, 600),
        )

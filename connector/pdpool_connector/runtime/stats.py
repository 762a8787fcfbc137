"""Immutable snapshots of a connector's state, for `/v1/state`, `/metrics` and `connector.stats()`."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueStats:
    """One queue: requests in it, age of the oldest in seconds (None when empty), how many went on from it so far."""

    reqs: int
    oldest_s: float | None
    moved_total: int


@dataclass(frozen=True, slots=True)
class PeerStats:
    """One paired process.

    Attributes:
        incarnation, control: Its name, and the address of its control channel.
        last_seen_s: Seconds since its last frame. An idle pair sends none, so a large value is no loss.
        attempts: Live attempts with it.
        waiting: How many of them wait for it.
        backend: Transfer backend between us.
        transport: How bytes travel to it ("tcp", "rc", "cma", ...); "" where that is not known, as at decode.
    """

    incarnation: str
    control: str
    last_seen_s: float
    attempts: int
    waiting: int
    backend: str = ""
    transport: str = ""


@dataclass(frozen=True, slots=True)
class HeldFor:
    """How many hand-offs wait for proof that one process can touch their pages no more.

    pod_uid, container: where that process ran (`layout.process.ProcessName`); "" if it did not say.
    """

    incarnation: str
    holds: int
    pod_uid: str
    container: str


@dataclass(frozen=True, slots=True)
class LinkStats:
    """An instance that this connector has to reach: at decode a prefill, at prefill its own, each by its registry.

    `missing`: ranks that are known to be missing. `failure`: what went wrong last, "" when all is well; `failing_s`:
    for how long (None: all is well).
    """

    address: str
    state: str
    missing: tuple[int, ...]
    failure: str
    failing_s: float | None


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram: `counts[i]` values up to `bounds[i]` (the last count: above all), and the sum of all values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """State of one connector at one moment; all times in seconds, sizes in bytes, totals since the process began.

    Attributes:
        rank, ranks: Number of this connector among those of its pod, and how many these are. Each has its admin
            endpoint one port after that of the one before it.
        engine, connector_version: Name and version of the engine, "" if it gave none; version of pdpool.
        backend: Its transfer backend.
        queues: Hand-off queues. The connector counts its hand-offs; a queue without any has the engine's numbers.
        engine_queues: The queues as the engine shows them. A request there that is older than all of the same queue in
            `queues` has no hand-off any more.
        attempts: Hand-offs by state.
        pod_uid, container: Where it runs, as its peers receive it.
        engine_beat_age_s: Seconds since the engine's last `beat`; None if there was none.
        engine_paused: The engine said with its last `beat` that it is paused on purpose.
    """

    role: str
    rank: int
    ranks: int
    incarnation: str
    engine: str
    connector_version: str
    backend: str
    pod_uid: str
    container: str
    uptime_s: float
    loop_lag_s: float
    engine_beat_age_s: float | None
    engine_paused: bool
    draining: bool
    queues: Mapping[str, QueueStats]
    engine_queues: Mapping[str, QueueStats]
    attempts: Mapping[str, QueueStats]
    outcomes: Mapping[str, int]
    causes: Mapping[str, int]
    releases: Distribution
    checksums: Mapping[str, int]
    flights_lost: Mapping[str, int]
    drops: Mapping[str, int]
    holds: int
    held_bytes: int
    held_oldest_s: float | None
    held_for: tuple[HeldFor, ...]
    bytes_moved_total: int
    tombstones: int
    faults: int
    peers: tuple[PeerStats, ...]
    links: tuple[LinkStats, ...]

    @property
    def drained(self) -> bool:
        """True when it takes no new work, nothing is under way and nothing is held."""
        return self.draining and not self.holds and not any(queue.reqs for queue in self.attempts.values())

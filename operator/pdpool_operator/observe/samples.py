"""Samples of engines as plain frozen data: the input of diagnosis.

A value that was not observed is `None`, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ..engines.answers import Counters as Counters
from ..engines.answers import EngineSample as EngineSample

HANDOFF_QUEUES = frozenset({"prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer"})


@dataclass(frozen=True, slots=True)
class QueueSample:
    """One hand-off queue of one rank at one moment."""

    reqs: int
    oldest_s: float | None
    """Age of the oldest request in seconds. `None` if the queue is empty or its source does not report it."""
    moved_total: int | None
    """Requests that moved on from the queue since the incarnation began, without those that ended in it.

    `None` if the source does not report it.
    """


@dataclass(frozen=True, slots=True)
class Tally:
    """How requests ended. What is the client's fault is no failure."""

    done: int = 0
    failed: int = 0

    @property
    def ended(self) -> int:
        """All of them."""
        return self.done + self.failed

    @property
    def share(self) -> float:
        """Share of those that failed; 0 if none ended."""
        return self.failed / self.ended if self.ended else 0.0


@dataclass(frozen=True, slots=True)
class HoldSample:
    """A process of the other side that may still access memory. The connector holds that memory back."""

    incarnation: str
    pod_uid: str
    """UID of that process's pod, as the process reported it at pairing. Empty if it did not."""
    container: str
    """One run of one container, as that process reported it. Each run has another text. Empty if it did not report one.
    """


@dataclass(frozen=True, slots=True)
class PeerSample:
    """A process with which a connector has paired."""

    incarnation: str
    backend: str
    """Name of the transfer backend between them."""
    transport: str
    """How bytes reach it: `rdma`, `tcp`, `cma`, ... Empty if not known, as always at decode."""


@dataclass(frozen=True, slots=True)
class ConnectorSample:
    """Answer of the admin endpoint of one rank's connector, `GET :9400+rank/v1/state`.

    The endpoint answers also while the engine's loop is frozen.
    """

    incarnation: str
    beat_age_s: float | None
    """Seconds since the engine's scheduler loop last ran; `None` when the engine does not report that."""
    queues: Mapping[str, QueueSample]
    """The hand-off queues. Other queues that an engine shows are for people."""
    ranks: int = 1
    """Number of the instance's ranks, including this one."""
    holds: int = 0
    """Hand-offs whose memory is held until their writers are proved to have stopped."""
    held_bytes: int = 0
    held_oldest_s: float | None = None
    """Age of the oldest hold in seconds. `None` if nothing is held."""
    held_for: tuple[HoldSample, ...] = ()
    pod_uid: str = ""
    """As the connector itself reports it."""
    container: str = ""
    """Run of the container in which the process lives, as in `HoldSample`."""
    engine: str = ""
    """Name and version of the engine. Empty if it reports none."""
    version: str = ""
    """Version of the connector. Empty if it reports none."""
    peers: tuple[PeerSample, ...] = ()
    silent: tuple[str, ...] = ()
    """At decode: registries of prefills, `host:port`, that do not answer it."""
    engine_queues: Mapping[str, QueueSample] = field(default_factory=dict)
    """The hand-off queues that the engine shows, as it shows them."""
    unsettled: int = 0
    """Hand-offs that have failed while their memory may still be accessed. An engine may keep their requests."""
    ended: Tally | None = None
    """Hand-offs that ended since the incarnation began. `None` if the connector does not report them."""
    paused: bool = False
    """The engine is paused on request, and reports it. Its requests do not move."""
    loop_lag_s: float = 0.0
    """Longest turn of the connector's own loop in the last seconds, or for how long it hangs. The other numbers are as
    of its last turn.
    """


@dataclass(frozen=True, slots=True)
class RankSample:
    """One sample of one rank. Each of the two sources is known, or `None` with a reason."""

    rank: int
    pod_uid: str
    at: datetime
    """Time of the answer, by the operator's clock."""
    asked_at: datetime
    """Time of the request."""
    connector: ConnectorSample | None
    engine: EngineSample | None
    connector_error: str = ""
    """Reason why `connector` is None: `timeout`, `refused`, `http 503`, …"""
    engine_error: str = ""
    """Reason why `engine` is None.

    Empty if the engine answered and counts the requests of this rank at another one, as for ranks that share a
    scheduler.
    """
    has_connector: bool = True
    """The pod runs pdpool's connector. Otherwise only the engine is asked."""
    metrics_error: str = ""
    """Reason why the engine's `/metrics` were not read. Empty if they were, or if they are not asked for."""

    @property
    def queues(self) -> Mapping[str, QueueSample] | None:
        """The hand-off queues by the best source of the pod. `None` if it did not answer."""
        return self.seen_queues if self.connector is not None or not self.has_connector else None

    @property
    def seen_queues(self) -> Mapping[str, QueueSample] | None:
        """The hand-off queues by the best source that answered. `None` if none did."""
        if self.connector is not None:
            return self.connector.queues
        if self.engine is None:
            return None
        moved = self.engine.counters.moved
        return {name: QueueSample(reqs, None, moved.get(name)) for name, reqs in self.engine.queues.items()}

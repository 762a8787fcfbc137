"""Leader election over a `coordination.k8s.io/v1` Lease: at most one operator writes at any time.

The holder of the Lease renews it every `RETRY_S`. Other candidates watch the record. A candidate takes it over once it
has not changed for the record's duration *on the candidate's own clock*. Times of different clocks are never compared,
so clock skew does no harm.

A holder stops writing at once when `RENEW_DEADLINE_S` have passed without a renewal. The time is counted from *before*
its last renewal was sent. So the holder stops before another candidate may take over. It may write again once it has
renewed a Lease that still names it: then no other process has led. Every write to the Lease carries
the resourceVersion on which it is based. If two candidates write at the same time, one write fails.

The holder also records in the Lease from where the next leader must read the history of pods. It is the
resourceVersion that a list of pods had `UNACTED_S` before. The holder may not have acted on later events. The Lease's
own version would not do, because a cluster may keep Leases in another etcd.

`decide` is a pure function. `Elector` is the loop around it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from ..api.names import ANNOTATION_HISTORY_FROM
from .stopping import unless

LEASE_DURATION_S = 15
RENEW_DEADLINE_S = 10.0
RETRY_S = 2.0
"""client-go's defaults (tools/leaderelection)."""
UNACTED_S = 30.0
"""An engine reports a lost peer within seconds. Before that, the operator cannot act on the loss."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """Content of the Lease object. `version` is its resourceVersion: any change shows in it."""

    holder: str
    duration_s: int
    version: str
    transitions: int = 0
    acquired: str = ""
    renewed: str = ""
    history: str = ""
    """resourceVersion of pods from which the next leader must read. Empty if not recorded."""


@dataclass(frozen=True)
class View:
    """Knowledge of one candidate: the last read record, since when it has not changed, and its own last renewal.

    `since` and `renewed_at` are monotonic seconds of this process. `renewed_at` is from *before* the renewal was sent.
    """

    record: Record | None = None
    since: float = 0.0
    renewed_at: float | None = None
    lapsed: bool = False
    """Whether this process led, could not renew in time, and has not found another holder since."""

    def seen(self, record: Record | None, now: float) -> "View":
        """Return the view after reading `record` at `now`.

        A deleted Lease counts as held (with no version) until its duration is over. Its last holder may not know of the
        deletion yet.
        """
        if record is None and self.record is not None:
            holder = self.record.holder or "an unknown holder"
            record = replace(self.record, holder=holder, duration_s=LEASE_DURATION_S, version="")
        if record is not None and self.record is not None and record.version == self.record.version:
            return self
        return replace(self, record=record, since=now)

    def leads(self, now: float) -> bool:
        """Whether this candidate may write at `now`."""
        return self.renewed_at is not None and now - self.renewed_at < RENEW_DEADLINE_S


@dataclass(frozen=True)
class Acquire:
    """Write this process into the Lease as its holder. `transitions` is the count to write."""

    transitions: int


@dataclass(frozen=True)
class Renew:
    """Write the Lease again, as its holder."""


@dataclass(frozen=True)
class Wait:
    """Another process holds the Lease. Look again in `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Lost:
    """This process was the leader and no longer is. It must stop writing."""

    why: str
    taken: bool = False
    """Whether another process has held the Lease since. If not, this process may renew it and lead again."""


Action = Acquire | Renew | Wait | Lost


def decide(view: View, now: float, me: str) -> Action:
    """Return what `me` must do at `now`, given its view. Pure."""
    record = view.record
    if view.renewed_at is not None:
        if not view.leads(now):
            return Lost(f"the lease was not renewed for {now - view.renewed_at:.1f} s")
        if record is None or record.holder == me:
            return Renew()
        return Lost(f"the lease is held by {record.holder or 'no process'}", taken=True)
    if view.lapsed:
        if record is not None and record.holder == me and record.version:
            return Renew()  # no other process has written it, so none has led
        return Lost("the lease was released or deleted, or another process holds it", taken=True)
    if record is None:
        return Acquire(transitions=0)
    if record.holder == me:  # our own write, whose answer we never received
        return Acquire(transitions=record.transitions)
    if not record.holder or now - view.since >= record.duration_s:
        return Acquire(transitions=record.transitions + 1)
    return Wait(min(RETRY_S, record.duration_s - (now - view.since)))


class LeaseStore(Protocol):
    """Storage of the Lease. Each call has a deadline of its own."""

    async def read(self) -> Mapping[str, Any] | None:
        """Return the Lease object, or None if there is none; raises LeaseUnavailableError."""

    async def write(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace the Lease if metadata.resourceVersion still holds. Create it if `body` has none.

        Returns:
            The stored object.

        Raises:
            LeaseConflictError: another process was faster.
            LeaseUnavailableError: the outcome is unknown.
        """


class LeaseConflictError(Exception):
    """Another process wrote the Lease first."""


class LeaseUnavailableError(Exception):
    """The Lease could not be read or written now."""


@dataclass
class Elector:
    """Takes part in the election as `me`, and keeps this process's view of the Lease.

    `on_lost` is called once when another process has taken the Lease. It must end the process at once, and must not
    return control to code that writes.
    """

    store: LeaseStore
    me: str
    name: str
    namespace: str
    clock: Callable[[], float]
    on_lost: Callable[[str], None]
    pods_version: Callable[[], str]
    """Returns the newest known resourceVersion of a list of pods. Empty if none is known."""
    sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep
    view: View = field(default_factory=View)
    inherited: str = ""
    """resourceVersion from which to read the history of pods before this process led. Empty if none is recorded."""
    _marks: deque[tuple[float, str]] = field(default_factory=deque)

    @property
    def leading(self) -> bool:
        """Whether this process may write now. Cheap, because every write calls it."""
        return self.view.leads(self.clock())

    def write_budget_s(self) -> float:
        """Return the seconds within which a write that starts now must end; 0 if none may start.

        A write may outlast the renew deadline, but not the lease: from then on another process may write.
        """
        now = self.clock()
        if self.view.renewed_at is None or not self.view.leads(now):
            return 0.0
        return max(0.0, self.view.renewed_at + LEASE_DURATION_S - 1.0 - now)

    async def acquire(self, stop: asyncio.Event) -> bool:
        """Wait until this process is the leader; return False once `stop` is set.

        No write begins after that. A write in flight is awaited and undone. If it were cut off, it might still make
        this process the holder, and the next one would have to wait until the Lease expires.
        """
        while not (stop.is_set() or self.leading):
            await self._step(stop)
            if not self.leading:
                action = decide(self.view, self.clock(), self.me)
                await unless(stop, self.sleep(action.seconds if isinstance(action, Wait) else RETRY_S / 4))
        if stop.is_set():
            await self.release()
        return self.leading

    async def hold(self) -> None:
        """Renew for ever. Returns, after `on_lost`, when another process has taken the Lease.

        While it cannot be renewed in time, this process may not write, and goes on trying to renew.
        """
        while True:
            await self.sleep(RETRY_S)
            lost = await self._renew()
            if lost is not None and lost.taken:
                self.view = replace(self.view, renewed_at=None)
                self.on_lost(lost.why)
                return
            if lost is not None:
                self.view = replace(self.view, renewed_at=None, lapsed=True)
                log.warning("%s: writing nothing until it is renewed", lost.why)

    async def _renew(self) -> Lost | None:
        """Take one step, within the deadline of the last renewal if there is one."""
        renewed_at = self.view.renewed_at
        deadline_s = RENEW_DEADLINE_S if renewed_at is None else renewed_at + RENEW_DEADLINE_S - self.clock()
        try:
            async with asyncio.timeout(max(0.0, deadline_s)):
                lost = await self._step()
        except TimeoutError:
            return None if self.view.lapsed else Lost(f"the lease was not renewed for {RENEW_DEADLINE_S:.0f} s")
        if renewed_at is None and self.leading:
            log.warning("the lease is renewed: writing again")
        return lost

    async def release(self) -> None:
        """Release the Lease, so that the next process need not wait for its expiry. No write may follow."""
        record = self.view.record
        if record is None or not self.leading:
            return
        self.view = replace(self.view, renewed_at=None)
        given_up = replace(record, holder="", duration_s=1)
        try:
            await self.store.write(self._body(given_up))
        except (LeaseConflictError, LeaseUnavailableError) as error:
            log.warning("lease not released, it will expire: %s", error)

    async def _step(self, stop: asyncio.Event | None = None) -> Lost | None:
        """Read, decide, write once (unless `stop` is set by then).

        Errors leave the view as it is, because only time decides about leadership.
        """
        try:
            self.view = self.view.seen(_parse(await self.store.read()), self.clock())
        except LeaseUnavailableError as error:
            log.warning("lease not read: %s", error)
            action = decide(self.view, self.clock(), self.me)
            return action if isinstance(action, Lost) else None
        started = self.clock()
        action = decide(self.view, started, self.me)
        if isinstance(action, Lost):
            return action
        if isinstance(action, Acquire | Renew) and not (stop is not None and stop.is_set()):
            await self._write(action, started)
        return None

    async def _write(self, action: Acquire | Renew, started: float) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        old = self.view.record
        version = old.version if old else ""
        if isinstance(action, Acquire):
            self.inherited = old.history if old else ""
            self._marks = deque([(started, self.inherited)] if self.inherited else ())
            record = Record(self.me, LEASE_DURATION_S, version, action.transitions, stamp, stamp)
        else:
            acquired, transitions = (old.acquired, old.transitions) if old else (stamp, 0)
            record = Record(self.me, LEASE_DURATION_S, version, transitions, acquired, stamp)
        if known := self.pods_version():
            self._marks.append((started, known))
        record = replace(record, history=self._mark(started))
        try:
            stored = _parse(await self.store.write(self._body(record)))
        except (LeaseConflictError, LeaseUnavailableError) as error:
            log.info("lease not written: %s", error)
            return
        self.view = View(stored, self.clock(), started)

    def _mark(self, now: float) -> str:
        while len(self._marks) > 1 and now - self._marks[1][0] >= UNACTED_S:
            self._marks.popleft()
        return self._marks[0][1] if self._marks else ""

    def _body(self, record: Record) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        if record.version:
            metadata["resourceVersion"] = record.version
        if record.history:
            metadata["annotations"] = {ANNOTATION_HISTORY_FROM: record.history}
        spec: dict[str, Any] = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": record.duration_s,
            "leaseTransitions": record.transitions,
        }
        spec |= {key: at for key, at in (("acquireTime", record.acquired), ("renewTime", record.renewed)) if at}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def _parse(lease: Mapping[str, Any] | None) -> Record | None:
    """Parse a Lease object. An empty or incomplete spec is a Lease without a holder."""
    if lease is None:
        return None
    spec = lease.get("spec") or {}
    return Record(
        holder=spec.get("holderIdentity") or "",
        duration_s=int(spec.get("leaseDurationSeconds") or 1),
        version=lease["metadata"]["resourceVersion"],
        transitions=int(spec.get("leaseTransitions") or 0),
        acquired=spec.get("acquireTime") or "",
        renewed=spec.get("renewTime") or "",
        history=(lease["metadata"].get("annotations") or {}).get(ANNOTATION_HISTORY_FROM) or "",
    )

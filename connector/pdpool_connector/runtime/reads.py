"""Decode's own transfers, where decode reads: a worker for each prefill rank, and the reads that each has under way."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pdpool_connector.backends.base import BackendError, IncompatiblePeerError, TransferBackend
from pdpool_connector.layout.checksum import PageSums
from pdpool_connector.layout.memory import KVMemory, LayoutError, RemoteMemory, decode_remote
from pdpool_connector.protocol.events import Event, Read, StopReading, WriteResult
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.status import Cause
from pdpool_connector.runtime.job import Ended, ended, number_of
from pdpool_connector.runtime.reactor import Reactor
from pdpool_connector.runtime.worker import PeerWorker

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Source:
    """One prefill rank. `kv`: pages are read from it."""

    worker: PeerWorker
    kv: bool
    connected: bool = False
    left: bool = False
    """The rank was lost or cannot be reached; the worker ends once what it has in flight has settled."""
    again: Callable[[], None] | None = None
    """It has come back meanwhile: what begins with it anew."""
    reads: dict[AttemptId, set[int]] = field(default_factory=dict)


class Failure(NamedTuple):
    """Why a rank's memory cannot be read. Cause.INVALID: trying again is vain, as after a pairing that was refused."""

    cause: Cause
    message: str


class Reads:
    """Owner thread only. `drive` takes the ends of reads; `connected` is told when a rank's memory can be read, or why
    not; then the rank is forgotten, and may be tried again. `begun` is told of each read of pages as it is passed on.
    """

    def __init__(
        self,
        backend: TransferBackend,
        memory: KVMemory,
        reactor: Reactor,
        drive: Callable[[Event], None],
        connected: Callable[[str, Failure | None], None],
        *,
        begun: Callable[[Read], None],
    ) -> None:
        self._backend, self._memory, self._reactor, self._drive, self._told = backend, memory, reactor, drive, connected
        self._begun = begun
        self._sums = PageSums(memory)
        self._sources: dict[str, _Source] = {}
        self._closed = False

    def connect(self, peer: str, memory: bytes, *, kv: bool, shares: bool) -> None:
        """Begin to reach the memory of a rank that is paired; `memory` as it was told, the rest as for `PeerWorker`."""
        if self._closed:
            return
        source = self._sources.get(peer)
        if source is not None:
            if source.connected:
                self._told(peer, None)
            elif source.left:
                source.again = partial(self.connect, peer, memory, kv=kv, shares=shares)
            return
        try:
            remote = decode_remote(memory)
        except LayoutError as error:
            self._told(peer, Failure(Cause.INVALID, f"prefill's memory is not valid: {error}"))
            return
        self._sources[peer] = _Source(self._start(peer, remote, kv=kv, shares=shares), kv)

    def _start(self, peer: str, remote: RemoteMemory, *, kv: bool, shares: bool) -> PeerWorker:
        return PeerWorker(
            self._backend,
            self._memory,
            peer,
            remote,
            kv=kv,
            shares=shares,
            sums=self._sums,
            checksum_rate=0.0,
            connected=lambda error: self._reactor.post(partial(self._on_connected, peer, error)),
            ended=lambda events: self._reactor.step(partial(self._on_ended, peer, events)),
            kept=lambda _attempt, slot: slot.release(),
            gone=lambda: self._reactor.post(partial(self._on_gone, peer)),
        )

    def perform(self, effect: Read | StopReading) -> None:
        """Start or stop reads; each that was started answers with `ReadEnded`."""
        source = self._sources.get(effect.peer)
        if isinstance(effect, StopReading):
            if source is not None:
                source.worker.stop(source.reads.get(effect.attempt, set()))
        elif source is None or not source.connected:
            self._reactor.post(partial(self._drive, ended(effect, WriteResult.FAILED, 0, "prefill is gone")))
        else:
            source.reads.setdefault(effect.attempt, set()).add(effect.read)
            if source.kv:
                self._begun(effect)
            if source.worker.submit(effect):
                self._reactor.soon(partial(self._move_now, effect.peer, source.worker))

    def connected(self, peer: str) -> bool:
        """Whether the rank's memory can be read."""
        source = self._sources.get(peer)
        return source is not None and source.connected

    def leave(self, peer: str) -> None:
        """The rank is lost: what is in flight is waited for, and nothing new is read."""
        if (source := self._sources.get(peer)) is not None:
            source.connected, source.left, source.again = False, True, None
            source.worker.close()

    def close(self) -> None:
        """End all workers once what they have in flight has settled; none is begun after."""
        self._closed = True
        for peer in list(self._sources):
            self.leave(peer)

    def workers(self) -> list[PeerWorker]:
        """Those that have not ended. From any thread."""
        return [source.worker for source in list(self._sources.values())]

    def _on_connected(self, peer: str, error: BackendError | None) -> None:
        source = self._sources.get(peer)
        if source is None or source.left:
            return
        if error is None:
            source.connected = True
            self._told(peer, None)
        else:
            source.left = True
            cause = Cause.INVALID if isinstance(error, IncompatiblePeerError) else Cause.PEER_LOST
            self._told(peer, Failure(cause, f"decode's backend cannot reach prefill's memory: {error}"))

    def _move_now(self, peer: str, worker: PeerWorker) -> None:
        self._on_ended(peer, worker.move_now())

    def _on_ended(self, peer: str, events: list[Ended]) -> None:
        source = self._sources.get(peer)
        for event in events:
            if source is not None:
                number = number_of(event)
                source.worker.forget(number)
                if (numbers := source.reads.get(event.attempt)) is not None:
                    numbers.discard(number)
                    if not numbers:
                        del source.reads[event.attempt]
            self._drive(event)

    def _on_gone(self, peer: str) -> None:
        """The worker has ended; what it has not answered, after a fault in it, nobody can speak for any more."""
        source = self._sources.pop(peer, None)
        if source is None:
            return
        for move in source.worker.unended():
            self._drive(ended(move, WriteResult.UNSETTLED, 0, "the thread that reads has failed"))
        if source.connected:
            self._told(peer, Failure(Cause.PEER_LOST, "the thread that reads from it has failed"))
        if source.again is not None:
            source.again()

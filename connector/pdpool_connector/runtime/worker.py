"""One thread for each peer makes the backend calls that may block, so that a frozen peer delays only itself."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue

from pdpool_connector.backends.base import (
    BackendError,
    Handle,
    IncompatiblePeerError,
    InvalidChunkError,
    Poll,
    TransferBackend,
    UnknownPeerError,
    prompt_submit,
)
from pdpool_connector.layout.checksum import PageSums, sampled
from pdpool_connector.layout.chunk import Chunk, joined
from pdpool_connector.layout.memory import KVMemory, LayoutError, RemoteMemory
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.pool import MAX_CHUNK_DESCRIPTORS
from pdpool_connector.layout.staging import Reservation, Staging
from pdpool_connector.protocol.events import Write, WriteEnded, WriteResult
from pdpool_connector.protocol.frames import PAGE_ID_BYTES, AttemptId
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.data_connection import DataConnection
from pdpool_connector.runtime.job import Job, as_ids, without_pages

log = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Transfers under way at a time: the next is ready when one ends, and an abort waits for no more than these."""
SMALL = (128 << 10, 64)
"""Bytes and pieces of a small write at most: it may travel with others in one transfer. The connector's own thread may
make it at once, for copying it takes less time than waking a thread."""
TOGETHER = (1 << 20, MAX_CHUNK_DESCRIPTORS)
"""Bytes and pieces of the small writes in one transfer at most, so that an abort never waits longer than for one large
chunk."""

Submit = Callable[[str, Chunk], Handle | None]
Piece = tuple[Job, Chunk]


class _Signal(Enum):
    """What a worker may find in its inbox beside jobs."""

    CLOSE = "close"
    GO_ON = "go on"
    """The owner has begun what the worker is to finish."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One transfer of the backend's: a chunk of one job, or the small ones of several. All of them end as it does."""

    parts: list[Piece]
    handle: Handle


class PeerWorker:
    """Connects to one peer, then writes to it, chunks of different jobs in turn, until closed.

    A connection that has broken is made again for the next job; what was under way over it has failed then.
    `submit`, `write_now`, `stop` and `close` are for the connector's own thread. `write_now` makes small writes in it,
    where the backend can do so without waiting and the worker's thread has nothing to do. A thread that calls the
    backend holds `_hands`.

    Args:
        backend, memory, peer, remote: Which memory is written to which, over what.
        kv: The peer gets pages of ours; otherwise only state and aux rows.
        shares: The peer gets shares of state that is cut.
        sums: Gives the checksums of pages in `memory`.
        checksum_rate: Share of the attempts that have one taken.
        staging: Memory through which scattered pages go out.
        connected: Called once, from this thread, with an error or None.
        ended: Called, from this thread, with writes that have ended.
        kept: Called with what an unsettled write may still read from `staging`.
        gone: Called once, last.
    """

    def __init__(
        self,
        backend: TransferBackend,
        memory: KVMemory,
        peer: str,
        remote: RemoteMemory,
        *,
        kv: bool,
        shares: bool,
        sums: PageSums,
        checksum_rate: float,
        timeouts: Timeouts,
        staging: Staging | None = None,
        connected: Callable[[BackendError | None], None],
        ended: Callable[[list[WriteEnded]], None],
        kept: Callable[[AttemptId, Reservation], None],
        gone: Callable[[], None],
    ) -> None:
        self._backend, self._memory, self._peer, self._remote = backend, memory, peer, remote
        self._connection = DataConnection(backend, peer, remote, timeouts.data_retry_s)
        self._broken = ""
        """Why the connection is to be made again before anything is submitted, or ""."""
        self._connected, self._ended, self._kept, self._gone = connected, ended, kept, gone
        self._kv, self._shares = kv, shares
        self._sums, self._checksum_rate = sums, checksum_rate
        self._sum_of: Callable[[Chunk], int] | None = None
        self._staging = staging
        self._submit_now = prompt_submit(backend)
        self._pages_now = 0
        """Pages of a small write at most."""
        self._small: list[Job] = []
        """Submitted in this turn of the connector's thread, for `write_now`."""
        self._hands = threading.Lock()
        self._inbox: SimpleQueue[Job | _Signal] = SimpleQueue()
        self._jobs: deque[Job] = deque()
        self._flights: deque[_Flight] = deque()
        self._over: list[WriteEnded] = []
        """Ends of writes that have not been reported yet."""
        self._closing = False
        self._owned: dict[int, Job] = {}
        self.transport = ""
        """How bytes travel to the peer, as the backend names it; "" while that is not known."""
        self._thread = threading.Thread(target=self._run, name=f"pdpool-peer-{peer[:8]}", daemon=True)
        self._thread.start()

    def submit(self, write: Write) -> bool:
        """Queue a write. True when `write_now` is to be called before the turn ends."""
        job = Job(write if self._kv else without_pages(write))
        write = job.write
        self._owned[write.write] = job
        if not 0 < len(write.target) <= self._pages_now * PAGE_ID_BYTES or any(ours for ours, _ in write.state):
            self._inbox.put(job)
            return False
        self._prepare(job)
        if job.size is None:
            self._inbox.put(job)
            return False
        self._small.append(job)
        return len(self._small) == 1

    def write_now(self) -> list[WriteEnded]:
        """Make the small writes of this turn and return their ends; what would have to wait is left to the thread."""
        small, self._small = self._small, []
        if not self._hands.acquire(blocking=False):
            self._leave(small)
            return []
        try:
            if not self._inbox.empty():
                self._leave(small)
                return []
            self._write_small(small)
            over, self._over = self._over, []
            return over
        finally:
            self._hands.release()

    def _leave(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._inbox.put(job)

    def _write_small(self, small: list[Job]) -> None:
        """With the thread's hands, which has neither jobs nor flights then."""
        assert self._submit_now is not None
        self._jobs.extend(small)
        while self._jobs and not self._flights and self._advance(self._submit_now, SMALL):
            while self._flights and self._flights[-1].handle.outcome is not Poll.PENDING:
                self._poll(self._flights.pop())
        if self._jobs or self._flights:
            self._inbox.put(_Signal.GO_ON)

    def stop(self, writes: set[int]) -> None:
        """Submit no further chunk of these writes; each still ends."""
        for number in writes:
            if (job := self._owned.get(number)) is not None:
                job.stopped = True

    def forget(self, number: int) -> None:
        """The connector has received the end of a write."""
        self._owned.pop(number, None)

    def unended(self) -> list[Write]:
        """Writes whose end the connector has not received."""
        return [job.write for job in self._owned.values()]

    def close(self) -> None:
        """End once everything in flight has settled; what has not begun is cut short."""
        self.stop(set(self._owned))
        small, self._small = self._small, []
        self._leave(small)
        self._inbox.put(_Signal.CLOSE)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; True when it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            error = self._connect()
            self._connected(error)
            if error is None:
                with self._hands:
                    try:
                        self._work()
                    finally:
                        self._connection.close()
        except Exception:
            log.exception("the worker of peer %s failed", self._peer[:8])
        finally:
            # Only a fault in this thread leaves something in flight.
            for flight in self._flights:
                for job, chunk in flight.parts:
                    self._keep(job, chunk)
            self._gone()

    def _connect(self) -> BackendError | None:
        try:
            self._plan = PairPlan(self._memory, self._remote.memory)
            self._sum_of = self._sums.of_chunk(self._remote.memory)
            if self._submit_now is not None:
                self._pages_now = self._plan.pages_within(*SMALL)
        except LayoutError as error:
            return IncompatiblePeerError(str(error))
        except Exception as error:
            log.exception("our memory and that of peer %s cannot be compared", self._peer[:8])
            return BackendError(f"{type(error).__name__}: {error}")
        failure = self._connection.connect()
        if failure is None:
            self.transport = self._backend.transport(self._peer)
        return failure

    def _work(self) -> None:
        while not (self._closing and not self._jobs and not self._flights):
            self._take()
            if self._broken:
                self._connection.connect_again(self._broken)
                self._broken = ""
                self.transport = self._backend.transport(self._peer)
            if self._jobs and len(self._flights) < IN_FLIGHT:
                self._advance(self._backend.submit, TOGETHER)
            elif self._flights:
                self._poll(self._flights.popleft())
            if self._over:
                over, self._over = self._over, []
                self._ended(over)

    def _take(self) -> None:
        """Read the inbox; sleep on it only when there is nothing else to do."""
        idle = not self._jobs and not self._flights
        while (idle and not self._closing) or not self._inbox.empty():
            item = self._receive() if idle else self._inbox.get()
            idle = False
            if isinstance(item, Job):
                if not item.prepared:
                    self._prepare(item)
                self._jobs.append(item)
            elif item is _Signal.CLOSE:
                self._closing = True

    def _receive(self) -> Job | _Signal:
        """Sleep until there is something to do; meanwhile the connector's thread may do it."""
        self._hands.release()
        try:
            return self._inbox.get()
        finally:
            self._hands.acquire()

    def _prepare(self, job: Job) -> None:
        job.prepared = True
        write = job.write
        if self._sum_of is not None and sampled(write.attempt.number, self._checksum_rate):
            job.checksum = 0
        try:
            ours, theirs = as_ids(write.source), as_ids(write.target)
            job.gather = self._staging is not None and self._plan.worth_staging(theirs)
            state = [(as_ids(local), as_ids(remote)) for local, remote in write.state]
            spans = self._plan.state_spans(kv=self._kv, shares=self._shares)
            chunks = self._plan.cut(ours, theirs, write.aux, state, gather=job.gather, state_within=spans)
        except LayoutError as error:
            job.fail(WriteResult.INVALID, str(error))
            return
        job.chunks.extend(chunks)
        if len(chunks) == 1 and not job.gather and chunks[0].plain:
            nbytes, pieces = self._plan.nbytes(chunks[0]), self._plan.pieces(chunks[0])
            job.size = (nbytes, pieces) if nbytes <= SMALL[0] and pieces <= SMALL[1] else None

    def _advance(self, submit: Submit, most: tuple[int, int]) -> bool:
        """Submit what comes next; False when that would have to wait, and nothing was begun."""
        parts = self._next(most)
        begun = not parts or self._launch(parts, submit)
        for job, _ in parts:
            if job.chunks:
                self._jobs.append(job)  # and let the next job have its turn
            else:
                self._end_if_over(job)
        return begun

    def _next(self, most: tuple[int, int]) -> list[Piece]:
        """The chunk whose turn it is and, where it is small, the small ones behind it."""
        parts: list[Piece] = []
        nbytes = pieces = 0
        while self._jobs:
            job = self._jobs[0]
            if job.stopped:
                job.fail(WriteResult.STOPPED, "stopped on request")
            elif not parts and job.ahead and len(self._jobs) > 1:
                job.ahead -= 1
                self._jobs.rotate(-1)
                continue
            if job.chunks and job.size is not None:
                nbytes, pieces = nbytes + job.size[0], pieces + job.size[1]
            if parts and job.chunks and (job.size is None or nbytes > most[0] or pieces > most[1]):
                break
            self._jobs.popleft()
            if not job.chunks:
                self._end_if_over(job)
                continue
            parts.append((job, job.chunks.popleft()))
            if job.size is None:
                break
        return parts

    def _launch(self, parts: list[Piece], submit: Submit) -> bool:
        """Hand chunks to the backend as one; False when that would have to wait, and nothing was begun."""
        job, first = parts[0]
        whole = first
        try:
            if len(parts) > 1:
                whole = joined([chunk for _, chunk in parts])
            else:
                whole = self._stage(job, whole)
                parts = [(job, whole)]
            handle = submit(self._peer, whole)
        except UnknownPeerError as error:
            return self._without_connection(parts, first, str(error))
        except (InvalidChunkError, LayoutError) as error:
            if len(parts) > 1:
                begun = [self._launch([part], submit) for part in parts]  # so that only the one at fault fails
                return all(begun)
            self._drop(parts, WriteResult.INVALID, str(error))
        except BackendError as error:
            self._drop(parts, WriteResult.FAILED, str(error))
        except Exception as error:
            log.exception("backend %s failed to submit", self._backend.name)
            for part in parts:
                self._keep(*part)
                part[0].fail(WriteResult.UNSETTLED, f"{type(error).__name__}: {error}")
        else:
            if handle is None:
                self._put_back(parts)
                return False
            self._flights.append(_Flight(parts, handle))
            for job, chunk in parts:
                job.in_flight += 1
                job.ahead = 0 if self._jobs else job.in_flight
                self._sum(job, chunk)  # while the chunk is on its way
        return True

    def _without_connection(self, parts: list[Piece], first: Chunk, why: str) -> bool:
        """Nothing was begun. A new connection may help: once, and where nothing is under way over the old one."""
        again = not self._flights and self._connection.worth_a_try() and not any(job.tried_again for job, _ in parts)
        if not again:
            self._drop(parts, WriteResult.FAILED, self._connection.failure or why)
            return True
        self._broken = why
        for job, chunk in parts:
            job.tried_again = True
            self._unstage(chunk)
        self._put_back([(parts[0][0], first)] if parts[0][1].staged is not None else parts)
        return False

    def _put_back(self, parts: list[Piece]) -> None:
        for job, chunk in parts:
            job.chunks.appendleft(chunk)

    def _drop(self, parts: list[Piece], result: WriteResult, message: str) -> None:
        """The backend would not take these chunks: nothing of them is under way."""
        for job, chunk in parts:
            self._unstage(chunk)
            job.fail(result, message)

    def _poll(self, flight: _Flight) -> None:
        try:
            outcome, why = self._backend.poll(flight.handle), flight.handle.failure
        except Exception as error:
            log.exception("backend %s failed to poll", self._backend.name)
            outcome, why = Poll.FAILED_UNSETTLED, f"{type(error).__name__}: {error}"
        if outcome is Poll.PENDING:
            self._flights.appendleft(flight)
            return
        for job, chunk in flight.parts:
            self._conclude(job, chunk, outcome, why)

    def _conclude(self, job: Job, chunk: Chunk, outcome: Poll, why: str) -> None:
        """A chunk's transfer has come to its end."""
        job.in_flight -= 1
        if outcome is Poll.FAILED_UNSETTLED:
            self._keep(job, chunk)
        else:
            self._unstage(chunk)
        if outcome is Poll.DONE:
            job.bytes_moved += job.size[0] if job.size is not None else self._plan.nbytes(chunk)
        elif outcome is Poll.FAILED_SETTLED:
            job.fail(WriteResult.FAILED, why)
        else:
            job.fail(WriteResult.UNSETTLED, why)
        self._end_if_over(job)

    def _sum(self, job: Job, chunk: Chunk) -> None:
        """Add a chunk to its job's checksum. A fault in that fails this job, and no other that is under way."""
        if job.checksum is None or self._sum_of is None:
            return
        try:
            job.checksum += self._sum_of(chunk)
        except Exception as error:
            log.exception("the checksum of a chunk could not be taken")
            job.fail(WriteResult.FAILED, f"{type(error).__name__}: {error}")

    def _stage(self, job: Job, chunk: Chunk) -> Chunk:
        """Gather the chunk's pages where that is worth it and there is room; otherwise they go out as strips."""
        if not job.gather or not len(chunk.local_pages):
            return chunk
        assert self._staging is not None
        if (slot := self._staging.reserve()) is not None:
            try:
                return self._plan.stage(chunk, slot)
            except BaseException:
                slot.release()
                raise
        first, *rest = self._plan.as_strips(chunk)
        job.chunks.extendleft(reversed(rest))
        return first

    def _unstage(self, chunk: Chunk) -> None:
        if chunk.staged is not None:
            chunk.staged.release()

    def _keep(self, job: Job, chunk: Chunk) -> None:
        if chunk.staged is not None:
            self._kept(job.write.attempt, chunk.staged)

    def _end_if_over(self, job: Job) -> None:
        if not job.chunks and not job.in_flight and not job.over:
            job.over = True
            self._over.append(job.end())


def join_all(workers: Sequence[PeerWorker], deadline: float) -> bool:
    """Wait for closed workers until `deadline` (monotonic), 0.1 s at least; True when all have ended."""
    deadline = max(deadline, time.monotonic() + 0.1)
    ended = [worker.join(max(deadline - time.monotonic(), 0.0)) for worker in workers]
    return all(ended)

"""One thread for each peer that makes the engine calls which may block, so that a frozen peer delays only itself.

It moves pages either way: what is `Write` to prefill's connector is `Read` to decode's.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

import msgspec
import numpy as np

from pdpool_connector.engines.base import (
    Engine,
    EngineError,
    Handle,
    IncompatiblePeerError,
    InvalidChunkError,
    Op,
    Poll,
    prompt_submit,
)
from pdpool_connector.layout.checksum import MASK, PageSums, sampled
from pdpool_connector.layout.memory import KVMemory, LayoutError, RemoteMemory
from pdpool_connector.layout.plan import Chunk, PairPlan
from pdpool_connector.layout.pool import Ids
from pdpool_connector.layout.staging import Reservation, Staging
from pdpool_connector.protocol.events import Read, ReadEnded, Write, WriteEnded, WriteResult
from pdpool_connector.protocol.frames import PAGE_ID_BYTES, AttemptId

log = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Chunks under way at a time: the next is ready when one ends, and an abort waits for no more than these."""
SMALL_IN_FLIGHT = 64
SMALL_BYTES = 1 << 20
"""While the data plane makes us wait, that many chunks may be under way as long as all together are this small: what
an abort waits for stays less than a large chunk, and many small writes do not queue for each other's round trips."""


AT_ONCE_BYTES = 128 << 10
AT_ONCE_PIECES = 64
"""The owner itself makes moves that are this small: copying them takes less than waking a thread does."""

Move = Write | Read
AnyMove = TypeVar("AnyMove", Write, Read)
Ended = WriteEnded | ReadEnded


def number_of(move: Move | Ended) -> int:
    """The number by which the machine knows a move."""
    return move.write if isinstance(move, Write | WriteEnded) else move.read


def without_pages(move: AnyMove) -> AnyMove:
    """The same move for a rank with which only aux rows are exchanged."""
    if isinstance(move, Read):
        move = msgspec.structs.replace(move, checksum=None)
    return msgspec.structs.replace(move, source=b"", target=b"", state=(b"", b""))


@dataclass(slots=True, eq=False)
class Job:
    """One move on its way: the chunks still to be submitted, and what became of the others."""

    move: Move
    stopped: bool = False
    prepared: bool = False
    chunks: deque[Chunk] = field(default_factory=deque)
    gather: bool = False
    """The chunks of pages are cut to be gathered."""
    in_flight: int = 0
    bytes_moved: int = 0
    checksum: int | None = None
    """Of the pages written from, or read into, so far, where they are sampled."""
    result: WriteResult = WriteResult.LANDED
    message: str = ""

    @property
    def op(self) -> Op:
        """Which way it goes."""
        return Op.WRITE if isinstance(self.move, Write) else Op.READ

    def fail(self, result: WriteResult, message: str) -> None:
        """Submit no more. An unsettled chunk outweighs every other outcome, and otherwise the first one counts."""
        self.chunks.clear()
        if self.result is WriteResult.LANDED or result is WriteResult.UNSETTLED:
            self.result, self.message = result, message


class PeerWorker:
    """Connects to one peer, then writes to it or reads from it, chunks of different jobs in turn, until closed.

    `connected` is called once, from this thread, with an error or None; `ended` for each move; `gone` once, last.
    `sums` gives the checksums of pages in `memory`, `checksum_rate` the share of writes that have one taken; of reads
    those have for which the peer has told one. `kept`
    gives away what an unsettled write may still read from `staging`, through which scattered pages go out.
    `submit`, `stop` and `close` are for the owner thread. `submit` makes a small move itself where the engine can do so
    without waiting and the thread has nothing to do: who makes calls of the engine's holds `hands`.
    """

    def __init__(
        self,
        engine: Engine,
        memory: KVMemory,
        peer: str,
        remote: RemoteMemory,
        *,
        sums: PageSums,
        checksum_rate: float,
        staging: Staging | None = None,
        connected: Callable[[EngineError | None], None],
        ended: Callable[[Ended], None],
        kept: Callable[[AttemptId, Reservation], None],
        gone: Callable[[], None],
    ) -> None:
        self._engine, self._memory, self._peer, self._remote = engine, memory, peer, remote
        self._connected, self._ended, self._kept, self._gone = connected, ended, kept, gone
        self._sums, self._checksum_rate = sums, checksum_rate
        self._sum_written: Callable[[Chunk], int] | None = None
        self._sum_read: Callable[[Chunk], int] | None = None
        self._staging = staging
        self._at_once = prompt_submit(engine)
        self._at_once_pages = 0
        self._hands = threading.Lock()
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._jobs: deque[Job] = deque()
        self._flight: deque[tuple[Job, Chunk, Handle]] = deque()
        self._flying_bytes = 0
        self._made_to_wait = False
        """The last poll found its chunk still under way."""
        self._closing = False
        self._owned: dict[int, Job] = {}
        self._thread = threading.Thread(target=self._run, name=f"pdpool-peer-{peer[:8]}", daemon=True)
        self._thread.start()

    def submit(self, move: Move) -> None:
        """Make a move, or queue it; `ended` may be called before this returns."""
        job = Job(move)
        self._owned[number_of(move)] = job
        few = 0 < len(move.target) <= self._at_once_pages * PAGE_ID_BYTES and not move.state[0]
        if not few or not self._hands.acquire(blocking=False):
            self._inbox.put(job)
            return
        try:
            if not self._inbox.empty() or not self._move_at_once(job):
                self._inbox.put(job)
        finally:
            self._hands.release()

    def _move_at_once(self, job: Job) -> bool:
        """In the owner's thread; False when the worker's is to begin it, or to go on with it."""
        assert self._at_once is not None
        self._prepare(job)
        if job.gather or len(job.chunks) != 1 or not self._launch(job, self._at_once):
            return False
        if job.in_flight:
            if self._flight[-1][2].outcome is Poll.PENDING:
                return False
            self._poll(*self._flight.pop())
        else:
            self._end_if_over(job)
        return True

    def stop(self, moves: set[int]) -> None:
        """Submit no further chunk of these moves; each still ends."""
        for number in moves:
            if (job := self._owned.get(number)) is not None:
                job.stopped = True

    def forget(self, number: int) -> None:
        """The owner has taken note of a move's end."""
        self._owned.pop(number, None)

    def unended(self) -> list[Move]:
        """Moves whose end the owner has not taken note of."""
        return [job.move for job in self._owned.values()]

    def close(self) -> None:
        """End once everything in flight has settled; what has not begun is cut short."""
        self.stop(set(self._owned))
        self._inbox.put(None)

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
                    self._work()
                    self._engine.disconnect(self._peer)
        except Exception:
            log.exception("the worker of peer %s failed", self._peer[:8])
        finally:
            # Only a fault in this thread leaves something in flight.
            for job, chunk, _ in self._flight:
                self._keep(job, chunk)
            self._gone()

    def _connect(self) -> EngineError | None:
        try:
            self._plan = PairPlan(self._memory, self._remote.memory)
            self._sum_written = self._sums.of_chunk(self._remote.memory, here=False)
            self._sum_read = self._sums.of_chunk(self._remote.memory, here=True)
            self._engine.connect(self._peer, self._remote)
            if self._at_once is not None:
                self._at_once_pages = self._plan.pages_within(AT_ONCE_BYTES, AT_ONCE_PIECES)
        except LayoutError as error:
            return IncompatiblePeerError(str(error))
        except EngineError as error:
            return error
        except Exception as error:
            log.exception("engine %s failed to connect peer %s", self._engine.name, self._peer[:8])
            return EngineError(f"{type(error).__name__}: {error}")
        return None

    def _work(self) -> None:
        while not (self._closing and not self._jobs and not self._flight):
            self._take()
            if self._jobs and self._room():
                self._advance(self._jobs.popleft())
            elif self._flight:
                self._poll(*self._flight.popleft())

    def _room(self) -> bool:
        """Whether one chunk more may be under way."""
        if len(self._flight) < IN_FLIGHT:
            return True
        return self._made_to_wait and len(self._flight) < SMALL_IN_FLIGHT and self._flying_bytes < SMALL_BYTES

    def _take(self) -> None:
        """Read the inbox; sleep on it only when there is nothing else to do."""
        idle = not self._jobs and not self._flight
        while (idle and not self._closing) or not self._inbox.empty():
            job = self._receive() if idle else self._inbox.get()
            idle = False
            if job is None:
                self._closing = True
                continue
            if not job.prepared:
                self._prepare(job)
            if not job.in_flight:
                self._jobs.append(job)

    def _receive(self) -> Job | None:
        """Sleep until there is something to do; meanwhile the owner may do it."""
        self._hands.release()
        try:
            return self._inbox.get()
        finally:
            self._hands.acquire()

    def _prepare(self, job: Job) -> None:
        job.prepared = True
        writes = isinstance(job.move, Write)
        if self._is_checked(job.move):
            job.checksum = 0
        try:
            ours, theirs, aux, state = _ends(job.move)
            job.gather = writes and self._staging is not None and self._plan.worth_staging(theirs)
            job.chunks = deque(self._plan.cut(ours, theirs, aux, state, gather=job.gather))
        except LayoutError as error:
            job.fail(WriteResult.INVALID, str(error))

    def _is_checked(self, move: Move) -> bool:
        """Whether a checksum is taken: of writes we choose, of reads the peer does, which has told one."""
        if isinstance(move, Read):
            return move.checksum is not None and self._sum_read is not None
        return self._sum_written is not None and sampled(move.attempt.number, self._checksum_rate)

    def _advance(self, job: Job) -> None:
        """Submit the job's next chunk and let the next job have its turn."""
        if job.stopped:
            job.fail(WriteResult.STOPPED, "stopped on request")
        if job.chunks:
            self._launch(job, self._engine.submit)
        if job.chunks:
            self._jobs.append(job)
        else:
            self._end_if_over(job)

    def _launch(self, job: Job, submit: Callable[[str, Chunk, Op], Handle | None]) -> bool:
        """Hand the job's next chunk to the engine; False when that would have to wait, and nothing was begun."""
        chunk = job.chunks.popleft()
        try:
            chunk = self._stage(job, chunk)
            handle = submit(self._peer, chunk, job.op)
        except (InvalidChunkError, LayoutError) as error:
            self._unstage(chunk)
            job.fail(WriteResult.INVALID, str(error))
        except EngineError as error:
            self._unstage(chunk)
            job.fail(WriteResult.FAILED, str(error))
        except Exception as error:
            log.exception("engine %s failed to submit", self._engine.name)
            self._keep(job, chunk)
            job.fail(WriteResult.UNSETTLED, f"{type(error).__name__}: {error}")
        else:
            if handle is None:
                job.chunks.appendleft(chunk)
                return False
            job.in_flight += 1
            self._flight.append((job, chunk, handle))
            self._flying_bytes += self._plan.nbytes(chunk)
            if job.checksum is not None and job.op is Op.WRITE and self._sum_written is not None:
                job.checksum += self._sum_written(chunk)  # while the chunk is on its way
        return True

    def _poll(self, job: Job, chunk: Chunk, handle: Handle) -> None:
        try:
            outcome, why = self._engine.poll(handle), handle.failure
        except Exception as error:
            log.exception("engine %s failed to poll", self._engine.name)
            outcome, why = Poll.FAILED_UNSETTLED, f"{type(error).__name__}: {error}"
        self._made_to_wait = outcome is Poll.PENDING
        if outcome is Poll.PENDING:
            self._flight.appendleft((job, chunk, handle))
            return
        nbytes = self._plan.nbytes(chunk)
        self._flying_bytes -= nbytes
        job.in_flight -= 1
        if outcome is Poll.FAILED_UNSETTLED:
            self._keep(job, chunk)
        else:
            self._unstage(chunk)
        if outcome is Poll.DONE:
            job.bytes_moved += nbytes
            if job.checksum is not None and job.op is Op.READ and self._sum_read is not None:
                job.checksum += self._sum_read(chunk)  # while the next one is on its way
        elif outcome is Poll.FAILED_SETTLED:
            job.fail(WriteResult.FAILED, why)
        else:
            job.fail(WriteResult.UNSETTLED, why)
        self._end_if_over(job)

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
        first, *rest = self._plan.cut(chunk.local_pages, chunk.remote_pages, chunk.aux, chunk.state, within=chunk.span)
        job.chunks.extendleft(reversed(rest))
        return first

    def _unstage(self, chunk: Chunk) -> None:
        if chunk.staged is not None:
            chunk.staged.release()

    def _keep(self, job: Job, chunk: Chunk) -> None:
        if chunk.staged is not None:
            self._kept(job.move.attempt, chunk.staged)

    def _end_if_over(self, job: Job) -> None:
        if not job.chunks and not job.in_flight and job not in self._jobs:
            checksum = job.checksum & MASK if job.checksum is not None else None
            told = job.move.checksum if isinstance(job.move, Read) else None
            if checksum is not None and told is not None and checksum != told:
                what = f"the checksum of its pages is {checksum:016x} here and {told:016x} at prefill"
                job.fail(WriteResult.CORRUPT, what)
            self._ended(ended(job.move, job.result, job.bytes_moved, job.message, checksum))


def ended(
    move: Move, result: WriteResult, bytes_moved: int = 0, message: str = "", checksum: int | None = None
) -> Ended:
    """What the machine is told of the end of a move."""
    if isinstance(move, Write):
        return WriteEnded(move.attempt, move.write, result, bytes_moved, message, checksum)
    return ReadEnded(move.attempt, move.read, result, bytes_moved, message)


def _ends(move: Move) -> tuple[Ids, Ids, tuple[int, int] | None, tuple[Ids, Ids] | None]:
    """Our end of a move and the peer's: pages, aux rows, state items. The machine names source and target."""
    pages, state = (_ids(move.source), _ids(move.target)), (_ids(move.state[0]), _ids(move.state[1]))
    aux = move.aux
    if isinstance(move, Read):
        pages, state = pages[::-1], state[::-1]
        aux = aux[::-1] if aux is not None else None
    return *pages, aux, state if len(state[0]) or len(state[1]) else None


def _ids(packed: bytes) -> Ids:
    return np.frombuffer(packed, dtype="<i4").astype(np.int32, copy=False)

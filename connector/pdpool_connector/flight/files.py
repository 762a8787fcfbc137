"""Writes records into a directory, in a thread of its own; bounded in number, bytes and rate."""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Full, Queue
from typing import Final, Literal, NamedTuple

import msgspec

from pdpool_connector.flight.record import SUFFIX, Header, Record, Step, encode_record
from pdpool_connector.flight.recorder import Noted, Recorder, Snapshot
from pdpool_connector.protocol.events import Tick
from pdpool_connector.protocol.status import ABORTS, TransferStatus
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.protocol.token_bucket import TokenBucket

log = logging.getLogger(__name__)

MAX_FILES: Final = 256
MAX_BYTES: Final = 64 << 20
"""Bounds on all records in the directory. Records of aborts are removed first, then the oldest."""
BURST: Final = 32
PER_SECOND: Final = 4.0
"""When many hand-offs fail together, so many records are written at once and then so many a second. The first ones
show the fault."""
KEPT_TOKENS: Final = BURST // 2
"""Records of a burst that aborts leave to failures. Clients leave all the time, and their records show no fault."""
QUEUE: Final = 64
PART: Final = ".part"
"""Replaces a record's last suffix while it is written; such a file stays if the process ends meanwhile."""

_OF_ABORT: Final = f"-aborted{SUFFIX}"
_UNFINISHED: Final = str(Path(SUFFIX).with_suffix(PART))
_INCARNATION = re.compile(rb"[0-9a-f]{32}")


class Source(NamedTuple):
    """The machine whose hand-offs are recorded."""

    role: Literal["prefill", "decode"]
    rank: int
    incarnation: str
    timeouts: Timeouts


class Flight:
    """One connector's recorder, and the thread that writes traces of failed hand-offs into `directory`.

    The directory is made if it does not exist. `note` and `ended` are for the owner thread.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self, directory: Path, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._source, self._clock = directory, source, clock
        self._recorder = Recorder(source.incarnation, source.timeouts.result_s)
        self.note = self._recorder.note
        self._bucket = TokenBucket(BURST, PER_SECOND, clock())
        self._wanted_so_far: dict[int, bool] = {}
        """Whether a failed hand-off is recorded, for those that will be reported once more."""
        self._queue: Queue[tuple[int, Snapshot, TransferStatus, float] | None] = Queue(QUEUE)
        self.skipped = self.unwritten = 0
        self._thread = threading.Thread(target=self._run, name="pdpool-flight", daemon=True)
        self._thread.start()

    def ended(self, handle: int, status: TransferStatus, now: float) -> None:
        """A hand-off was reported ended: a failed one is written, and once more when its pages become free.

        The second record does not replace the first if its beginning has left the ring: it could not be replayed.
        """
        failed = status.cause is not None
        if failed and self._wanted(handle, status):
            self._queue_up(handle, self._recorder.snapshot(handle), status, now)
        self._recorder.ended(handle, now, failed=failed, releasable=status.releasable)

    def lost(self) -> dict[str, int]:
        """Failed hand-offs that are not on record, by reason.

        "skipped": too many at a time, or evicted before the end. "unwritten": the file could not be written (logged).
        """
        return {"skipped": self.skipped, "unwritten": self.unwritten}

    def close(self, timeout_s: float) -> bool:
        """Write what is queued and end the thread. True when it has ended within the time."""
        with contextlib.suppress(Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _queue_up(self, handle: int, snapshot: Snapshot | None, status: TransferStatus, now: float) -> None:
        if snapshot is None or self._queue.full():
            self.skipped += 1
        else:
            self._queue.put_nowait((handle, snapshot, status, now))  # no other thread puts

    def _wanted(self, handle: int, status: TransferStatus) -> bool:
        wanted = self._wanted_so_far.pop(handle, None)
        if wanted is None:
            wanted = self._bucket.take(self._clock(), leave=KEPT_TOKENS if status.cause in ABORTS else 0)
            self.skipped += not wanted
        if not status.releasable:
            self._wanted_so_far[handle] = wanted
        return wanted

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write(*item)
            except Exception:
                self.unwritten += 1
                log.exception("a flight record could not be written to %s", self._directory)

    def _write(self, handle: int, snapshot: Snapshot, status: TransferStatus, now: float) -> None:
        kind = _OF_ABORT if status.cause in ABORTS else SUFFIX
        name = f"{self._source.role}-{self._source.incarnation[:8]}-{handle}-room{snapshot.room}{kind}"
        path = self._directory / name
        if snapshot.missing and path.exists():
            return
        data = encode_record(self._record(handle, snapshot, status, now))
        unfinished = path.with_suffix(PART)
        try:
            unfinished.touch(0o600)
            unfinished.write_bytes(data)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
            prune(self._directory)

    def _record(self, handle: int, snapshot: Snapshot, status: TransferStatus, now: float) -> Record:
        header = Header(
            **self._source._asdict(),
            room=snapshot.room,
            request_id=snapshot.request_id,
            handle=handle,
            cause=status.cause.value if status.cause is not None else "",
            message=status.message,
            releasable=status.releasable,
            missing=snapshot.missing,
            wall=time.time(),
            at=now,
        )
        return Record(header, merged(snapshot))


def merged(snapshot: Snapshot) -> tuple[Step, ...]:
    """A trace's own steps, and those events for all hand-offs that name a process or a prefill of the trace."""
    own = snapshot.steps
    seen = {noted.order for noted in own}
    text = b"".join(msgspec.json.encode(noted.event) + msgspec.json.encode(noted.effects) for noted in own)
    prefills = {name for noted in own if (name := getattr(noted.event, "prefill", None)) is not None}
    linked = [noted for noted in snapshot.wide if getattr(noted.event, "prefill", None) in prefills]
    text += b"".join(msgspec.json.encode(noted.event) for noted in linked)
    processes = {found.decode() for found in _INCARNATION.findall(text)}

    def bears(noted: Noted) -> bool:
        if isinstance(noted.event, Tick) and own and noted.order < own[0].order:
            return False
        peer, prefill = (getattr(noted.event, name, None) for name in ("peer", "prefill"))
        return (peer is None or peer in processes) and (prefill is None or prefill in prefills)

    wide = [noted for noted in snapshot.wide if noted.order not in seen and bears(noted)]
    steps = sorted([*wide, *own], key=lambda noted: noted.order)
    return tuple(Step(noted.at, noted.event, noted.effects, noted.fault) for noted in steps)


def prune(directory: Path, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> None:
    """Remove records, those of aborts first and then the oldest, until the rest is within both bounds.

    Unfinished ones count too. Other processes may prune the same directory.
    """
    found: list[tuple[bool, int, int, Path]] = []
    for entry in os.scandir(directory):
        if entry.name.endswith((SUFFIX, _UNFINISHED)):
            with contextlib.suppress(FileNotFoundError):
                facts = entry.stat()
                found.append((not entry.name.endswith(_OF_ABORT), facts.st_mtime_ns, facts.st_size, Path(entry.path)))
    found.sort(reverse=True)
    total = 0
    for index, (_, _, size, path) in enumerate(found):
        total += size
        if index >= max_files or total > max_bytes:
            path.unlink(missing_ok=True)

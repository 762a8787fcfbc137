"""A worker over a backend whose transfers end when and how the test says."""

import threading
from collections.abc import Callable
from queue import Queue

import numpy as np
from pdpool_connector.backends.base import BackendError, Poll
from pdpool_connector.layout.checksum import PageSums
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import KVMemory, Region, RemoteMemory
from pdpool_connector.layout.staging import Reservation
from pdpool_connector.protocol.events import Write, WriteEnded
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.worker import PeerWorker

PAGE = (4 << 20) - 64  # so that four pages and an aux row make a chunk
MEMORY = KVMemory(
    kv=(Region(1 << 30, PAGE // 2, 256), Region(1 << 34, PAGE // 2, 256)),
    aux=(Region(1 << 20, 64, 16),),
    page_tokens=16,
    layers=1,
    kv_heads=1,
    head_dim=1,
    dtype="float32",
    model="m",
)


class Transfer:
    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.outcome = Poll.PENDING
        self.failure = ""


class ScriptedBackend:
    """Submits go into a list; the test decides when and how each ends."""

    name = "scripted"

    def __init__(self) -> None:
        self.submitted: Queue[Transfer] = Queue()
        self.refusals: dict[int, Exception] = {}
        self.count = 0
        self.poked = threading.Event()
        self.connect_error: Exception | None = None
        self.connects = 0
        self.on_connect: Callable[[], None] = lambda: None
        self.disconnected = threading.Event()

    def connect(self, *_) -> None:
        self.connects += 1
        self.on_connect()
        if self.connect_error is not None:
            raise self.connect_error

    def submit(self, _, chunk) -> Transfer:
        self.count += 1
        if self.count in self.refusals:
            raise self.refusals[self.count]
        transfer = Transfer(chunk)
        self.submitted.put(transfer)
        return transfer

    def poll(self, handle: Transfer) -> Poll:
        if handle.outcome is Poll.PENDING:
            self.poked.wait(0.002)
        return handle.outcome

    def transport(self, _) -> str:
        return "script"

    def disconnect(self, _) -> None:
        self.disconnected.set()


class Bench:
    def __init__(
        self,
        backend: ScriptedBackend,
        memory: KVMemory = MEMORY,
        theirs: KVMemory = MEMORY,
        staging=None,
        *,
        kv: bool = True,
        shares: bool = False,
        sums=None,
    ) -> None:
        self.backend = backend
        self.kept: Queue[tuple[AttemptId, Reservation]] = Queue()
        self.connected: Queue[BackendError | None] = Queue()
        self.ended: Queue[WriteEnded] = Queue()
        self.gone = threading.Event()
        self.due = False
        remote = RemoteMemory(backend="scripted", memory=theirs, descriptor=b"")
        self.worker = PeerWorker(
            backend,
            memory,
            "d" * 32,
            remote,
            kv=kv,
            shares=shares,
            sums=sums or PageSums(memory),
            checksum_rate=0.0 if sums is None else 1.0,
            timeouts=Timeouts(),
            staging=staging,
            connected=self.connected.put,
            ended=self._note,
            kept=lambda *entry: self.kept.put(entry),
            gone=self.gone.set,
        )

    def _note(self, ends: list[WriteEnded]) -> None:
        for end in ends:
            self.ended.put(end)

    def write(self, number: int, pages: int, *, aux: bool = False) -> None:
        ids = (32 * number + np.arange(pages, dtype="<i4")).tobytes()
        attempt = AttemptId("d" * 32, number)
        if self.worker.submit(Write(attempt, number, "d" * 32, ids, ids, (1, 2) if aux else None)):
            self.due = True

    def turn(self) -> None:
        """The end of the owner's turn."""
        if self.due:
            self.due = False
            self._note(self.worker.write_now())

    def next_submit(self) -> Transfer:
        return self.backend.submitted.get(timeout=30)

    def next_end(self) -> WriteEnded:
        return self.ended.get(timeout=30)

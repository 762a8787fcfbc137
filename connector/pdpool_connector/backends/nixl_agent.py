"""NIXL's agent as this project uses it: loaded lazily, configured not to spin, and safe to call from many threads.

It uses the compiled bindings of `nixl-cu12` and `nixl-cu13` 1.5.1 rather than their Python class, which fixes the delay
of the progress thread at 0 and so burns a core. One process can load the bindings of one of the two only.
"""

from __future__ import annotations

import importlib
import logging
import logging.config
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdpool_connector.layout.pool import Row, Runs
from pdpool_connector.layout.regions import Block

from .base import BackendUnavailableError

_log = logging.getLogger(__name__)

_EMULATION: Final = "UCX_PROTO_EMULATION_ENABLE"
"""Set to `n` where there is no GPU, unless the user set it.

UCX aborts a process that cannot send its part of an emulated transfer because the other process is gone: `ucs_fatal` in
`ucp_request_try_send` (src/ucp/core/ucp_request.inl), in every mode of error handling. A WRITE of host memory needs no
emulation. A WRITE of GPU memory over TCP does: without it, the write never ends.
"""

_GPUS: Final = ("/dev/nvidiactl", "/dev/kfd")
"""Devices of the drivers of CUDA and ROCm."""

PACKAGES: Final = ("nixl_cu12", "nixl_cu13")
"""Packages with NIXL's bindings, one for each major version of CUDA."""

_PROGRESS_DELAY_US: Final = 100_000
"""How often the progress thread looks without an event. With traffic the latency is that of 1 ms; idle it costs
0.06 % of a core instead of 3.5 %."""


class NixlError(Exception):
    """NIXL refused a call or lost a peer; the message is NIXL's own."""


class _FairLock:
    """A mutex that is handed over in the order of asking.

    `threading.Lock` lets its last owner take it again before a waiter wakes. Measured beside a worker that copies
    16 MiB chunks over CMA, a tiny chunk of another takes (p50, p99) 1.3 and 8 ms with this lock, 2.7 and 19 ms with
    `threading.Lock`, 2.0 and 27 ms with NIXL's mutex alone.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # a signal's: this turn is not taken
            self._pass_on(turn)
            raise

    def enter_now(self) -> bool:
        """As `__enter__` where no thread is inside or waits; otherwise False."""
        with self._guard:
            if self._held:
                return False
            self._held = True
            return True

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._held = False

    def _pass_on(self, turn: threading.Lock) -> None:
        with self._guard:
            if turn in self._waiting:
                self._waiting.remove(turn)
            else:
                self._hand_over()


class NixlAgent:
    """One NIXL agent with a UCX backend. All calls are safe from any thread and raise NixlError.

    Calls are serialised by a lock of our own on top of NIXL's (STRICT; without it, threads crash NIXL): some of NIXL's
    calls wait for its mutex with the GIL held, and a peer's copy would stop every thread of the process.

    Raises BackendUnavailableError when NIXL cannot be loaded or started.
    """

    def __init__(self, name: str, *, progress_thread: bool) -> None:
        self._nixl = _load()
        self._calling = _Calling(_error_types(self._nixl))
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = progress_thread
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _PROGRESS_DELAY_US
        config.captureTelemetry = False
        try:
            with self._calling:
                self._agent: Any = self._nixl.nixlAgent(name, config)
                self._backends: list[int] = [self._agent.createBackend("UCX", {})]
        except NixlError as error:
            raise BackendUnavailableError(f"NIXL cannot start its UCX backend: {error}") from error

    def register(self, blocks: Sequence[Block]) -> list[object]:
        """Register memory of host and devices; returns what `deregister` takes.

        One descriptor list of NIXL's holds one kind of memory. Of a list that NIXL refuses the others are undone.
        """
        lists: list[object] = []
        for on_device in (False, True):
            kind = [block for block in blocks if (block.device is not None) is on_device]
            if kind:
                try:
                    lists.append(self._register(on_device, kind))
                except NixlError:
                    self.deregister(lists)
                    raise
        return lists

    def _register(self, on_device: bool, blocks: Sequence[Block]) -> object:
        with self._calling:
            described = [(block.address, block.nbytes, block.device or 0, "") for block in blocks]
            listed = self._nixl.nixlRegDList(self._segment(on_device), described)
            self._agent.registerMem(listed, self._backends)
            return listed

    def deregister(self, registered: Sequence[object]) -> None:
        """Undo `register`."""
        for listed in registered:
            with self._calling:
                self._agent.deregisterMem(listed, self._backends)

    def metadata(self) -> bytes:
        """What a peer's `load_peer` needs; ask after `register`."""
        with self._calling:
            return bytes(self._agent.getLocalMD())

    def load_peer(self, metadata: bytes) -> str:
        """Get to know a peer; returns the name of its agent."""
        with self._calling:
            return bytes(self._agent.loadRemoteMD(metadata)).decode(errors="replace")

    def forget_peer(self, name: str) -> None:
        """Undo `load_peer`."""
        with self._calling:
            self._agent.invalidateRemoteMD(name)

    def prepare(self, peer: str | None, rows: Sequence[Row], device: int | None = None) -> int:
        """Handle of a descriptor list over all pieces of `rows`, numbered one after the other.

        peer: whose memory; None for ours. device: the one that holds it, None for host memory.
        """
        strided = np.array([(row.address, row.nbytes, device or 0, row.stride, row.pieces) for row in rows], np.int64)
        with self._calling:
            owner = self._nixl.NIXL_INIT_AGENT if peer is None else peer
            segment = self._segment(device is not None)
            return int(self._agent.prepXferDlist(owner, segment, strided, self._backends))

    def release_prepared(self, prepared: int) -> None:
        """Undo `prepare`."""
        with self._calling:
            self._agent.releasedDlistH(prepared)

    def make(self, local: int, local_items: NDArray[np.int32], remote: int, remote_items: NDArray[np.int32]) -> int:
        """Handle of a write from our items to the peer's, not yet started; neighbours on both sides merge."""
        with self._calling:
            return self._make(local, local_items, remote, remote_items)

    def _make(self, local: int, local_items: NDArray[np.int32], remote: int, remote_items: NDArray[np.int32]) -> int:
        write = self._nixl.NIXL_WRITE
        made = self._agent.makeXferReq(write, local, local_items, remote, remote_items, b"", self._backends, False)
        return int(made)

    def make_runs(self, runs: Runs, peer: str, devices: tuple[int | None, int | None] = (None, None)) -> int:
        """As `make`, between byte ranges of ours and the peer's, which are looked up in what was registered.

        devices: that hold ours and the peer's ranges, None for host memory.
        """
        lists = []
        for side, device in zip((runs.local, runs.remote), devices, strict=True):
            ranges = np.stack((side, runs.nbytes, np.full_like(side, device or 0)), axis=1).astype(np.uint64)
            lists.append((self._segment(device is not None), ranges))
        with self._calling:
            ours, theirs = (self._nixl.nixlXferDList(*described) for described in lists)
            write = self._nixl.NIXL_WRITE
            return int(self._agent.createXferReq(write, ours, theirs, peer, b"", self._backends))

    def _segment(self, on_device: bool) -> object:
        return self._nixl.VRAM_SEG if on_device else self._nixl.DRAM_SEG

    def start(self, transfer: int) -> bool:
        """Start it; whether it is over already (over CMA it always is: the copy is made in here)."""
        with self._calling:
            return self._over(self._agent.postXferReq(transfer))

    def start_now(
        self, local: int, local_items: NDArray[np.int32], remote: int, remote_items: NDArray[np.int32]
    ) -> tuple[int, bool, str] | None:
        """`make` and `start` in one, or None while another thread is in a call.

        Returns the transfer's handle, whether it is over already, and why it failed, if it did at the start. A handle
        of one that is over or failed is freed, and then 0: `release` would wait for threads that asked meanwhile.
        """
        if not self._calling.enter_now():
            return None
        with self._calling.entered:
            made = self._make(local, local_items, remote, remote_items)
            over, failure = False, ""
            try:
                over = self._over(self._agent.postXferReq(made))
            except Exception as error:  # noqa: BLE001 - NIXL's share no base; the caller gets it with the handle
                failure = f"{type(error).__name__}: {error}"
            if over or failure:
                try:
                    self._agent.releaseXferReq(made)
                except Exception as error:  # noqa: BLE001 - as above; the transfer has begun all the same
                    _log.warning("NIXL keeps a transfer handle: %s", error)
                else:
                    made = 0
            return made, over, failure

    def over(self, transfer: int) -> bool:
        """Move what can be moved without waiting; whether the transfer has ended well."""
        with self._calling:
            return self._over(self._agent.getXferStatus(transfer))

    def release(self, transfer: int) -> None:
        """Free a transfer's handle; cancels nothing."""
        with self._calling:
            self._agent.releaseXferReq(transfer)

    def close(self) -> None:
        """End the agent, its thread and its connections; no call may follow."""
        with self._calling:
            self._agent = None

    def _over(self, status: object) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise NixlError(f"transfer ended with {status}")


class _Calling:
    """Around each call of NIXL's: one at a time, and every error of NIXL's as NixlError. No generator: it is hot."""

    def __init__(self, errors: tuple[type[Exception], ...]) -> None:
        self._lock = _FairLock()
        self._errors = errors
        self.entered = _Entered(self)

    def enter_now(self) -> bool:
        """Enter where that needs no waiting, to go on with `entered`; otherwise False."""
        return self._lock.enter_now()

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._lock.__exit__()
        if isinstance(error, self._errors):
            raise NixlError(f"{type(error).__name__}: {error}") from error


class _Entered:
    """The rest of a `_Calling` that was entered by `enter_now`."""

    def __init__(self, calling: _Calling) -> None:
        self._calling = calling

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._calling.__exit__(kind, error, trace)


@contextmanager
def _logging_as_it_is() -> Iterator[None]:
    """nixl_cu12 configures logging when it is imported, and that closes every handler of the process, the backend's."""
    configure = logging.config.dictConfig
    logging.config.dictConfig = lambda config: None  # noqa: ARG005 - called by its name
    try:
        yield
    finally:
        logging.config.dictConfig = configure


def _load() -> ModuleType:
    if not any(Path(device).exists() for device in _GPUS):
        os.environ.setdefault(_EMULATION, "n")
    if "UCX_MODULES" not in os.environ and not Path("/dev/infiniband").exists():
        # UCX's InfiniBand module crashes the interpreter at exit, and is of no use here.
        os.environ["UCX_MODULES"] = "^ib"
        _log.debug("no InfiniBand device: UCX_MODULES set to ^ib")
    failures = []
    for package in _candidates():
        try:
            with _logging_as_it_is():
                return importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            failures.append(f"{package}: {error}")
    raise BackendUnavailableError(
        f"NIXL cannot be imported ({'; '.join(failures)}); install it from PyPI without its dependencies, which "
        "ask for torch: `pip install --no-deps nixl-cu12==1.5.1`, or nixl-cu13 where the engine uses CUDA 13"
    )


def _candidates() -> tuple[str, ...]:
    """Packages to try, in order. Bindings of a second package cannot be loaded beside those of the first."""
    loaded = tuple(name for name in PACKAGES if sys.modules.get(f"{name}._bindings") is not None)
    if loaded:
        return loaded[:1]
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    wanted = f"nixl_cu{str(cuda).partition('.')[0]}"
    return tuple(sorted(PACKAGES, key=lambda name: name != wanted))


def _error_types(module: ModuleType) -> tuple[type[Exception], ...]:
    """NIXL's exceptions, which share no base class of their own."""
    return tuple(kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Exception))

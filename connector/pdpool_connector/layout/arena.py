"""Host memory that another process of the same user on the same host can map.

The bytes live in a memfd. A peer opens `/proc/<pid>/fd/<fd>` of the owner: that needs no root, no thread that serves
descriptors, and leaves nothing behind when the owner is killed. It needs the same user and the same PID namespace; both
are checked and named when they differ. The size is sealed, so that a mapping can never fault on a truncated file.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from .process import boot_id, has_ended, pid_namespace
from .regions import LayoutError, Region

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ArenaLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where another process finds a `HostArena`, and how it recognises it.

    address and nbytes are the owner's mapping. token is random and part of the memfd's name, so a reused pid or
    descriptor number is never mistaken for the arena. uid, boot_id and pid_namespace limit which processes can map it.
    """

    pid: int
    fd: int
    token: str
    address: int
    nbytes: int
    uid: int
    boot_id: str
    pid_namespace: str


class ArenaError(Exception):
    """An arena cannot be mapped: its owner has ended, is out of reach, or does not match its description."""


_live: weakref.WeakSet[HostArena] = weakref.WeakSet()
_live_lock = threading.Lock()


class HostArena:
    """`nbytes` bytes of zeroed, page-aligned host memory in a sealed memfd.

    Thread-safe after construction. `close()` or leaving the `with` block gives up the arena. The memory itself is
    freed with its last numpy view, so a view never dangles.

    Raises:
        LayoutError: The size is below 1.
        OSError: The kernel refuses the memory.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise LayoutError(f"arena size is {nbytes} bytes, must be at least 1")
        self.nbytes = nbytes
        self._token = secrets.token_hex(16)
        self._fd = os.memfd_create(_memfd_name(self._token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._release = weakref.finalize(self, os.close, self._fd)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._bytes: NDArray[np.uint8] | None = np.frombuffer(mmap.mmap(self._fd, nbytes), np.uint8)
        except BaseException:
            self._release()
            raise
        self.address: int = self._bytes.ctypes.data
        with _live_lock:
            _live.add(self)

    def array(self, offset: int, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """A writable view of the arena: `shape` elements of `dtype`, starting `offset` bytes into it.

        Raises LayoutError when it would leave the arena or `offset` is not aligned to the element size.
        """
        kind = np.dtype(dtype)
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        if offset % kind.alignment:
            raise LayoutError(f"offset is {offset}, must be a multiple of {kind.alignment} for {kind.name}")
        length = math.prod(dims) * kind.itemsize
        return self._slice(offset, length).view(kind).reshape(dims)

    def region(self, offset: int, item_bytes: int, items: int) -> Region:
        """The `Region` of `items` items of `item_bytes` bytes, starting `offset` bytes into the arena.

        Raises LayoutError when it would leave the arena.
        """
        self._slice(offset, item_bytes * items)
        return Region(self.address + offset, item_bytes, items)

    def location(self) -> ArenaLocation:
        """What another process needs for `MappedArena`. Raises LayoutError after `close()`."""
        if self._bytes is None:
            raise LayoutError("the arena is closed")
        return ArenaLocation(
            pid=os.getpid(),
            fd=self._fd,
            token=self._token,
            address=self.address,
            nbytes=self.nbytes,
            uid=os.geteuid(),
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
        )

    def close(self) -> None:
        """Give up the arena: no new mapping or view of it can be made. Idempotent."""
        with _live_lock:
            _live.discard(self)
        self._bytes = None
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _slice(self, offset: int, length: int) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise LayoutError("the arena is closed")
        if offset < 0 or length < 1 or offset + length > self.nbytes:
            raise LayoutError(f"bytes {offset}..{offset + length} are not within the arena's 0..{self.nbytes}")
        return self._bytes[offset : offset + length]


def find_arena(region: Region) -> HostArena | None:
    """The live arena of this process that holds all of `region`, or None: memory that no peer can map."""
    with _live_lock:
        arenas = list(_live)
    for arena in arenas:
        if arena.address <= region.address and region.end <= arena.address + arena.nbytes:
            return arena
    return None


class MappedArena:
    """A peer's arena mapped into this process, readable and writable, and a watch over the peer's life.

    `view` is the whole arena as uint8; `address` is where the owner has it, so that byte `a - address` of the view is
    what the owner sees at address `a`. The mapping outlives its owner: writing into it is always safe, and after the
    owner's death merely futile. Raises ArenaError, with the reason, when the arena cannot be mapped. Not thread-safe.
    """

    def __init__(self, location: ArenaLocation) -> None:
        _refuse_unreachable(location)
        self.address = location.address
        self.nbytes = location.nbytes
        try:
            self._pidfd = os.pidfd_open(location.pid)
        except (OSError, ValueError, OverflowError) as error:
            raise ArenaError(f"the arena's owner, process {location.pid}, is not running: {error}") from error
        self._release = weakref.finalize(self, os.close, self._pidfd)
        # First the pidfd: then the mapping is of the process that the pidfd watches, or it fails.
        try:
            self.view: NDArray[np.uint8] = _map(location)
        except BaseException:
            self._release()
            raise

    def owner_alive(self) -> bool:
        """Whether the owning process still runs; a stopped process does."""
        return not has_ended(self._pidfd)

    def close(self) -> None:
        """Give up the mapping; it ends with its last view. Idempotent; the other methods fail after it."""
        self.view = np.empty(0, np.uint8)
        self._release()


def _refuse_unreachable(location: ArenaLocation) -> None:
    mine = {"boot_id": boot_id(), "pid_namespace": pid_namespace(), "uid": os.geteuid()}
    hints = {
        "boot_id": "the peer is on another host",
        "pid_namespace": "the peer is in another container or pod",
        "uid": "the peer runs as another user",
    }
    for field, here in mine.items():
        there = getattr(location, field)
        if there != here:
            raise ArenaError(f"{field} is {there!r}, must be {here!r} to share memory: {hints[field]}")


def _map(location: ArenaLocation) -> NDArray[np.uint8]:
    path = f"/proc/{location.pid}/fd/{location.fd}"
    try:
        # The name is read before opening, for opening what the descriptor may be by now can have effects of its own.
        _refuse_stranger(path, path, location.token)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ArenaError(f"cannot open the arena at {path}: {error.strerror}") from error
    try:
        _refuse_stranger(f"/proc/self/fd/{fd}", path, location.token)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if seals & fcntl.F_SEAL_SHRINK == 0:
            raise ArenaError(f"{path} has seals {seals:#x}, must have F_SEAL_SHRINK: it could shrink under a write")
        size = os.fstat(fd).st_size
        if size != location.nbytes:
            raise ArenaError(f"{path} has {size} bytes, must have {location.nbytes}")
        return np.frombuffer(mmap.mmap(fd, size), np.uint8)
    finally:
        os.close(fd)


def _refuse_stranger(link: str, path: str, token: str) -> None:
    expected = f"/memfd:{_memfd_name(token)} (deleted)"
    found = str(Path(link).readlink())
    if found != expected:
        raise ArenaError(f"{path} is {found!r}, must be {expected!r}: the owner has ended or gave up the arena")


def _memfd_name(token: str) -> str:
    return f"pdpool-{token}"

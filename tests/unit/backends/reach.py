"""How a stand-in for a package reaches the memory of another process, or of its own by the same way.

A stand-in keeps the ranges that it has registered in a page of its own memory. Others read that page before they move
anything. So memory that is not registered is refused, and a stand-in that has ended is noticed.
"""

import ctypes
import mmap
import os
from contextlib import contextmanager

import msgspec
import numpy as np
from pdpool_connector.layout.process import started_at

_PR_SET_PTRACER = 0x59616D61
_ANYBODY = ctypes.c_ulong(-1)


class LostError(Exception):
    """What should be reached is not there, or not registered: nothing more is moved."""


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """A stand-in: its process, its start (another process may get the same number), and its page."""

    pid: int
    started: int
    page: int


class Registered:
    """The ranges that a backend lets others reach: (first address, bytes), zeros where there is none."""

    def __init__(self):
        self._rows = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64).reshape(-1, 2)
        # Where Yama guards processes, one may reach into another's memory only if that lets it. Elsewhere: an error.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)
        self.owner = Owner(os.getpid(), started_at(os.getpid()), self._rows.ctypes.data)

    def tell(self, ranges):
        assert len(ranges) <= len(self._rows)
        self._rows[:] = 0
        if ranges:
            self._rows[: len(ranges)] = ranges


class Reach:
    """A way into the memory that the backend of `owner` has registered. Raises LostError, as all its methods do.

    The descriptor stays with that process' memory: once it has ended there is nothing to read or write, whoever got its
    number.
    """

    def __init__(self, owner):
        self._page = owner.page
        with _lost(f"process {owner.pid}"):
            self._memory = os.open(f"/proc/{owner.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        if not _is(owner):
            self.close()
            raise LostError(f"process {owner.pid} has ended")

    def close(self):
        os.close(self._memory)

    def registered(self):
        """The ranges that may be reached now: (first address, bytes)."""
        rows = np.frombuffer(self._read(self._page, mmap.PAGESIZE), np.int64).reshape(-1, 2)
        return [(first, nbytes) for first, nbytes in rows.tolist() if nbytes]

    def write(self, target, source, nbytes):
        """From address `source` of this process to `target` of the other."""
        with _lost(target):
            moved = os.pwrite(self._memory, ctypes.string_at(source, nbytes), target)
        _refuse_part(moved, nbytes, target)

    def _read(self, source, nbytes):
        with _lost(source):
            data = os.pread(self._memory, nbytes, source)
        _refuse_part(len(data), nbytes, source)
        return data


def _is(owner):
    try:
        return started_at(owner.pid) == owner.started
    except OSError:
        return False


@contextmanager
def _lost(place):
    try:
        yield
    except OSError as error:
        raise LostError(f"{place if isinstance(place, str) else hex(place)}: {error}") from error


def _refuse_part(moved, nbytes, address):
    if moved != nbytes:
        raise LostError(f"{address:#x}: {moved} of {nbytes} bytes, for the process has ended")


def within(ranges, first, nbytes):
    """Refuse what is not within one of the ranges."""
    if nbytes < 1 or not any(start <= first and first + nbytes <= start + length for start, length in ranges):
        raise LostError(f"{nbytes} bytes at {first:#x} are not registered")

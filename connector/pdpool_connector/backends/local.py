"""The transfer backend of one host: copies into the peer's memory, which both processes map.

Both memories must lie in a `HostArena`, and both processes must share user, PID namespace and host. The calling thread
copies, so a transfer is over when `submit` returns and every outcome is settled.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdpool_connector.layout.arena import ArenaError, ArenaLocation, HostArena, MappedArena, find_arena
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import KVMemory, RemoteMemory
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.regions import Region

from .base import (
    BackendError,
    BackendUnavailableError,
    Finished,
    Handle,
    IncompatiblePeerError,
    PeerUnreachableError,
    Poll,
    UnknownPeerError,
)
from .validation import plan_pair, refuse_invalid

_IOV_MAX: Final = 1024
"""Linux' bound on the vectors of one call (limits.h UIO_MAXIOV)."""

_process_vm_writev = ctypes.CDLL(None, use_errno=True).process_vm_writev
_process_vm_writev.restype = ctypes.c_ssize_t
_process_vm_writev.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def _copy(source: NDArray[np.int64], target: NDArray[np.int64], nbytes: NDArray[np.int64]) -> None:
    """Copy `nbytes[i]` bytes from address `source[i]` to `target[i]`, both in this process.

    Raises OSError when the kernel finds an address that is not mapped.

    One call of process_vm_writev on ourselves rather than a memcpy for each run: the GIL is given up once, not a
    thousand times, and a bad address is an error instead of a crash.
    """
    vectors = np.empty((2, len(nbytes), 2), np.uint64)
    vectors[0, :, 0] = source
    vectors[1, :, 0] = target
    vectors[:, :, 1] = nbytes
    for start in range(0, len(nbytes), _IOV_MAX):
        count = min(_IOV_MAX, len(nbytes) - start)
        sources, targets = (vectors[side, start:].ctypes.data for side in (0, 1))
        copied = _process_vm_writev(os.getpid(), sources, count, targets, count, 0)
        if copied < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        expected = int(nbytes[start : start + count].sum())
        if copied != expected:
            raise OSError(f"copied {copied} of {expected} bytes: an address is not mapped")


@dataclass(frozen=True, slots=True)
class _Peer:
    plan: PairPlan
    arena: MappedArena
    shift: int
    """Added to an address of the peer's to get ours."""


class LocalBackend:
    """`TransferBackend` over shared memory."""

    name = "local"
    stages = True

    def __init__(self) -> None:
        self._memory: KVMemory | None = None
        self._arena: HostArena | None = None
        self._peers: dict[str, _Peer] = {}

    def register(self, memory: KVMemory, staging: Region | None = None) -> bytes:
        """As `TransferBackend.register`; all regions of `memory` must lie in one `HostArena`."""
        del staging  # this process reads it itself
        if self._memory is not None:
            raise BackendError("memory is registered already")
        arena = find_arena(memory.kv[0])
        for name, regions in _named_regions(memory):
            for index, region in enumerate(regions):
                if region.device is not None:
                    raise BackendError(
                        f"{name} region {index} lies on device {region.device}, must lie in host memory: use the "
                        "backend nixl for memory of a device"
                    )
                if arena is None or find_arena(region) is not arena:
                    raise BackendError(
                        f"{name} region {index} at {region.address:#x} is not in the HostArena that holds all others"
                        if arena is not None
                        else f"{name} region {index} at {region.address:#x} is not in a HostArena"
                    )
        assert arena is not None
        _probe()
        descriptor = msgspec.msgpack.encode(arena.location())
        self._memory, self._arena = memory, arena
        return descriptor

    def connect(self, peer: str, remote: RemoteMemory) -> None:
        """As `TransferBackend.connect`; the connection is a mapping, so there is nothing to warm up."""
        plan, location = plan_pair(self.name, self._memory, self._peers, peer, remote, ArenaLocation)
        for region in remote.memory.regions:
            if region.device is not None:
                raise IncompatiblePeerError(f"the peer's memory lies on device {region.device}, must be host memory")
            if region.address < location.address or region.end > location.address + location.nbytes:
                raise IncompatiblePeerError(
                    f"region {region.address:#x}..{region.end:#x} is outside the peer's arena at "
                    f"{location.address:#x} with {location.nbytes} bytes"
                )
        try:
            arena = MappedArena(location)
        except ArenaError as error:
            raise PeerUnreachableError(str(error)) from error
        self._peers[peer] = _Peer(plan, arena, arena.view.ctypes.data - arena.address)

    def submit(self, peer: str, chunk: Chunk) -> Handle:
        """As `TransferBackend.submit`; copies before it returns."""
        state = self._peers.get(peer)
        if state is None:
            raise UnknownPeerError(f"peer {peer} is not connected")
        refuse_invalid(state.plan, chunk)
        runs = state.plan.runs(chunk)
        try:
            _copy(runs.local, runs.remote + state.shift, runs.nbytes)
        except OSError as error:
            return Finished(Poll.FAILED_SETTLED, f"copy failed: {error}")
        # After the copy: a peer that died before the last byte must not be reported as done.
        if not state.arena.owner_alive():
            return Finished(Poll.FAILED_SETTLED, "the peer's process has exited")
        return Finished(Poll.DONE)

    def submit_at_once(self, peer: str, chunk: Chunk) -> Handle:
        """As `PromptBackend.submit_at_once`; a copy within this process waits for nothing."""
        return self.submit(peer, chunk)

    def poll(self, handle: Handle) -> Poll:
        """As `TransferBackend.poll`; never PENDING."""
        assert isinstance(handle, Finished)
        return handle.outcome

    def transport(self, peer: str) -> str:
        """As `TransferBackend.transport`: "memory", which is certain."""
        return "memory" if peer in self._peers else ""

    def disconnect(self, peer: str) -> None:
        """As `TransferBackend.disconnect`."""
        if (state := self._peers.pop(peer, None)) is not None:
            state.arena.close()

    def close(self) -> None:
        """As `TransferBackend.close`; the arena stays its owner's."""
        for peer in list(self._peers):
            self.disconnect(peer)
        self._memory = self._arena = None


def _named_regions(memory: KVMemory) -> list[tuple[str, tuple[Region, ...]]]:
    states = [(f"state pool {pool.name!r}", pool.regions) for pool in memory.state]
    return [("kv", memory.kv), *states, ("aux", memory.aux)]


def _probe() -> None:
    """Raise BackendUnavailableError where a sandbox forbids the system call that copies."""
    pair = np.array([1, 0], np.uint8)
    address = np.array([pair.ctypes.data], np.int64)
    try:
        _copy(address, address + 1, np.array([1], np.int64))
    except OSError as error:
        raise BackendUnavailableError(
            f"process_vm_writev does not work here (seccomp?), use the backend nixl: {error}"
        ) from error

"""The transfer backend of AMD GPUs, over MORI-IO (RDMA). Written against amd-mori 1.2.4; not yet run on hardware.

Facts from its package, its source and SGLang's use of it that shape this module:

- A transfer names registered memories and offsets into them, not addresses. A batch has one status for each pair of
  memories.
- A status is written to by MORI's own threads until it has ended, so it must outlive its transfer.
- Nothing cancels a transfer, and a failure does not say that the NIC is done with the rest: it is unsettled.
- Completions are polled by a spinning thread unless the backend is set to wait for events.
"""

from __future__ import annotations

import importlib
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import KVMemory, RemoteMemory
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.pool import Runs
from pdpool_connector.layout.regions import Block, Region
from pdpool_connector.protocol.timeouts import DEFAULTS, Timeouts

from .base import (
    BackendError,
    BackendUnavailableError,
    Handle,
    IncompatiblePeerError,
    PeerUnreachableError,
    Poll,
)
from .polling import pause, sharpen_sleeps
from .validation import admit, plan_pair

_SHORTEST_SLEEP_S: Final = 5e-6
"""A small transfer over RDMA takes a few microseconds."""
_CPU: Final = -1


class _Descriptor(msgspec.Struct, frozen=True):
    """What peers get from `register`: MORI's descriptions of the backend and of each block, the scratch line last."""

    backend: bytes
    memories: tuple[bytes, ...]
    scratch: Region


class _Memories:
    """Registered memories in the order of their addresses, to find the one that a range lies in.

    GPUs of one process have one address space (HIP's unified addressing), so addresses of devices do not collide.
    """

    def __init__(self, blocks: Sequence[Block], native: Sequence[Any]) -> None:
        order = sorted(range(len(blocks)), key=lambda index: blocks[index].address)
        self.native = [native[index] for index in order]
        self.first = np.array([blocks[index].address for index in order], np.int64)


@dataclass(slots=True, eq=False)
class _Peer:
    plan: PairPlan
    backend: Any
    memories: _Memories
    progress_at: float
    open: set[_Transfer] = field(default_factory=set)
    broken: str = ""


@dataclass(slots=True, eq=False)
class _Transfer:
    peer: _Peer
    statuses: list[Any]
    """MORI's, of the pairs of memories that have not ended."""
    outcome: Poll = Poll.PENDING
    failure: str = ""


class MoriBackend:
    """`TransferBackend` over MORI-IO.

    Args:
        incarnation: ours; peers know our backend by it.
        host: address at which peers reach this process.
        timeouts: bounds of `connect`, and the like.

    Raises:
        BackendUnavailableError: the package or an RDMA device is missing.
    """

    name = "mori"
    stages = False

    def __init__(self, incarnation: str, *, host: str, timeouts: Timeouts = DEFAULTS) -> None:
        self._io = _load()
        self._timeouts = timeouts
        self._native: Any = self._io.IOEngine(incarnation, self._io.IOEngineConfig(host=host, port=0))
        config = self._io.RdmaBackendConfig(poll_cq_mode=self._io.PollCqMode.EVENT, enable_notification=False)
        self._native.create_backend(self._io.BackendType.RDMA, config)
        page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self._page = page
        self._scratch = Region(page.ctypes.data, 64, 1)
        self._memory: KVMemory | None = None
        self._memories = _Memories((), ())
        self._peers: dict[str, _Peer] = {}
        self._unsettled: list[Any] = []
        self._closed = False

    def register(self, memory: KVMemory, staging: Region | None = None) -> bytes:
        """As `TransferBackend.register`."""
        assert staging is None
        if self._closed or self._memory is not None:
            raise BackendError("the backend is closed" if self._closed else "memory is registered already")
        place = self._io.MemoryLocationType
        blocks = (*memory.blocks, _block(self._scratch))
        native: list[Any] = []
        try:
            for block in blocks:
                where = (_CPU, place.CPU) if block.device is None else (block.device, place.GPU)
                native.append(self._native.register_memory(block.address, block.nbytes, *where))
        except Exception as error:
            for each in native:
                self._native.deregister_memory(each)
            raise BackendError(f"MORI cannot register the memory: {error}") from error
        self._memory, self._memories = memory, _Memories(blocks, native)
        packed = tuple(each.pack() for each in native)
        return msgspec.msgpack.encode(_Descriptor(self._native.get_engine_desc().pack(), packed, self._scratch))

    def connect(self, peer: str, remote: RemoteMemory) -> None:
        """As `TransferBackend.connect`; makes the calling thread's sleeps precise."""
        plan, descriptor = plan_pair(self.name, self._memory, self._peers, peer, remote, _Descriptor)
        backend, memories = self._unpack(peer, (*remote.memory.blocks, _block(descriptor.scratch)), descriptor)
        sharpen_sleeps()
        try:
            self._native.register_remote_engine(backend)
        except Exception as error:
            raise PeerUnreachableError(f"MORI cannot reach peer {peer}: {error}") from error
        self._peers[peer] = _Peer(plan, backend, memories, time.monotonic())
        try:
            self._warm_up(peer, descriptor.scratch.address)
        except BackendError:
            self.disconnect(peer)
            raise

    def submit(self, peer: str, chunk: Chunk) -> Handle:
        """As `TransferBackend.submit`."""
        state = admit(self._peers, peer, chunk)
        return self._start(state, state.plan.runs(chunk))

    def poll(self, handle: Handle) -> Poll:
        """As `TransferBackend.poll`; sleeps 2 ms at most."""
        assert isinstance(handle, _Transfer)
        if handle.outcome is Poll.PENDING:
            self._advance(handle)
        if handle.outcome is Poll.PENDING:
            time.sleep(pause(time.monotonic() - handle.peer.progress_at, _SHORTEST_SLEEP_S))
        return handle.outcome

    def transport(self, peer: str) -> str:
        """As `TransferBackend.transport`: "rdma", the only one that this backend opens."""
        return "rdma" if peer in self._peers else ""

    def disconnect(self, peer: str) -> None:
        """As `TransferBackend.disconnect`."""
        state = self._peers.pop(peer, None)
        if state is None:
            return
        for transfer in list(state.open):
            self._fail(transfer, "disconnected while in flight")
        self._native.deregister_remote_engine(state.backend)

    def close(self) -> None:
        """As `TransferBackend.close`."""
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers):
            self.disconnect(peer)
        try:
            for native in self._memories.native:
                self._native.deregister_memory(native)
        except Exception as error:
            raise BackendError(f"MORI cannot deregister the memory: {error}") from error
        finally:
            self._memory = self._native = None
            # Only now have MORI's threads ended, which write to the statuses of what did not settle.
            self._unsettled.clear()

    def _unpack(self, peer: str, blocks: Sequence[Block], descriptor: _Descriptor) -> tuple[Any, _Memories]:
        try:
            backend = self._io.EngineDesc.unpack(descriptor.backend)
            native = [self._io.MemoryDesc.unpack(packed) for packed in descriptor.memories]
        except Exception as error:
            raise IncompatiblePeerError(f"the peer's descriptor is not one of MORI's: {error}") from error
        if backend.key != peer:
            raise IncompatiblePeerError(f"the descriptor is of backend {backend.key!r}, must be of peer {peer!r}")
        found = [(each.engine_key, each.data, each.size) for each in native]
        if found != [(peer, block.address, block.nbytes) for block in blocks]:
            raise IncompatiblePeerError("the memories that the peer registered are not those of its geometry")
        return backend, _Memories(blocks, native)

    def _warm_up(self, peer: str, scratch: int) -> None:
        line = np.array([self._scratch.nbytes], np.int64)
        ours, theirs = (np.array([address], np.int64) for address in (self._scratch.address, scratch))
        deadline = time.monotonic() + self._timeouts.backend_connect_s
        transfer = self._start(self._peers[peer], Runs(ours, theirs, line))
        while (outcome := self.poll(transfer)) is Poll.PENDING:
            if time.monotonic() > deadline:
                raise PeerUnreachableError(f"peer {peer} did not answer within {self._timeouts.backend_connect_s} s")
        if outcome is not Poll.DONE:
            raise PeerUnreachableError(f"the warm-up transfer to peer {peer} failed: {transfer.failure}")

    def _start(self, peer: _Peer, runs: Runs) -> _Transfer:
        transfer = _Transfer(peer, [])
        if not len(runs.nbytes):
            transfer.outcome = Poll.DONE
            return transfer
        peer.open.add(transfer)
        peer.progress_at = time.monotonic()
        locals_, local_offsets, remotes, remote_offsets, sizes = _by_memory(self._memories, peer.memories, runs)
        try:
            ids = [self._native.allocate_transfer_uid() for _ in sizes]
            given = (locals_, local_offsets, remotes, remote_offsets, sizes, ids)
            transfer.statuses = list(self._native.batch_write(*given))
        except Exception as error:  # noqa: BLE001 - any error of the binding may leave bytes under way
            self._fail(transfer, f"{type(error).__name__}: {error}")
        return transfer

    def _advance(self, transfer: _Transfer) -> None:
        running = []
        for status in transfer.statuses:
            if status.Failed():
                self._fail(transfer, status.Message() or "MORI reports a failed transfer without a reason")
                return
            if not status.Succeeded():
                running.append(status)
        if len(running) < len(transfer.statuses):
            transfer.peer.progress_at = time.monotonic()
        transfer.statuses = running
        if not running:
            transfer.outcome = Poll.DONE
            transfer.peer.open.discard(transfer)

    def _fail(self, transfer: _Transfer, why: str) -> None:
        transfer.peer.broken = transfer.peer.broken or why
        transfer.peer.open.discard(transfer)
        transfer.outcome, transfer.failure = Poll.FAILED_UNSETTLED, why
        self._unsettled += transfer.statuses
        transfer.statuses = []


def _block(region: Region) -> Block:
    return Block(region.address, region.nbytes, region.device)


def _by_memory(
    ours: _Memories, theirs: _Memories, runs: Runs
) -> tuple[list[Any], list[list[int]], list[Any], list[list[int]], list[list[int]]]:
    """Ranges sorted by the pair of memories they lie in, as MORI's batch calls take them."""
    local = np.searchsorted(ours.first, runs.local, side="right") - 1
    remote = np.searchsorted(theirs.first, runs.remote, side="right") - 1
    order = np.lexsort((remote, local))
    local, remote = local[order], remote[order]
    cuts = np.flatnonzero((np.diff(local) != 0) | (np.diff(remote) != 0)) + 1

    def split(values: np.typing.NDArray[np.int64]) -> list[list[int]]:
        return [part.tolist() for part in np.split(values, cuts)]

    firsts = np.concatenate(([0], cuts))
    return (
        [ours.native[index] for index in local[firsts]],
        split(runs.local[order] - ours.first[local]),
        [theirs.native[index] for index in remote[firsts]],
        split(runs.remote[order] - theirs.first[remote]),
        split(runs.nbytes[order]),
    )


def _load() -> Any:  # noqa: ANN401 - a package without types
    try:
        module = importlib.import_module("mori.io")
    except (ImportError, OSError) as error:
        raise BackendUnavailableError(
            f"MORI cannot be imported ({error}); install it from PyPI with `pip install amd-mori==1.2.4` on a host "
            "with ROCm, beside torch for ROCm"
        ) from error
    if not _rdma_devices():
        raise BackendUnavailableError("this host has no RDMA device (/sys/class/infiniband), and MORI needs one")
    return module


def _rdma_devices() -> list[str]:
    """Names of the host's RDMA devices."""
    folder = Path("/sys/class/infiniband")
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

"""Mooncake's TransferEngine as this project uses it: loaded lazily, typed, its limits raised, its log kept short.

Written against `mooncake-transfer-engine-non-cuda` 0.3.13.post1. Metadata go from peer to peer (P2PHANDSHAKE),
without a server. Memory of a GPU needs `mooncake-transfer-engine`, which is built with CUDA and has the same interface.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import ipaddress
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdpool_connector.layout.regions import Block

from .base import BackendError, BackendUnavailableError
from .memlock import memlock_hint

WITHOUT_CUDA: Final = "mooncake-transfer-engine-non-cuda"
WITH_CUDA: Final = "mooncake-transfer-engine"
VERSION: Final = "0.3.13.post1"
ANYWHERE: Final = "*"
"""Mooncake's name for a place that it finds out itself."""

_ENVIRONMENT: Final = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
    "MC_LOG_LEVEL": "ERROR",
}
"""Set unless the user set them. With the limits at their defaults a full queue fails transfers and can stop Mooncake
for good; at its default level Mooncake writes a line for every batch to stderr."""

Addresses = NDArray[np.int64]


class MooncakeSession:
    """One TransferEngine of Mooncake. Safe to call from many threads.

    Args:
        host: address at which peers reach this process, a name or an IPv4 or IPv6 literal.

    Raises:
        BackendUnavailableError: Mooncake cannot be loaded or started.
    """

    def __init__(self, host: str) -> None:
        _prepare(host)
        self._native: Any = _load().TransferEngine()
        # Mooncake chooses RDMA by itself where it finds a NIC; this only names an allocator that is not used here.
        protocol = "rdma" if Path("/dev/infiniband").exists() else "tcp"
        if self._native.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise BackendUnavailableError(f"Mooncake cannot listen as {host}; its reason is on stderr")
        self.name = f"{_bracketed(host)}:{self._native.get_rpc_port()}"
        self.batch_timeout_s = _batch_timeout()
        """How long `finish` waits at most, and 1 s more for each GB (Mooncake's own rule)."""

        self.transport = _transport(self._native)
        """"tcp" or "rdma"; "" where Mooncake's topology cannot be read."""

    def register(self, blocks: Sequence[Block]) -> None:
        """Let peers read and write these blocks.

        Raises:
            BackendError: Mooncake refuses a block, or it lies on a GPU and Mooncake is built without CUDA.
        """
        for device in sorted({block.device for block in blocks}, key=str):
            some = [block for block in blocks if block.device == device]
            place = ANYWHERE if device is None else f"cuda:{device}"
            if device is not None and _installed(WITHOUT_CUDA):
                raise BackendError(
                    f"memory lies on device {device} and {WITHOUT_CUDA} is installed, which cannot reach a GPU: "
                    f"`pip install {WITH_CUDA}=={VERSION}` from PyPI instead"
                )
            lists = [block.address for block in some], [block.nbytes for block in some]
            if self._native.batch_register_memory(*lists, place) != 0:
                raise BackendError(f"Mooncake cannot register the memory; its reason is on stderr{memlock_hint(some)}")

    def deregister(self, addresses: Sequence[int]) -> None:
        """Undo `register`. Raises BackendError."""
        if self._native.batch_unregister_memory(list(addresses)) != 0:
            raise BackendError("Mooncake cannot deregister the memory; its reason is on stderr")

    def start(self, peer: str, local: Addresses, remote: Addresses, nbytes: Addresses, *, read: bool = False) -> int:
        """Start one batch of writes, or of reads; its id, or 0 when Mooncake refuses it.

        The first one to a peer asks it for its memory, for up to 60 s, and holds a lock that all transfers need.
        """
        call = self._native.batch_transfer_async_read if read else self._native.batch_transfer_async_write
        return int(call(peer, local.tolist(), remote.tolist(), nbytes.tolist()))

    def over(self, single: int) -> bool | None:
        """Whether a batch of one transfer has ended well (True) or badly (False); None while it runs.

        Once it has ended its id is free: never ask again. Never for a batch of several, which Mooncake misjudges here.
        """
        status = self._native.transfer_check_status(single)
        return None if status == 0 else bool(status == 1)

    def finish(self, batch: int) -> bool:
        """Wait for a batch and free its id, ended or not; whether all of it has ended well.

        Spins on a core until then: call it when next to nothing is left to wait for.
        """
        return bool(self._native.get_batch_transfer_status([batch]) == 0)

    def close(self) -> None:
        """End the TransferEngine, its threads and connections; no call may follow."""
        self._native = None


def _prepare(host: str) -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        if ipaddress.ip_address(host).version == 6:
            os.environ.setdefault("MC_USE_IPV6", "1")
    except ValueError:
        return  # a name: users of names with IPv6 set MC_USE_IPV6


def _batch_timeout() -> int:
    text = os.environ.get("MC_TRANSFER_TIMEOUT", "30")
    try:
        return max(5, int(text))
    except ValueError:
        raise BackendUnavailableError(f"MC_TRANSFER_TIMEOUT is {text!r}, must be a whole number of seconds") from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _transport(native: Any) -> str:  # noqa: ANN401 - a package without types
    """The protocol that Mooncake chose at start: RDMA where its topology has a NIC and MC_FORCE_TCP is not set."""
    if os.environ.get("MC_FORCE_TCP"):
        return "tcp"
    try:
        topology = json.loads(native.get_local_topology())
        return "rdma" if any(nic for places in topology.values() for nics in places for nic in nics) else "tcp"
    except (ValueError, AttributeError, TypeError):
        return ""


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _load() -> ModuleType:
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise BackendUnavailableError(
            f"Mooncake cannot be imported ({error}); install it from PyPI with `pip install {WITHOUT_CUDA}=={VERSION}` "
            f"({WITH_CUDA} for memory of a GPU); it needs the system's libibverbs (Debian: libibverbs1)"
        ) from error

"""The transfer backend of Ascend NPUs, over memfabric_hybrid. Written against version 1.3.0; not yet run on hardware.

Facts from its module, its headers and SGLang's use of it that shape this module:

- Processes find each other through a config store whose URL all share. The port of a session is known only once the
  backend has started.
- Its calls with a result block until the transfer is over; the others need a stream of the NPU's runtime. So a chunk is
  moved within `submit`, on the peer's worker.
- Nothing cancels a transfer, and an error code does not say whether the NPU still moves bytes: it is unsettled.
- It reaches the memory of an NPU, which only its owner can allocate. So there is no scratch line to warm up with: the
  first chunk pays for the connection.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any, Final

import msgspec

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
    Poll,
)
from .validation import Session, admit, plan_pair

STORE_URLS: Final = ("MF_CONFIG_STORE_URL", "ASCEND_MF_STORE_URL")
"""memfabric's own name, and its former one, which SGLang uses."""
PROTOCOL: Final = "ASCEND_MF_TRANSFER_PROTOCOL"
"""As SGLang names it."""
_PROTOCOLS: Final = {"sdma": "SDMA", "device_rdma": "DEVICE_RDMA"}


class _Descriptor(msgspec.Struct, frozen=True):
    """What peers get from `register`: our incarnation, and the session by which memfabric knows us."""

    incarnation: str
    session: Session


@dataclass(slots=True, eq=False)
class _Peer:
    plan: PairPlan
    session: str
    broken: str = ""


class AscendBackend:
    """`TransferBackend` over memfabric_hybrid, for memory of one NPU: the one with index PDPOOL_DEVICE, 0 by default.

    Args:
        incarnation: ours.
        target: whether peers write into our memory.
        host: address at which peers reach this process.

    Raises:
        BackendUnavailableError: the package, the URL of the store or the NPU is missing.
    """

    name = "ascend"
    stages = False

    def __init__(self, incarnation: str, *, target: bool, host: str) -> None:
        self._module = _load()
        store = next((url for name in STORE_URLS if (url := os.environ.get(name))), "")
        if not store:
            raise BackendUnavailableError(
                f"{STORE_URLS[0]} is not set: give the URL of the config store that all processes share, tcp://HOST:PORT"
            )
        protocol = os.environ.get(PROTOCOL, "sdma").lower()
        if protocol not in _PROTOCOLS:
            raise BackendUnavailableError(f"{PROTOCOL} is {protocol!r}, must be one of {', '.join(_PROTOCOLS)}")
        self._incarnation = incarnation
        self._native: Any = self._module.TransferEngine()
        role = "Decode" if target else "Prefill"  # memfabric's names for the target of writes and the other side
        self._device = _device()
        kind = getattr(self._module.TransDataOpType, _PROTOCOLS[protocol])
        host = f"[{host}]" if ":" in host else host  # memfabric takes an IPv6 address in brackets only
        code = self._native.initialize(store, f"{host}:0", role, self._device, kind)
        if code != 0:
            raise BackendUnavailableError(f"memfabric_hybrid cannot start: {self._reason(code)}")
        self._session = f"{host}:{self._native.get_rpc_port()}"
        self._memory: KVMemory | None = None
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    def register(self, memory: KVMemory, staging: Region | None = None) -> bytes:
        """As `TransferBackend.register`."""
        assert staging is None
        if self._closed or self._memory is not None:
            raise BackendError("the backend is closed" if self._closed else "memory is registered already")
        others = {block.device for block in memory.blocks} - {None, self._device}
        if others:
            raise BackendError(
                f"memory lies on devices {sorted(str(other) for other in others)}, must lie on NPU {self._device}: set "
                "PDPOOL_DEVICE to the index of the NPU"
            )
        addresses = [block.address for block in memory.blocks]
        code = self._native.batch_register_memory(addresses, [block.nbytes for block in memory.blocks])
        if code != 0:
            raise BackendError(f"memfabric_hybrid cannot register the memory: {self._reason(code)}")
        self._memory = memory
        return msgspec.msgpack.encode(_Descriptor(self._incarnation, self._session))

    def connect(self, peer: str, remote: RemoteMemory) -> None:
        """As `TransferBackend.connect`, but moves nothing: see the module's docstring."""
        plan, descriptor = plan_pair(self.name, self._memory, self._peers, peer, remote, _Descriptor)
        if descriptor.incarnation != peer:
            raise IncompatiblePeerError(f"the descriptor is of {descriptor.incarnation!r}, must be of peer {peer!r}")
        self._peers[peer] = _Peer(plan, descriptor.session)

    def submit(self, peer: str, chunk: Chunk) -> Handle:
        """As `TransferBackend.submit`; the transfer is over when it returns."""
        state = admit(self._peers, peer, chunk)
        runs = state.plan.runs(chunk)
        if not len(runs.nbytes):
            return Finished(Poll.DONE)
        try:
            code = self._native.batch_transfer_sync_write(
                state.session, runs.local.tolist(), runs.remote.tolist(), runs.nbytes.tolist()
            )
        except Exception as error:  # noqa: BLE001 - any error of the binding may leave bytes under way
            state.broken = f"{type(error).__name__}: {error}"
            return Finished(Poll.FAILED_UNSETTLED, state.broken)
        if code != 0:
            state.broken = self._reason(code)
            return Finished(Poll.FAILED_UNSETTLED, state.broken)
        return Finished(Poll.DONE)

    def poll(self, handle: Handle) -> Poll:
        """As `TransferBackend.poll`; never PENDING."""
        assert isinstance(handle, Finished)
        return handle.outcome

    def transport(self, peer: str) -> str:
        """As `TransferBackend.transport`: unknown, memfabric does not say."""
        del peer
        return ""

    def disconnect(self, peer: str) -> None:
        """As `TransferBackend.disconnect`."""
        self._peers.pop(peer, None)

    def close(self) -> None:
        """As `TransferBackend.close`."""
        if self._closed:
            return
        self._closed = True
        self._peers.clear()
        blocks = self._memory.blocks if self._memory is not None else ()
        self._memory = None
        codes = [self._native.unregister_memory(block.address) for block in blocks]
        self._native.destroy()
        self._native.unInitialize()
        if failed := [code for code in codes if code != 0]:
            raise BackendError(f"memfabric_hybrid cannot deregister the memory: {self._reason(failed[0])}")

    def _reason(self, code: int) -> str:
        return f"error {code} {self._module.get_and_clear_last_err_msg()}".strip()


def _device() -> int:
    text = os.environ.get("PDPOOL_DEVICE", "0")
    try:
        return int(text)
    except ValueError:
        raise BackendUnavailableError(f"PDPOOL_DEVICE is {text!r}, must be the index of an NPU") from None


def _load() -> Any:  # noqa: ANN401 - a package without types
    try:
        return importlib.import_module("memfabric_hybrid")
    except (ImportError, OSError) as error:
        raise BackendUnavailableError(
            f"memfabric_hybrid cannot be imported ({error}); install it from PyPI with `pip install "
            "memfabric-hybrid==1.3.0` on a host with the Ascend driver and CANN"
        ) from error

"""The checks that all backends share: of a peer at connect, and of a chunk at submit."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Protocol, TypeVar

import msgspec

from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.mapped import refuse_unmapped
from pdpool_connector.layout.memory import KVMemory, LayoutError, RemoteMemory
from pdpool_connector.layout.plan import PairPlan

from .base import (
    BackendError,
    IncompatiblePeerError,
    InvalidChunkError,
    UnknownPeerError,
)

Session = Annotated[str, msgspec.Meta(min_length=3, max_length=270, pattern=r"^[^\s]+:[0-9]{1,5}\Z")]
"""A process by the address at which it listens: "host:port"."""
Descriptor = TypeVar("Descriptor")


class Connected(Protocol):
    """The part of a backend's record of a peer that the checks need. `broken`: why its connection failed, or ""."""

    plan: PairPlan
    broken: str


Peer = TypeVar("Peer", bound=Connected)


def refuse_absent(memory: KVMemory) -> None:
    """Raise BackendError for host regions that are no memory of this process."""
    try:
        refuse_unmapped(memory.regions)
    except LayoutError as error:
        raise BackendError(str(error)) from None


def plan_pair(
    backend: str,
    ours: KVMemory | None,
    known: Container[str],
    peer: str,
    remote: RemoteMemory,
    kind: type[Descriptor],
) -> tuple[PairPlan, Descriptor]:
    """The plan of our memory and the peer's, and the peer's descriptor, a msgpack of `kind`.

    Raises:
        BackendError: nothing is registered yet, or the peer is among the known.
        IncompatiblePeerError: the backend, the memories or the descriptor do not fit.
    """
    if ours is None:
        raise BackendError("register memory before connecting a peer")
    if peer in known:
        raise BackendError(f"peer {peer} is connected already")
    if remote.backend != backend:
        raise IncompatiblePeerError(f"backend is {backend!r} at prefill and {remote.backend!r} at decode")
    try:
        return PairPlan(ours, remote.memory), msgspec.msgpack.decode(remote.descriptor, type=kind)
    except (LayoutError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IncompatiblePeerError(str(error)) from error


def admit(peers: Mapping[str, Peer], peer: str, chunk: Chunk) -> Peer:
    """The peer that a chunk is for. Raises UnknownPeerError, or InvalidChunkError for a chunk that does not fit."""
    state = peers.get(peer)
    if state is None or state.broken:
        raise UnknownPeerError(f"peer {peer} is not connected" + (f": {state.broken}" if state else ""))
    refuse_invalid(state.plan, chunk)
    return state


def refuse_invalid(plan: PairPlan, chunk: Chunk) -> None:
    """Raise InvalidChunkError for a chunk that does not fit the plan."""
    try:
        plan.check(chunk)
    except LayoutError as error:
        raise InvalidChunkError(str(error)) from error

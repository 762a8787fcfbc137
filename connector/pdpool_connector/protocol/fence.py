"""Proofs that a process can touch no memory any more, and which of them suffice for which transfer backend.

Each row of `FENCES` is backed by an experiment that counts the bytes which land after the proof (`make fences`). Where
there is no row, nothing is released.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ProcessExited(msgspec.Struct, frozen=True, kw_only=True, tag="process_exited", tag_field="kind"):
    """The kernel of this host reports that the process has ended, with every thread (a pidfd became readable)."""

    pid: Annotated[int, msgspec.Meta(ge=1)]
    seen_by: Text


class ConnectionsEnded(msgspec.Struct, frozen=True, kw_only=True, tag="connections_ended", tag_field="kind"):
    """After the exit of the process, each connection from us to it has closed at our end: all that it sent was read."""

    seen_by: Text


class ContainerTerminated(msgspec.Struct, frozen=True, kw_only=True, tag="container_terminated", tag_field="kind"):
    """The kubelet reported this container as terminated. The deletion of its pod is no such report."""

    pod_uid: Text
    container_id: Text
    seen_by: Text


class NodeRebooted(msgspec.Struct, frozen=True, kw_only=True, tag="node_rebooted", tag_field="kind"):
    """The node reports another boot id than that under which the process ran."""

    node: Text
    boot_id_before: Text
    boot_id_now: Text
    seen_by: Text


class NodeOutOfService(msgspec.Struct, frozen=True, kw_only=True, tag="node_out_of_service", tag_field="kind"):
    """A person, or the cloud provider, declares the node off (taint node.kubernetes.io/out-of-service)."""

    node: Text
    declared_by: Text


Proof = ProcessExited | ConnectionsEnded | ContainerTerminated | NodeRebooted | NodeOutOfService
"""One observation. `msgspec.json.decode(body, type=Proof)` reads it from JSON by its `kind`."""

Kind = type[Proof]
Combination = frozenset[Kind]

_GONE: tuple[Kind, ...] = (ProcessExited, ContainerTerminated, NodeRebooted, NodeOutOfService)
"""Each proves that the process has ended. Bytes that it gave to a kernel before may still be on their way."""


def _alone() -> tuple[Combination, ...]:
    return tuple(frozenset({kind}) for kind in _GONE)


def _with_connections() -> tuple[Combination, ...]:
    return tuple(frozenset({kind, ConnectionsEnded}) for kind in _GONE)


FENCES: Mapping[tuple[str, str], tuple[Combination, ...]] = {
    ("local", "memory"): _alone(),
    ("nixl", "memory"): _alone(),
    ("nixl", "tcp"): _with_connections(),
    ("mooncake", "tcp"): _with_connections(),
}
"""By transfer backend and transport: combinations of proofs, each of which suffices alone.

local, and NIXL over shared memory or CMA: threads of the process itself copy, and end with it. TCP: megabytes that a
dead process gave to its kernel still arrive until our end of its connections has closed. RDMA, Mori and Ascend have no
row, because the experiment needs hardware that was not there.
"""


class InsufficientProofError(ValueError):
    """The proofs do not suffice for this transfer backend and changed nothing. The message names what suffices."""


def judge(backend: str, proofs: Sequence[Proof], *, sending: bool = False) -> None:
    """Check that `proofs` fence a process for every transport that the backend may have used.

    Backends choose their transport themselves and do not report it, so the proofs must suffice for each transport that
    has a row.

    Args:
        backend: Name of the transfer backend.
        proofs: What was observed of the process.
        sending: Our own backend moves the bytes and only reads our memory. The pages are held so that a slow peer never
            receives later contents of them. A dead peer receives nothing, so its end alone suffices.

    Raises:
        InsufficientProofError: They do not suffice.
    """
    rows = {transport: enough for (name, transport), enough in FENCES.items() if name == backend}
    if not rows:
        raise InsufficientProofError(f"backend {backend!r} has no row in the table of fences: no proof suffices there")
    if not proofs:
        alternatives = sorted({_names(combination) for enough in rows.values() for combination in enough})
        raise InsufficientProofError(f"give at least one proof: {' or '.join(alternatives)}")
    given = {type(proof) for proof in proofs}
    if sending and given.intersection(_GONE):
        return
    for transport, enough in rows.items():
        if not any(combination <= given for combination in enough):
            raise InsufficientProofError(
                f"{_names(given)} is no proof for backend {backend!r}, which may have used {transport}: "
                f"give {' or '.join(sorted(_names(combination) for combination in enough))}"
            )


def kinds_of(proofs: Sequence[Proof]) -> str:
    """The kinds of the proofs in words, for messages to those that wait for the fenced process."""
    return ", ".join(str(type(proof).__struct_config__.tag).replace("_", " ") for proof in proofs)


def describe(proofs: Sequence[Proof]) -> str:
    """Every field of every proof, for logs."""
    return "; ".join(str(proof) for proof in proofs)


def _names(kinds: Combination | set[Kind]) -> str:
    return " with ".join(sorted((kind.__name__ for kind in kinds), reverse=True))

"""Proof that a process can touch memory no more: what was seen, by whom, and what of it suffices for which data plane.

Every row of `FENCES` is borne out by an experiment that counts bytes which land after the claim (`make fences`;
docs/fences.md has the table). Where there is no row, nothing is released.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ProcessExited(msgspec.Struct, frozen=True, kw_only=True, tag="process_exited", tag_field="kind"):
    """The kernel of this host said that the process has ended, with every thread (a pidfd became readable)."""

    pid: Annotated[int, msgspec.Meta(ge=1)]
    seen_by: Text


class ConnectionsEnded(msgspec.Struct, frozen=True, kw_only=True, tag="connections_ended", tag_field="kind"):
    """After its exit: every connection that led from us to it has closed at our end, so all it had sent was read."""

    seen_by: Text


class RegistrationRevoked(msgspec.Struct, frozen=True, kw_only=True, tag="registration_revoked", tag_field="kind"):
    """The memory is registered no more, and the NIC itself refuses what still comes (RDMA; never TCP or CMA)."""

    device: Text
    seen_by: Text


class ContainerTerminated(msgspec.Struct, frozen=True, kw_only=True, tag="container_terminated", tag_field="kind"):
    """The kubelet reported this very container as terminated, or completed the pod's deletion itself."""

    pod_uid: Text
    container_id: Text
    seen_by: Text


class NodeRebooted(msgspec.Struct, frozen=True, kw_only=True, tag="node_rebooted", tag_field="kind"):
    """The node reports another boot id than the one under which the process ran."""

    node: Text
    boot_id_before: Text
    boot_id_now: Text
    seen_by: Text


class NodeOutOfService(msgspec.Struct, frozen=True, kw_only=True, tag="node_out_of_service", tag_field="kind"):
    """A person or the cloud vouches that the node is off (taint node.kubernetes.io/out-of-service)."""

    node: Text
    declared_by: Text


Proof = ProcessExited | ConnectionsEnded | RegistrationRevoked | ContainerTerminated | NodeRebooted | NodeOutOfService
"""One observation. `msgspec.json.decode(body, type=Proof)` reads it from JSON by its `kind`."""

Kind = type[Proof]
Combination = frozenset[Kind]

_GONE: tuple[Kind, ...] = (ProcessExited, ContainerTerminated, NodeRebooted, NodeOutOfService)
"""Each says that the process runs no more. What it had handed to a kernel before may still be on its way."""


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
"""By backend and transport: combinations of which each alone suffices.

local, and NIXL over shared memory or CMA: the copy is made by threads of the process itself and ends with them. TCP:
what the kernel holds of a dead process still arrives, up to megabytes, until our end of its connections has closed.
RDMA, Mori, Ascend: no experiment could be made without the hardware, so no row.
"""


class InsufficientProofError(ValueError):
    """The proof does not suffice for the backend in use, and changed nothing; the message says what would."""


def judge(backend: str, proofs: Sequence[Proof], *, sending: bool = False) -> None:
    """Raise InsufficientProofError unless `proofs` fence a process for every transport `backend` may have used.

    Engines choose their transport themselves and do not tell, so the proofs must do for each that has a row. sending:
    it is our own backend that moves bytes, and only reads our memory for it. The pages are held lest the peer takes
    what comes next in them for its own; when it runs no more, nobody takes anything.
    """
    rows = {transport: enough for (name, transport), enough in FENCES.items() if name == backend}
    if not rows:
        raise InsufficientProofError(f"backend {backend!r} has no row in the table of fences: nothing is proof there")
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
    """For whoever waits for the fenced process, clients among them: what was seen, in words."""
    return ", ".join(str(type(proof).__struct_config__.tag).replace("_", " ") for proof in proofs)


def describe(proofs: Sequence[Proof]) -> str:
    """For logs: every field of every observation."""
    return "; ".join(str(proof) for proof in proofs)


def _names(kinds: Combination | set[Kind]) -> str:
    return " with ".join(sorted((kind.__name__ for kind in kinds), reverse=True))

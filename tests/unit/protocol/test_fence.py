"""Which proof suffices where."""

import msgspec
import pytest
from pdpool_connector.protocol.fence import (
    FENCES,
    ConnectionsEnded,
    ContainerTerminated,
    InsufficientProofError,
    NodeOutOfService,
    NodeRebooted,
    ProcessExited,
    Proof,
    describe,
    judge,
    kinds_of,
)

EXITED = ProcessExited(pid=7, seen_by="decode")
ENDED = ConnectionsEnded(seen_by="decode")
TERMINATED = ContainerTerminated(pod_uid="u", container_id="c", seen_by="operator")
REBOOTED = NodeRebooted(node="n", boot_id_before="a", boot_id_now="b", seen_by="operator")
OFF = NodeOutOfService(node="n", declared_by="admin")


@pytest.mark.parametrize("gone", [EXITED, TERMINATED, REBOOTED, OFF])
def test_end_of_process_suffices_for_local(gone: Proof) -> None:
    judge("local", [gone])


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
@pytest.mark.parametrize("gone", [EXITED, TERMINATED, REBOOTED, OFF])
def test_tcp_needs_end_of_connections_too(backend: str, gone: Proof) -> None:
    with pytest.raises(InsufficientProofError, match=f"{type(gone).__name__} is no proof.*ConnectionsEnded"):
        judge(backend, [gone])
    judge(backend, [gone, ENDED])


@pytest.mark.parametrize("gone", [EXITED, TERMINATED, REBOOTED, OFF])
def test_sender_needs_end_of_receiver_only(gone: Proof) -> None:
    judge("nixl", [gone], sending=True)
    with pytest.raises(InsufficientProofError):
        judge("nixl", [ENDED], sending=True)


@pytest.mark.parametrize("backend", ["local", "nixl", "mooncake"])
@pytest.mark.parametrize("proofs", [[], [ENDED]])
def test_without_end_of_process_nothing_suffices(backend: str, proofs: list[Proof]) -> None:
    with pytest.raises(InsufficientProofError):
        judge(backend, proofs)


def test_no_proof_names_those_that_suffice() -> None:
    with pytest.raises(InsufficientProofError, match=r"give at least one proof: .* or ProcessExited$"):
        judge("local", [])


@pytest.mark.parametrize("backend", ["mori", "ascend", ""])
def test_backend_without_row_is_never_fenced(backend: str) -> None:
    with pytest.raises(InsufficientProofError, match="no row"):
        judge(backend, [EXITED, TERMINATED, REBOOTED, OFF, ENDED])


def test_every_row_needs_end_of_process() -> None:
    for rows in FENCES.values():
        for combination in rows:
            assert combination & {ProcessExited, ContainerTerminated, NodeRebooted, NodeOutOfService}


@pytest.mark.parametrize("proof", [EXITED, ENDED, TERMINATED, REBOOTED, OFF])
def test_proof_survives_json_and_logs_all_fields(proof: Proof) -> None:
    assert msgspec.json.decode(msgspec.json.encode(proof), type=Proof) == proof
    assert kinds_of([proof]).replace(" ", "_") in msgspec.json.encode(proof).decode()
    for value in msgspec.structs.astuple(proof):
        assert repr(value) in describe([proof])

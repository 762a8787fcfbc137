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
    RegistrationRevoked,
    describe,
    judge,
)

EXITED = ProcessExited(pid=7, seen_by="decode")
ENDED = ConnectionsEnded(seen_by="decode")
TERMINATED = ContainerTerminated(pod_uid="u", container_id="c", seen_by="operator")
REBOOTED = NodeRebooted(node="n", boot_id_before="a", boot_id_now="b", seen_by="operator")
OFF = NodeOutOfService(node="n", declared_by="admin")
REVOKED = RegistrationRevoked(device="mlx5_0", seen_by="decode")


@pytest.mark.parametrize("gone", [EXITED, TERMINATED, REBOOTED, OFF])
def test_the_end_of_the_process_suffices_where_it_copies_itself(gone: Proof) -> None:
    judge("local", [gone])


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
@pytest.mark.parametrize("gone", [EXITED, TERMINATED, REBOOTED, OFF])
def test_what_may_have_gone_over_tcp_needs_the_end_of_its_connections_too(backend: str, gone: Proof) -> None:
    with pytest.raises(InsufficientProofError, match=f"{type(gone).__name__} is no proof.*ConnectionsEnded"):
        judge(backend, [gone])
    judge(backend, [gone, ENDED])


@pytest.mark.parametrize("gone", [EXITED, TERMINATED, REBOOTED, OFF])
def test_who_only_sends_needs_the_end_of_the_receiver_alone(gone: Proof) -> None:
    judge("nixl", [gone], sending=True)
    with pytest.raises(InsufficientProofError):
        judge("nixl", [ENDED, REVOKED], sending=True)


@pytest.mark.parametrize("backend", ["local", "nixl", "mooncake"])
@pytest.mark.parametrize("proofs", [[], [ENDED], [REVOKED], [REVOKED, ENDED]])
def test_without_the_end_of_the_process_nothing_suffices(backend: str, proofs: list[Proof]) -> None:
    with pytest.raises(InsufficientProofError):
        judge(backend, proofs)


def test_without_any_proof_at_least_one_is_asked_for() -> None:
    with pytest.raises(InsufficientProofError, match=r"give at least one proof: .* or ProcessExited$"):
        judge("local", [])


@pytest.mark.parametrize("backend", ["mori", "ascend", ""])
def test_an_engine_without_a_row_is_never_fenced(backend: str) -> None:
    with pytest.raises(InsufficientProofError, match="no row"):
        judge(backend, [EXITED, TERMINATED, REBOOTED, OFF, REVOKED, ENDED])


def test_every_row_asks_for_the_end_of_the_process() -> None:
    for rows in FENCES.values():
        for combination in rows:
            assert combination & {ProcessExited, ContainerTerminated, NodeRebooted, NodeOutOfService}


@pytest.mark.parametrize("proof", [EXITED, ENDED, TERMINATED, REBOOTED, OFF, REVOKED])
def test_a_proof_goes_through_json_and_names_all_its_fields_in_logs(proof: Proof) -> None:
    assert msgspec.json.decode(msgspec.json.encode(proof), type=Proof) == proof
    for value in msgspec.structs.astuple(proof):
        assert repr(value) in describe([proof])

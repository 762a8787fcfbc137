"""Connectors accept what the operator derives from its seed."""

from pathlib import Path

import pytest
from pdpool_connector.transport.curve import read_keys
from pdpool_connector.transport.tokens import TokenError, TokenVerifier
from pdpool_operator.runtime.keys import Signer, control_keys

SEED = b"0123456789abcdef0123456789abcdef"


def test_a_connector_admits_what_the_operator_signed_for_its_pod_and_operation_once():
    signer = Signer(SEED)
    gate = TokenVerifier(signer.public, "uid")
    token = signer.authorization("fence", "uid", "operator x")
    assert gate.admit(token, "fence") == "operator x"
    with pytest.raises(TokenError, match="used before"):
        gate.admit(token, "fence")
    for operation, pod in (("drain", "uid"), ("fence", "another")):
        with pytest.raises(TokenError):
            gate.admit(signer.authorization(operation, pod, "operator x"), "fence")


def test_another_seed_opens_nothing():
    gate = TokenVerifier(Signer(SEED).public, "uid")
    with pytest.raises(TokenError):
        gate.admit(Signer(SEED[::-1]).authorization("fence", "uid", "operator x"), "fence")


def test_engines_of_a_namespace_read_the_same_keys_and_those_of_another_namespace_others(tmp_path: Path):
    def keys(namespace: str, seed: bytes = SEED):
        path = tmp_path / "curve.json"
        path.write_text(control_keys(seed, namespace))
        return read_keys(path)

    assert keys("llm") == keys("llm")
    assert len({keys("llm")[0].secret, keys("llm2")[0].secret, keys("llm", SEED[::-1])[0].secret}) == 3

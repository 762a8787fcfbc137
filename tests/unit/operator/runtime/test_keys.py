"""Connectors accept what the operator derives from its seeds, and after a rotation only what is new."""

from pathlib import Path

import pytest
from pdpool_connector.transport.curve import CurveKey, read_keys
from pdpool_connector.transport.tokens import TokenError, TokenVerifier
from pdpool_operator.api.key_epochs import KeyEpochs
from pdpool_operator.api.names import curve_file, operator_file, router_file
from pdpool_operator.runtime.keys import Keys

SEED = b"0123456789abcdef0123456789abcdef"
KEYS = Keys({1: SEED}, epoch=3)


def curve(tmp_path: Path, epochs: KeyEpochs, keys: Keys = KEYS, namespace: str = "llm") -> tuple[CurveKey, ...]:
    path = tmp_path / "curve.json"
    path.write_text(keys.files(namespace)[curve_file(epochs)])
    return read_keys(path)


def test_token_opens_one_operation_on_one_pod_once():
    gate = TokenVerifier(KEYS.files("llm")[operator_file(1)], "uid")
    token = KEYS.authorization(1, "fence", "uid", "operator x")
    assert gate.admit(token, "fence") == "operator x"
    with pytest.raises(TokenError, match="used before"):
        gate.admit(token, "fence")
    for operation, pod in (("drain", "uid"), ("fence", "another")):
        with pytest.raises(TokenError):
            gate.admit(KEYS.authorization(1, operation, pod, "operator x"), "fence")


@pytest.mark.parametrize(("keys", "epoch"), [(Keys({1: SEED[::-1]}), 1), (KEYS, 2), (KEYS, 3)])
def test_token_of_another_seed_or_epoch_is_refused(keys: Keys, epoch: int):
    gate = TokenVerifier(KEYS.public(1), "uid")
    with pytest.raises(TokenError):
        gate.admit(keys.authorization(epoch, "fence", "uid", "operator x"), "fence")


def test_engines_of_a_namespace_share_keys(tmp_path: Path):
    (key,) = curve(tmp_path, KeyEpochs(1))
    assert curve(tmp_path, KeyEpochs(1)) == (key,)
    others = [
        curve(tmp_path, KeyEpochs(1), namespace="llm2"),
        curve(tmp_path, KeyEpochs(1), Keys({1: SEED[::-1]})),
        curve(tmp_path, KeyEpochs(2)),
    ]
    assert len({key.secret, *(one.secret for (one,) in others)}) == 4


def test_decode_with_two_epochs_has_the_newest_first(tmp_path: Path):
    assert curve(tmp_path, KeyEpochs(3, 2)) == (*curve(tmp_path, KeyEpochs(3)), *curve(tmp_path, KeyEpochs(2)))


def test_secret_keeps_every_epoch_up_to_the_newest():
    assert Keys({1: SEED}, epoch=2).files("llm").items() <= KEYS.files("llm").items()
    assert router_file(3) in KEYS.files("llm")
    assert KEYS.files("llm")[router_file(3)] == KEYS.router("llm", 3)


def test_routers_of_another_namespace_seed_or_epoch_have_other_keys():
    others = [KEYS.router("llm2", 1), KEYS.router("llm", 2), Keys({1: SEED[::-1]}).router("llm", 1)]
    assert len({KEYS.router("llm", 1), *others}) == 4


def test_new_seed_changes_only_the_epochs_that_begin_with_it():
    old, new = Keys({1: SEED}, epoch=4), Keys({1: SEED, 3: SEED[::-1]}, epoch=4)
    same = [old.router("llm", epoch) == new.router("llm", epoch) for epoch in (1, 2, 3, 4)]
    assert same == [True, True, False, False]

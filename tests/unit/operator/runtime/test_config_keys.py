"""Settings of keys, pods and peers that the operator reads from its environment."""

from pathlib import Path

import pytest
from pdpool_operator.build.settings import PodDefaults
from pdpool_operator.runtime.config import Config, ConfigInvalidError, load

SEED = "s" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "seed").write_text(SEED)
    return tmp_path


def read(folder: Path, **env: str) -> Config:
    base = {"PDPOOL_NAMESPACE": "system", "PDPOOL_LEASE": "x", "PDPOOL_ENGINE_IMAGE": "e", "PDPOOL_ROUTER_IMAGE": "r"}
    return load(base | {"PDPOOL_ROUTER_SEED_FILE": str(folder / "seed")} | env)


def test_without_settings_the_first_epoch_and_restricted_pods(folder: Path):
    config = read(folder)
    assert (config.seeds, config.key_epoch) == ({1: SEED.encode()}, 1)
    assert (config.pods, config.peers) == (PodDefaults(), None)


def test_later_seeds_stand_beside_the_first(folder: Path):
    (folder / "seed-3").write_text("t" * 32)
    assert read(folder, PDPOOL_KEY_EPOCH="4").seeds == {1: SEED.encode(), 3: b"t" * 32}


def test_short_later_seed_is_refused_by_name(folder: Path):
    (folder / "seed-2").write_text("short")
    with pytest.raises(ConfigInvalidError, match="seed-2 holds 5 bytes"):
        read(folder)


@pytest.mark.parametrize("text", ["0", "65", "-1", "1.5", "two"])
def test_epoch_out_of_range_is_refused(folder: Path, text: str):
    with pytest.raises(ConfigInvalidError, match=rf"PDPOOL_KEY_EPOCH is '{text}'; it must be 1\.\.64"):
        read(folder, PDPOOL_KEY_EPOCH=text)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("PDPOOL_POD_DEFAULTS", "{", "PDPOOL_POD_DEFAULTS is not JSON"),
        ("PDPOOL_POD_DEFAULTS", '{"imagePullPolicy": "Often"}', "PDPOOL_POD_DEFAULTS: imagePullPolicy: "),
        ("PDPOOL_POD_DEFAULTS", '{"nodeSelector": {}}', "PDPOOL_POD_DEFAULTS: nodeSelector: "),
        ("PDPOOL_NETWORK_PEERS", "x", "PDPOOL_NETWORK_PEERS is not JSON"),
        ("PDPOOL_NETWORK_PEERS", '{"watchers": {}}', "PDPOOL_NETWORK_PEERS: watchers: "),
    ],
)
def test_malformed_json_is_refused_by_variable_and_field(folder: Path, name: str, text: str, words: str):
    with pytest.raises(ConfigInvalidError) as refused:
        read(folder, **{name: text})
    assert words in str(refused.value)

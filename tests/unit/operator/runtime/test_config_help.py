"""`python -m pdpool_operator --help`."""

from collections import UserDict
from pathlib import Path

import pytest
from click.testing import CliRunner
from pdpool_operator.process import main
from pdpool_operator.runtime.config import VARIABLES, ConfigInvalidError, load


class Recording(UserDict[str, str]):
    """An environment that records which variables are read."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.read: set[str] = set()
        super().__init__(variables)

    def __getitem__(self, key: str) -> str:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)


def test_each_variable_that_is_read_is_listed(tmp_path: Path):
    (tmp_path / "seed").write_text("s" * 32)
    required = {name: "x" for name, meaning in VARIABLES.items() if "Required." in meaning}
    env = Recording(required | {"PDPOOL_ROUTER_SEED_FILE": str(tmp_path / "seed")})
    load(env)
    assert env.read == set(VARIABLES)


def test_help_needs_no_settings():
    shown = CliRunner().invoke(main, ["--help"])
    assert shown.exit_code == 0
    assert [name for name in VARIABLES if name not in shown.output] == []


def test_unknown_argument_is_refused():
    refused = CliRunner().invoke(main, ["--watch", "llm"])
    assert (refused.exit_code, "No such option" in refused.output) == (2, True)


def test_missing_setting_leads_to_help():
    with pytest.raises(ConfigInvalidError, match="PDPOOL_NAMESPACE is not set; --help says what belongs there"):
        load({})

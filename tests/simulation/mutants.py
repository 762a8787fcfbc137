"""The faults of mutants.toml by name."""

import tomllib
from pathlib import Path

from tests.simulation.faults import Fault

_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutant"]
MUTANTS = {row["name"]: Fault(**row) for row in _ROWS}
assert len(MUTANTS) == len(_ROWS), "each fault has a name of its own"

"""The faults of mutants.toml and mutants_read.toml by name, and which hazards none of the mutants brings back."""

import tomllib
from pathlib import Path

from tests.simulation.faults import Fault

_HERE = Path(__file__).parent
_ROWS = [
    row for name in ("mutants", "mutants_read") for row in tomllib.loads((_HERE / f"{name}.toml").read_text())["mutant"]
]
MUTANTS = {row["name"]: Fault(**row) for row in _ROWS}
NOT_APPLICABLE = {"H10": "the connector moves no pages; an engine that compacts asks `releasable` of each"}
"""Hazards of the catalogue that no line of ours could bring back, and why."""
assert len(MUTANTS) == len(_ROWS), "each fault has a name of its own"

"""Tests with real SGLang: they need the environment of `make engines`, and run with PDPOOL_ENGINES=1."""

import json
import os
import subprocess
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("PDPOOL_CACHE") or Path.home() / ".cache/pdpool")
HERE = Path(__file__).parent
SCRIPT_S = 280


def pytest_collection_modifyitems(items):
    """Leave these tests out of runs that did not ask for real engines."""
    if os.environ.get("PDPOOL_ENGINES") == "1":
        return
    reason = "needs SGLang: `make engines PART=smoke`, then PDPOOL_ENGINES=1"
    for item in items:
        if Path(item.path).is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def engines():
    """The folder with `venv` and `models`."""
    folder = CACHE / "engines"
    assert (folder / "venv/bin/python").exists(), f"{folder} has no SGLang: run `make engines PART=smoke`"
    return folder


@pytest.fixture(scope="session")
def run_script(engines):
    """Run a script of this folder with SGLang's Python: the JSON lines that it prints."""

    def run(name, *arguments):
        done = subprocess.run(
            [engines / "venv/bin/python", HERE / name, *arguments],
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "connector"), "SGLANG_USE_CPU_ENGINE": "1"},
            capture_output=True,
            text=True,
            timeout=SCRIPT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run

"""Mutants of the runtime's wiring: a copy of the checkout with one fault in it, and the tests that must notice it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.simulation.mutants import Mutant, NotTriedError, mutated

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "connector/pdpool_connector"
COPIED = ("connector", "tests", "pyproject.toml")
LINKED = ("operator", "dev", "proof", "docs", "examples", "charts", "crds")
"""Read by tests, and never changed."""
ONE_RUN_S = 240.0
WIRING: dict[str, Mutant] = {}


def outcome_of(tests: tuple[str, ...], mutant: Mutant | None = None) -> str:
    """Run tests on a copy, with a fault or without. Returns the line that names what failed, "" when all passed.

    Raises NotTriedError when nothing ran.
    """
    with tempfile.TemporaryDirectory(prefix="pdpool-wiring-") as place:
        copy = Path(place)
        for name in COPIED:
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
        for name in LINKED:
            (copy / name).symlink_to(ROOT / name)
        if mutant is not None:
            (copy / PACKAGE / mutant.file).write_text(ast.unparse(mutated(mutant)))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        ran = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=ONE_RUN_S, check=False)
    if ran.returncode == 0 and re.search(r"\b[1-9]\d* passed", ran.stdout):
        return ""
    failed = re.search(r"^FAILED .*", ran.stdout, re.MULTILINE)
    if ran.returncode != 1 or failed is None:
        raise NotTriedError(
            f"pytest {' '.join(tests)} ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
        )
    return failed.group()


def caught_by(mutant: Mutant) -> str | None:
    """What failed because of the fault; None when it survived, or something else failed than must."""
    failed = outcome_of(mutant.tests, mutant)
    return failed if mutant.sign in failed else None

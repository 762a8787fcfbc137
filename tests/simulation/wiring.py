"""Mutants of the runtime: a copy of the checkout with one line changed, against the tests that must notice."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "connector/pdpool_connector"
COPIED = ("connector", "tests", "pyproject.toml")
LINKED = ("operator", "dev", "proof", "docs", "examples", "charts", "crds")
"""Looked at by tests, and never changed."""
ONE_RUN_S = 240.0


class WiringFault(NamedTuple):
    """See wiring.toml for the fields."""

    name: str
    hazard: str
    why: str
    file: str
    line: str
    fault: str
    tests: list[str]
    sign: str


WIRING = {
    row["name"]: WiringFault(**row)
    for row in tomllib.loads(Path(__file__).with_name("wiring.toml").read_text())["mutant"]
}


class NotTriedError(Exception):
    """The mutant could not be tried: the line is not there, or its tests do not even run."""


def mutated(fault: WiringFault) -> str:
    """The file with the fault in it. Raises NotTriedError when the line is not there exactly once."""
    source = (ROOT / PACKAGE / fault.file).read_text()
    if source.count(fault.line) != 1:
        raise NotTriedError(f"{fault.name}: {source.count(fault.line)} places in {fault.file} read {fault.line!r}")
    return source.replace(fault.line, fault.fault)


def outcome_of(tests: list[str], fault: WiringFault | None = None) -> str:
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
        if fault is not None:
            (copy / PACKAGE / fault.file).write_text(mutated(fault))
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


def caught_by(fault: WiringFault) -> str | None:
    """What failed because of the fault; None when it survived, or something else failed than must."""
    failed = outcome_of(fault.tests, fault)
    return failed if fault.sign in failed else None

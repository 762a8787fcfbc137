"""The environment of `make vllm`: vLLM's packages, on top of those of `make engines`, which has torch and NIXL."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dev.paths import CHECKOUT
from dev.shell import exclusively
from proof.engines import environment as engines
from proof.engines.environment import EnginesError, digest_of, run_step, uv

REQUIREMENTS: Final = CHECKOUT / "requirements/vllm.txt"
FREE_BYTES: Final = 3 << 30
INSTALL_S: Final = 1800


@dataclass(frozen=True)
class Environment:
    """Where everything is."""

    python: Path
    model: Path


def ensure() -> Environment:
    """Make what is missing. The next call continues an interrupted one.

    Raises:
        EnginesError: a step failed, or the disk is too full.
    """
    base = engines.ensure()
    venv = base.root / "vllm"
    with exclusively(base.root / ".vllm.lock", "making vLLM's environment"):
        _packages(venv, base)
    return Environment(venv / "bin/python", base.model("tiny"))


def _packages(venv: Path, base: engines.Environment) -> None:
    stamp = venv / ".pdpool-packages"
    digest = digest_of(REQUIREMENTS, engines.REQUIREMENTS)
    if stamp.exists() and stamp.read_text() == digest:
        return
    free = shutil.disk_usage(base.root).free
    print(f"vllm: installing vLLM on CPU into {venv}: about 1.4 GB of disk ({free >> 30} GiB are free)", flush=True)
    if free < FREE_BYTES:
        raise EnginesError(f"{base.root} has {free >> 30} GiB of free space, must have {FREE_BYTES >> 30}")
    run_step("making the environment", [uv(), "venv", "-q", "--clear", "-p", base.python, venv], INSTALL_S)
    install: list[str | Path] = [uv(), "pip", "install", "-q", "-p", venv / "bin/python", "--no-deps"]
    run_step("installing vLLM", [*install, "-r", REQUIREMENTS], INSTALL_S)
    (own,) = venv.glob("lib/python3.*/site-packages")
    (theirs,) = base.venv.glob("lib/python3.*/site-packages")
    # Behind vLLM's own packages: what both have is taken from vLLM's.
    (own / "zz-engines.pth").write_text(f"{theirs}\n")
    stamp.write_text(digest)

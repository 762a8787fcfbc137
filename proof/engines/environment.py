"""The environment of `make engines`: packages, stand-in kernels, models, and this checkout's pdpool."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dev.paths import CHECKOUT, cache_dir
from dev.progress import Progress, ticking
from dev.shell import exclusively

FREE_BYTES: Final = 9 << 30
"""Free disk space wanted before an installation."""
INSTALL_S: Final = 3600
MODEL_S: Final = 600
HERE: Final = Path(__file__).parent
REQUIREMENTS: Final = CHECKOUT / "requirements/engines.txt"
KERNELS: Final = HERE / "sgl_kernel"
MODELS: Final = ("tiny", "smollm2")


class EnginesError(RuntimeError):
    """The engines cannot run. The message says why."""


@dataclass(frozen=True)
class Environment:
    """Where everything is."""

    root: Path

    @property
    def venv(self) -> Path:
        return self.root / "venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin/python"

    def model(self, name: str) -> Path:
        """Return the directory of `tiny` or `smollm2`."""
        return self.root / "models" / name


def ensure() -> Environment:
    """Make what is missing, and print what it takes before it begins. The next call continues an interrupted one.

    Raises:
        EnginesError: a step failed, or the disk is too full.
    """
    environment = Environment(cache_dir() / "engines")
    with exclusively(environment.root / ".lock", "making the engines' environment"):
        _packages(environment)
        for name in MODELS:
            _model(environment, name)
    return environment


def install_pdpool(target: Path) -> None:
    """Install this checkout's pdpool into a folder of its own, by way of its wheel.

    The folder goes into `PYTHONPATH` of the servers that use the plugin. So checkouts do not disturb each other, and
    stock servers have no plugin.

    Raises:
        EnginesError: the wheel cannot be built.
    """
    shutil.rmtree(target, ignore_errors=True)
    run_step("building pdpool", [uv(), "pip", "install", "-q", "--no-deps", "--target", target, CHECKOUT], 600)


def _packages(environment: Environment) -> None:
    stamp = environment.venv / ".pdpool-packages"
    digest = digest_of(REQUIREMENTS, *sorted(KERNELS.glob("*.py")))
    if stamp.exists() and stamp.read_text() == digest:
        return
    free = shutil.disk_usage(environment.root).free
    print(
        f"engines: installing SGLang on CPU into {environment.venv}: about 6 GB of disk "
        f"({free >> 30} GiB are free), a download of 3 GB, 1 to 10 minutes",
        flush=True,
    )
    if free < FREE_BYTES:
        raise EnginesError(f"{environment.root} has {free >> 30} GiB of free space, must have {FREE_BYTES >> 30}")
    if not environment.python.exists():
        run_step("making the environment", [uv(), "venv", "-q", "--clear", "-p", "3.11", environment.venv], 600)
    install: list[str | Path] = [uv(), "pip", "install", "-q", "-p", environment.python, "--no-deps"]
    install += ["-r", REQUIREMENTS]
    run_step("installing packages", install, INSTALL_S, weigh=environment.venv)
    (site,) = environment.venv.glob("lib/python3.*/site-packages")
    shutil.copytree(KERNELS, site / KERNELS.name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    stamp.write_text(digest)


def _model(environment: Environment, name: str) -> None:
    directory = environment.model(name)
    stamp = directory / ".made"
    digest = digest_of(HERE / "models.py")
    if stamp.exists() and stamp.read_text() == digest:
        return
    print(f"engines: making the model {name} in {directory}", flush=True)
    command: list[str | Path] = [environment.python, HERE / "models.py", name, directory]
    run_step(f"making {name}", command, MODEL_S, env={"PYTHONPATH": str(CHECKOUT / "connector")})
    stamp.write_text(digest)


def run_step(
    what: str,
    command: Sequence[str | Path],
    timeout_s: float,
    env: dict[str, str] | None = None,
    weigh: Path | None = None,
) -> None:
    def state() -> str:
        return f"engines: {what}" + (f", {_size(weigh) / 1e9:.1f} of 5.9 GB" if weigh else "")

    with ticking(Progress(), state):
        try:
            done = subprocess.run(
                command,
                env=os.environ | (env or {}),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EnginesError(f"{what}: {error}") from error
    if done.returncode:
        raise EnginesError(f"{what} ended with {done.returncode}:\n{(done.stderr or done.stdout)[-3000:]}")


def _size(folder: Path) -> int:
    used = subprocess.run(["du", "-s", "-B1", folder], capture_output=True, text=True, check=False).stdout.split()
    return int(used[0]) if used else 0


def uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    if beside.exists():
        return str(beside)
    if found := shutil.which("uv"):
        return found
    raise EnginesError("the program uv is neither beside Python nor in PATH; run `make venv` first")


def digest_of(*files: Path) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


if __name__ == "__main__":
    print(ensure().root)

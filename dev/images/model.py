"""The model of the engine image: fetched and converted on this machine, and put where the Dockerfile expects it."""

import os
import shutil
import sys
from pathlib import Path

from dev.paths import CHECKOUT
from dev.shell import Clock, run

# Below the checkout, so that `docker build .` finds it too.
MODEL = CHECKOUT / ".cache/models/smollm2"


def prepare_model(clock: Clock) -> None:
    """Put the converted model below the checkout. Quick if it is already there.

    Raises:
        CommandError: it cannot be fetched or converted.
    """
    fetch = (sys.executable, "-m", "pdpool_reference.weights_fetch")
    with clock.ticking(lambda: "fetching and converting SmolLM2, unless it is there already"):
        source = Path(run(*fetch, timeout_s=1200).splitlines()[-1])
    MODEL.mkdir(parents=True, exist_ok=True)
    for stale in MODEL.iterdir():
        if not (source / stale.name).exists():
            stale.unlink()
    for file in source.iterdir():
        _place(file, MODEL / file.name)
    clock.say(f"model {source.name} in {MODEL}")


def _place(source: Path, target: Path) -> None:
    """Link the target to the source, or copy it if the file system has no links: weights are half a gigabyte."""
    if target.exists() and (target.samefile(source) or _unchanged(source, target)):
        return
    draft = target.with_name(f".{target.name}.partial")
    draft.unlink(missing_ok=True)
    try:
        os.link(source, draft)
    except OSError:
        shutil.copy2(source, draft)
    draft.rename(target)


def _unchanged(source: Path, target: Path) -> bool:
    return source.stat().st_mtime_ns == target.stat().st_mtime_ns and source.stat().st_size == target.stat().st_size

"""The build contexts of the images of SGLang and vLLM on CPU: lists and sources of this checkout, and its wheel."""

import shutil
import sys
from pathlib import Path

from dev.images import store
from dev.paths import CHECKOUT
from dev.shell import Clock, run

ENGINES = CHECKOUT / "proof/engines"
BUILD_S = 300.0


def context() -> Path:
    """Return the folder with the files that the Dockerfiles copy."""
    return store.folder() / "engines"


def prepare(clock: Clock) -> None:
    """Fill the context anew.

    Raises:
        CommandError: the wheel cannot be built.
    """
    clock.say("an engine on CPU: an image of 7 GB or more from a download of 3 GB; the first build takes 10 minutes")
    folder = context()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("engines.txt", "vllm.txt"):
        shutil.copy2(CHECKOUT / "requirements" / name, folder)
    for source, target in (
        (ENGINES / "sgl_kernel", folder / "sgl_kernel"),
        (CHECKOUT / "connector/pdpool_reference", folder / "model/pdpool_reference"),
    ):
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ENGINES / "models.py", folder / "model")
    uv = Path(sys.executable).with_name("uv")
    run(uv, "build", "-q", "--wheel", "--out-dir", folder / "wheel", CHECKOUT, timeout_s=BUILD_S)

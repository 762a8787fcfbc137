"""The folder images are built in, apart from any other container storage of the machine."""

from pathlib import Path

from dev.paths import cache_dir
from dev.shell import CommandError, run

BUILD_S = 1800.0


def folder() -> Path:
    """Return the folder of everything that image building keeps."""
    return cache_dir() / "images"


def buildah(*arguments: str | Path, timeout_s: float = BUILD_S) -> str:
    """Run buildah on our own storage and return its output.

    Raises:
        CommandError: it failed.
    """
    root, volatile = folder() / "storage", folder() / "run"
    return run("buildah", "--root", root, "--runroot", volatile, *arguments, timeout_s=timeout_s)


def exists(image: str) -> bool:
    """Return whether an image of that name has been built here."""
    try:
        buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", image, timeout_s=60)
    except CommandError:
        return False
    return True

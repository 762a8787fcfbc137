"""The folder in which images are built, separate from other container storage of the machine."""

from pathlib import Path

from dev.paths import cache_dir
from dev.shell import CommandError, run

SYSTEM_FOLDER = "/var/lib/containers"
BUILD_S = 1800.0


def folder() -> Path:
    """Return the folder of all image builds."""
    return cache_dir() / "images"


def buildah(*arguments: str | Path, timeout_s: float = BUILD_S) -> str:
    """Run buildah on this storage and return its output.

    Raises:
        CommandError: buildah failed.
    """
    root, volatile, remembered = folder() / "storage", folder() / "run", folder() / "blobs"
    remembered.mkdir(parents=True, exist_ok=True)
    command = ("buildah", "--root", root, "--runroot", volatile, *arguments)
    # In its own mount namespace, so that a killed build leaves no mounts. buildah's list of pushed layers, for which it
    # has no option, goes into our folder.
    script = f'mkdir -p {SYSTEM_FOLDER} && mount --bind "$1" {SYSTEM_FOLDER} && shift && exec "$@"'
    return run("unshare", "--mount", "sh", "-c", script, "sh", remembered, *command, timeout_s=timeout_s)


def exists(image: str) -> bool:
    """Return whether an image of that name has been built here."""
    try:
        buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", image, timeout_s=60)
    except CommandError:
        return False
    return True

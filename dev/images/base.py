"""The base image, made with debootstrap where no registry is reachable."""

import hashlib
import shutil

from dev import mounts
from dev.images import store
from dev.shell import Clock, CommandError, run

SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
# Files that a container never needs: a third of the size.
UNUSED = (
    "var/cache/apt/archives/*.deb",
    "var/cache/apt/*.bin",
    "var/lib/apt/lists/*",
    "var/log/*",
    "usr/share/doc/*",
    "usr/share/man/*",
    "usr/share/locale/*",
)


def base_image(clock: Clock) -> str:
    """Return the name of the base image, and make it first if it is missing.

    Raises:
        CommandError: debootstrap or buildah failed.
    """
    name = f"localhost/pdpool-base:{_inputs_hash()}"
    if store.exists(name):
        return name
    work = store.folder() / "base.partial"
    root = work / "root"
    # An interrupted debootstrap leaves its chroot's /proc mounted.
    mounts.remove_below(work)
    shutil.rmtree(work, ignore_errors=True)
    root.mkdir(parents=True)
    clock.say(f"debootstrap {SUITE} with {', '.join(PACKAGES)} (about a minute)")
    include = f"--include={','.join(PACKAGES)}"
    with clock.ticking(lambda: "debootstrap unpacks and configures Debian's packages"):
        run("nice", "-n", "10", "debootstrap", "--variant=minbase", include, SUITE, root, *_mirror(), timeout_s=1800)
    mounts.remove_below(work)
    for pattern in UNUSED:
        for path in root.glob(pattern):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    # As an archive, because a copied folder would lose the owners of its files.
    run(
        "tar", "--create", "--file", work / "root.tar", "--numeric-owner", "--sort=name", "-C", root, ".", timeout_s=600
    )
    shutil.rmtree(root)
    (work / "Dockerfile").write_text('FROM scratch\nADD root.tar /\nCMD ["/bin/sh"]\n')
    store.buildah("bud", "--quiet", "--tag", name, work)
    shutil.rmtree(work)
    clock.say(f"base image {name}")
    return name


def _inputs_hash() -> str:
    return hashlib.sha256(repr((SUITE, PACKAGES, UNUSED)).encode()).hexdigest()[:12]


def _mirror() -> list[str]:
    """Return the mirror that this machine's own apt uses for the suite. An empty result lets debootstrap choose."""
    try:
        out = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", f"Codename: {SUITE}")
    except CommandError:
        return []
    return out.split()[:1]

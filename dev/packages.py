"""Debian packages that the tools need: commands are installed, daemons are only unpacked into the cache.

Unpacking has three advantages. No daemon is started or enabled. An existing container runtime is not touched, whose
package may conflict with Debian's. Removing the cache removes the daemons.
"""

import os
import shutil
from functools import partial
from pathlib import Path

from dev.paths import cache_dir
from dev.shell import Clock, run

# Command that shows that the package is installed -> package.
COMMANDS = {
    "iptables": "iptables",
    "ebtables": "ebtables",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "ip": "iproute2",
    "modprobe": "kmod",
    "mount": "mount",
    "setpriv": "util-linux",
    "openssl": "openssl",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
}
# runc links against it.
LIBRARIES = {"libseccomp.so.2": "libseccomp2"}
# Package -> its used files, relative to the root.
UNPACKED = {
    "containerd": ("usr/bin/containerd", "usr/bin/containerd-shim-runc-v2", "usr/bin/ctr"),
    "runc": ("usr/sbin/runc",),
    "containernetworking-plugins": ("usr/lib/cni/bridge", "usr/lib/cni/host-local", "usr/lib/cni/loopback"),
    "prometheus": ("usr/bin/prometheus", "usr/bin/promtool"),
}
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_TEXT = "#!/bin/sh\n# pdpool installs packages: no daemon is started meanwhile.\nexit 101\n"


def unpacked(package: str) -> Path:
    """Return the folder into which a package of `UNPACKED` is unpacked. It takes the place of `/`."""
    return cache_dir() / "debian" / package


def program(name: str) -> Path:
    """Return the path of an unpacked program, for example `containerd` or `promtool`.

    Raises:
        KeyError: no package of `UNPACKED` has it.
    """
    for package, files in UNPACKED.items():
        for file in files:
            if Path(file).name == name:
                return unpacked(package) / file
    raise KeyError(f"{name!r} is in none of the packages {', '.join(UNPACKED)}")


def ensure(clock: Clock) -> None:
    """Install and unpack missing packages, after printing their names.

    Raises:
        CommandError: apt-get or dpkg failed.
        PermissionError: packages are missing and this is not root.
    """
    wanted = [package for command, package in COMMANDS.items() if not _found(command)]
    wanted += [package for file, package in LIBRARIES.items() if not any(Path("/usr/lib").glob(f"*/{file}"))]
    missing = [p for p, files in UNPACKED.items() if not all((unpacked(p) / f).exists() for f in files)]
    if not wanted and not missing:
        return
    _update(wanted + missing, clock)
    if wanted:
        _install(wanted, clock)
    if missing:
        clock.say(f"unpacking, not installing, Debian packages into {cache_dir() / 'debian'}: {' '.join(missing)}")
        for package in missing:
            with clock.ticking(partial("downloading and unpacking {}".format, package)):
                _unpack(package)


def ensure_command(command: str, clock: Clock) -> None:
    """Install the package of one command of `COMMANDS`, if the command is missing.

    Raises:
        CommandError: apt-get failed.
        PermissionError: the package is missing and this is not root.
    """
    if not _found(command):
        _update([COMMANDS[command]], clock)
        _install([COMMANDS[command]], clock)


def _found(command: str) -> bool:
    return shutil.which(command, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is not None


def _update(packages: list[str], clock: Clock) -> None:
    if os.geteuid() != 0:
        raise PermissionError(f"Debian packages {packages} are missing; installing them needs root")
    clock.say("apt-get update")
    with clock.ticking(lambda: "apt-get reads the lists of packages"):
        run("apt-get", "-q", "update", timeout_s=600)


def _install(packages: list[str], clock: Clock) -> None:
    clock.say(f"installing Debian packages (no daemons among them): {' '.join(packages)}")
    with clock.ticking(lambda: "apt-get downloads and installs them"):
        _install_quietly(packages)


def _install_quietly(packages: list[str]) -> None:
    # The machine's own policy stays. Ours, left by a crash, is recognised by its text.
    ours = not POLICY.exists() or POLICY.read_text() == POLICY_TEXT
    if ours:
        POLICY.write_text(POLICY_TEXT)
        POLICY.chmod(0o755)
    try:
        run(
            *("apt-get", "-q", "install", "--yes", "--no-install-recommends", "--no-remove", *packages),
            env={"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"},
            timeout_s=900,
        )
    finally:
        if ours:
            POLICY.unlink()


def _unpack(package: str) -> None:
    final = unpacked(package)
    partial = final.with_name(f".partial-{package}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(final, ignore_errors=True)
    archives = partial / "archives"
    archives.mkdir(parents=True)
    # Root runs this, and apt's unprivileged user cannot write into the folder.
    script = 'cd "$1" && exec apt-get -q -o APT::Sandbox::User=root download "$2"'
    run("sh", "-c", script, "sh", archives, package, timeout_s=600)
    (archive,) = archives.glob("*.deb")
    run("dpkg-deb", "--extract", archive, partial)
    shutil.rmtree(archives)
    partial.rename(final)

"""Finds promtool, or unpacks it from Debian's package. Installing the package would start a daemon."""

import shutil
import tempfile
from pathlib import Path

from dev.packages import program, unpacked
from dev.shell import run


def promtool() -> Path:
    """Return the path of promtool: from PATH, else from the cache, where apt unpacks it now if needed (without root).

    Raises:
        CommandError: there is none, and apt-get or dpkg-deb failed.
    """
    if installed := shutil.which("promtool"):
        return Path(installed)
    if not program("promtool").exists():
        target = unpacked("prometheus")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            run("sh", "-c", 'cd "$1" && exec apt-get -q download prometheus', "sh", folder, timeout_s=300)
            (package,) = Path(folder).glob("*.deb")
            run("dpkg-deb", "--extract", package, f"{folder}/root")
            shutil.rmtree(target, ignore_errors=True)
            Path(folder, "root").rename(target)
    return program("promtool")

"""Find promtool, or unpack it from Debian's package without installing that (which would start a daemon)."""

import shutil
import tempfile
from pathlib import Path

from dev.packages import program, unpacked
from dev.shell import run


def promtool() -> Path:
    """Return a promtool: that of the PATH, else the one in the cache, unpacked now if need be (by apt, without root).

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

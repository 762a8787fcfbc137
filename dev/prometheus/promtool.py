"""Find promtool, or unpack it from Debian's package without installing that (which would start a daemon)."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from dev.paths import cache_dir


class PromtoolError(RuntimeError):
    """There is no promtool; the message says what to do."""


def promtool() -> Path:
    """Return a promtool: that of the PATH, else one unpacked into the cache (needs apt, but no root).

    Raises:
        PromtoolError: neither is possible.
    """
    if installed := shutil.which("promtool"):
        return Path(installed)
    unpacked = cache_dir() / "promtool" / "usr" / "bin" / "promtool"
    if not unpacked.exists():
        _unpack(cache_dir() / "promtool")
    return unpacked


def _unpack(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        try:
            subprocess.run(["apt-get", "download", "-q", "prometheus"], cwd=folder, check=True, capture_output=True)
            (package,) = Path(folder).glob("*.deb")
            subprocess.run(["dpkg", "-x", package, f"{folder}/root"], check=True, capture_output=True)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            words = getattr(error, "stderr", b"") or b""
            raise PromtoolError(
                f"no promtool: install Debian's package prometheus ({error} {words.decode(errors='replace').strip()})"
            ) from error
        shutil.rmtree(target, ignore_errors=True)
        Path(folder, "root").rename(target)

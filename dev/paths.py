"""The folder in which the development tools keep built files: one cache per user, for all checkouts on the machine."""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def cache_dir() -> Path:
    """Return the cache directory: `$PDPOOL_CACHE`, else `$XDG_CACHE_HOME/pdpool`, else `~/.cache/pdpool`."""
    if override := os.environ.get("PDPOOL_CACHE"):
        return Path(override).resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "pdpool"

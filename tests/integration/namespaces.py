"""Two network namespaces joined by a virtual wire, as two pods on two nodes are. Needs root."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from dev.shell import wait_for

DEVICE = "wire0"
HOSTS = {4: ("198.18.0.1", "198.18.0.2"), 6: ("fd00:198:18::1", "fd00:198:18::2")}
"""Addresses of the two ends: RFC 2544's block for such tests, and unique local ones."""


@dataclass(frozen=True)
class Wire:
    """The two namespaces' names; commands run in one by the prefix of `inside`."""

    names: tuple[str, str]

    def inside(self, end: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.names[end])

    def cut(self) -> None:
        _ip("-n", self.names[1], "link", "set", DEVICE, "down")

    def mend(self) -> None:
        _ip("-n", self.names[1], "link", "set", DEVICE, "up")
        _ip("-n", self.names[1], "addr", "replace", f"{HOSTS[6][1]}/64", "dev", DEVICE, "nodad")
        self.until_up()

    def until_up(self) -> None:
        """UCX leaves out a device that has no carrier yet, for good, and the kernel is not quick to say that it has."""
        for name in self.names:
            wait_for(f"{DEVICE} of {name} to be up", lambda name=name: _down(name), deadline_s=10, interval_s=0.02)


@contextmanager
def wire() -> Iterator[Wire]:
    """Make the namespaces, and remove them with all that is in them. Skips the test where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip`")
    names = (f"pdpool-{os.getpid()}-a", f"pdpool-{os.getpid()}-b")
    try:
        for name in names:
            made = _ip("netns", "add", name, check=False)
            if made.returncode:
                pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        _ip("-n", names[0], "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for end, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"{HOSTS[4][end]}/30", "dev", DEVICE)
            _ip("-n", name, "addr", "add", f"{HOSTS[6][end]}/64", "dev", DEVICE, "nodad")
            for device in ("lo", DEVICE):
                _ip("-n", name, "link", "set", device, "up")
        made_up = Wire(names)
        made_up.until_up()
        yield made_up
    finally:
        for name in names:
            _ip("netns", "del", name, check=False)


def _down(name: str) -> str | None:
    (link,) = json.loads(_ip("-n", name, "-j", "link", "show", DEVICE).stdout)
    return None if link["operstate"] == "UP" else str(link["operstate"])


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, text=True, capture_output=True, timeout=20)

"""A network namespace in which one process has the addresses of all simulated pods."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
from collections.abc import Iterator

from dev.cluster.layout import SIMULATED_POD_NETWORK
from dev.paths import CHECKOUT
from dev.shell import CommandError, run

NAME = "pdpool-sim"
HOST_LINK, POD_LINK = "pdpool-sim0", "pdpool-sim1"
PODS = ipaddress.ip_network(SIMULATED_POD_NETWORK, strict=False)
HOST_ADDRESS = str(PODS[-2])
"""Address of this machine in the network of simulated pods. kwok assigns from the other end."""


@contextlib.contextmanager
def engines() -> Iterator[None]:
    """Run the stand-in engines at the addresses of all simulated pods. Needs root.

    Raises:
        CommandError: the namespace could not be made.
        RuntimeError: the stand-in did not start.
    """
    _remove()
    try:
        _make()
        command = ["ip", "netns", "exec", NAME, sys.executable, "-m", "proof.bench.operator.engines"]
        path = os.pathsep.join((str(CHECKOUT / "operator"), str(CHECKOUT)))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=CHECKOUT,
            env=os.environ | {"PYTHONPATH": path},
        )
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError(f"the stand-in engines ended with {process.wait(10)}")
            yield
        finally:
            process.terminate()
            process.wait(10)
    finally:
        _remove()


def _make() -> None:
    run("ip", "netns", "add", NAME)
    run("ip", "link", "add", HOST_LINK, "type", "veth", "peer", "name", POD_LINK, "netns", NAME)
    run("ip", "address", "add", f"{HOST_ADDRESS}/{PODS.prefixlen}", "dev", HOST_LINK)
    run("ip", "link", "set", HOST_LINK, "up")
    run("ip", "-n", NAME, "link", "set", "lo", "up")
    run("ip", "-n", NAME, "link", "set", POD_LINK, "up")
    run("ip", "-n", NAME, "route", "add", f"{HOST_ADDRESS}/32", "dev", POD_LINK)
    run("ip", "-n", NAME, "route", "add", "local", str(PODS), "dev", "lo")


def _remove() -> None:
    for command in (("link", "delete", HOST_LINK), ("netns", "delete", NAME)):
        with contextlib.suppress(CommandError):  # it does not exist
            run("ip", *command)

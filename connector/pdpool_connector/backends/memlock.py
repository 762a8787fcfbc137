"""RLIMIT_MEMLOCK: an RDMA device locks what is registered with it, and a container's limit is often 64 KiB."""

import resource
from collections.abc import Sequence
from pathlib import Path

from pdpool_connector.layout.regions import Block


def memlock_bytes() -> int | None:
    """The limit of this process in bytes; None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def memlock_problem(limit: int | None, needed: int) -> str:
    """Why a process with this limit cannot register `needed` bytes with an RDMA device; "" if it can."""
    if limit is None or limit >= needed:
        return ""
    return (
        f"RLIMIT_MEMLOCK is {limit} bytes and registering takes {needed}: raise the limit of the container runtime "
        "(LimitMEMLOCK=infinity), or give the container the capability IPC_LOCK and run it as UID 0"
    )


def memlock_hint(blocks: Sequence[Block], devices: Path = Path("/dev/infiniband")) -> str:
    """What to add to the message of a registration that failed; "" where the limit is not the cause.

    Only host memory counts. Without an RDMA device nothing is locked.
    """
    if not devices.exists():
        return ""
    problem = memlock_problem(memlock_bytes(), sum(block.nbytes for block in blocks if block.device is None))
    return f"; {problem}" if problem else ""

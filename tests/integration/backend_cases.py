"""The transfer backends under test, and what their tests share: pairs of processes, patterns of bytes, waits."""

import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from pdpool_connector.backends.base import Poll

from tests.integration.backend_peer import STAND_INS, Peer

SMALL = {"layers": 3, "pages": 48, "page_bytes": 4096}
LARGE = {"layers": 2, "pages": 32, "page_bytes": 1 << 20}
CANARY = 0xA5
ESTABLISHED = "01"
V4_IN_V6 = "0000000000000000FFFF0000"

# Pages where the bytes are, pages where they go, (slot there, slot here).
SHAPES = {
    "one page": ([7], [11], None),
    "one run": (range(4, 20), range(30, 46), None),
    "all pages": (range(48), range(48), (7, 7)),
    "scattered": ([3, 17, 9, 44, 0], [40, 2, 47, 0, 21], (1, 6)),
    "runs that merge on one side only": (range(10), [5, 6, 7, 20, 21, 22, 30, 31, 40, 41], None),
    "both reversed": (range(15, -1, -1), range(47, 31, -1), None),
    "one reversed": (range(16), range(31, 15, -1), (0, 0)),
    "one source page to two targets": ([5, 5], [6, 7], None),
    "aux only": ([], [], (3, 4)),
    "empty": ([], [], None),
}
BAD = {
    "local page too high": ([0, 48], [0, 1], None, "local_pages[1] is 48, must be 0..47"),
    "local page negative": ([-1], [0], None, "local_pages[0] is -1, must be 0..47"),
    "remote page too high": ([0], [2**31 - 1], None, "remote_pages[0] is 2147483647, must be 0..47"),
    "remote page negative": ([0, 1], [3, -(2**31)], None, "remote_pages[1] is -2147483648, must be 0..47"),
    "lists differ": ([0, 1], [0], None, "local_pages has 2 ids and remote_pages 1"),
    "local aux slot": ([0], [0], (8, 0), "local aux slot is 8, must be 0..7"),
    "remote aux slot": ([0], [0], (0, -1), "remote aux slot is -1, must be 0..7"),
    "target page twice": ([0, 1], [4, 4], None, "remote_pages has page 4 twice"),
}


@dataclass(frozen=True)
class Plane:
    """A backend and the environment that makes it use one transport.

    lost: the outcome of a transfer to a peer that is lost. Only a backend that copies itself can call it settled.
    transport: the name of the transport that the backend reports.
    """

    backend: str
    env: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    lost: Poll = Poll.FAILED_UNSETTLED
    transport: str = "tcp"


PLANES = {
    "local": Plane("local", lost=Poll.FAILED_SETTLED, transport="memory"),
    "nixl": Plane("nixl", {"UCX_NET_DEVICES": "lo"}, transport="cma"),
    "nixl-tcp": Plane("nixl", {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}),
    "mooncake": Plane("mooncake"),
}
OVER_IPV6 = {
    "nixl-tcp-ipv6": replace(
        PLANES["nixl-tcp"], env={**PLANES["nixl-tcp"].env, "UCX_TCP_AF_PRIO": "inet6"}, host="::1"
    ),
    "mooncake-ipv6": replace(PLANES["mooncake"], host="::1"),
}
"""Those whose bytes have an address to go to: the others go through memory, under any host name."""
RECORDED = {
    "mori-recorded": Plane("mori", {STAND_INS: "1"}, transport="rdma"),
    "ascend-recorded": Plane("ascend", {STAND_INS: "1", "MF_CONFIG_STORE_URL": "tcp://127.0.0.1:6650"}, transport=""),
}
"""Adapters on stand-ins of their packages. They do not show how a real transport fails: they are for healthy peers."""
OVER_TCP = {name: PLANES[name] for name in ("nixl-tcp", "mooncake")}


def cross(metafunc, argument, planes):
    """Run a test that has `argument` on each plane."""
    if argument in metafunc.fixturenames:
        metafunc.parametrize(argument, planes.values(), ids=list(planes), scope="module")


@contextmanager
def peers(plane, geometry, *roles, prefixes=(), hosts=()):
    """Processes with an open backend: an upper-case role is a target. A process the test killed may be killed.

    prefixes: for each process the command words that start it, such as `ip netns exec NAME`. hosts: where each listens.
    """
    opened = [Peer(plane.env, prefix) for prefix in (prefixes or [()] * len(roles))]
    try:
        for role, peer, host in zip(roles, opened, hosts or [plane.host] * len(roles), strict=True):
            name = f"{role}-{time.monotonic_ns():x}"
            peer.post_open(plane.backend, name, host=host, target=role.isupper(), **geometry)
        for peer in opened:
            peer.opened()
        yield opened
    finally:
        for peer in opened:
            if peer.process.poll() is None:
                peer.signal(signal.SIGCONT)
        codes = [peer.end() for peer in opened]
    assert set(codes) <= {0, -signal.SIGKILL}, f"exit codes {codes}: a process crashed"


def fill(source, sink, seed=0):
    """Random bytes in the whole source arena, canaries in the whole sink arena."""
    source.arena.view[:] = np.random.default_rng(seed).integers(0, 256, source.arena.nbytes, np.uint8)
    sink.arena.view[:] = CANARY


def item(peer, region, index):
    """The bytes of one item in the peer's own arena."""
    start = region.address - peer.arena.address + index * region.item_bytes
    return peer.arena.view[start : start + region.item_bytes]


def expected(source, sink, source_pages, sink_pages, aux=None):
    """What the sink's arena must hold, by the slow obvious way; aux: (slot in source, slot in sink)."""
    image = sink.arena.view.copy()
    ours, theirs = source.remote.memory, sink.remote.memory

    def put(from_region, index, to_region, to):
        start = to_region.address - sink.arena.address + to * to_region.item_bytes
        image[start : start + to_region.item_bytes] = item(source, from_region, index)

    for from_region, to_region in zip(ours.kv, theirs.kv, strict=True):
        for page, to in zip(source_pages, sink_pages, strict=True):
            put(from_region, page, to_region, to)
    if aux is not None:
        put(ours.aux[0], aux[0], theirs.aux[0], aux[1])
    return image


def move(initiator, target, source_pages, sink_pages, aux=None, state=None, **others):
    """Do one transfer and return how it ended; state: (source ids, sink ids) of the one pool."""
    chunk = {"local": list(source_pages), "remote": list(sink_pages), "aux": aux, "state": state}
    handle = initiator.call("submit", peer=target.name, **chunk, **others)
    assert "error" not in handle, handle
    return initiator.call("poll", handle=handle["handle"], wait_s=80.0)


def until(condition, what, timeout_s=30.0):
    """Wait for `condition()`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.002)


def carried(pid):
    """How many established TCP connections of a process run over IPv4 and over IPv6."""
    mine = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since the listing
            name = str(descriptor.readlink())
            if name.startswith("socket:["):
                mine.add(name[8:-1])
    counts = {4: 0, 6: 0}
    for version, table in ((4, "tcp"), (6, "tcp6")):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[9] in mine and fields[3] == ESTABLISHED:
                counts[4 if fields[2].startswith(V4_IN_V6) else version] += 1
    return counts

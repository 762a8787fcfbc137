# ruff: noqa: N802 - the names are NIXL's own
"""NIXL with memory of a GPU, on a stand-in with the interface of the real bindings: which calls are made with what."""

import sys
from types import ModuleType, SimpleNamespace

import msgspec
import numpy as np
import pytest
from msgspec import structs
from pdpool_connector.backends import nixl, nixl_agent
from pdpool_connector.backends.base import BackendError, BackendUnavailableError, InvalidChunkError, Poll
from pdpool_connector.backends.nixl import NixlBackend
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.chunk import Chunk, StateItems
from pdpool_connector.layout.memory import KVMemory, Region, RemoteMemory, StatePool
from pdpool_connector.layout.plan import PairPlan
from pdpool_connector.layout.staging import Staging

from tests.unit.backends.recorded_packages import record

RECORD = record("nixl_cu12")
PAGES, ITEM, ROWS = 8, 256, 4
HERE, THERE = 1, 3


class Refused(Exception):  # noqa: N818 - as NIXL names its own
    """NIXL's."""


class Agent:
    """NIXL's agent, which notes every call and moves nothing; a call must have as many arguments as the real one."""

    refuses = ""

    def __init__(self, *_):
        self.calls, self.numbers = [], iter(range(1, 1000))

    def __getattr__(self, name):
        allowed = {len(parameters) for parameters in RECORD["nixlAgent"][name]}

        def call(*given):
            assert len(given) in allowed, (name, given)
            self.calls.append((name, *given))
            if self.refuses and self.refuses in map(str, given):
                raise Refused(name)
            return next(self.numbers)

        return call

    def createBackend(self, *_):
        return 1

    def getLocalMD(self):
        return b"us"

    def loadRemoteMD(self, metadata):
        return metadata

    def postXferReq(self, transfer):
        self.calls.append(("postXferReq", transfer))
        return "over"

    def of(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def module(monkeypatch):
    made = SimpleNamespace(nixlAgent=Agent, nixlAgentConfig=SimpleNamespace, Refused=Refused, NIXL_SUCCESS="over")
    for name in ("NIXL_IN_PROG", "NIXL_THREAD_SYNC_STRICT", "NIXL_INIT_AGENT", "NIXL_WRITE", "DRAM_SEG", "VRAM_SEG"):
        setattr(made, name, name)
    made.nixlRegDList = lambda segment, blocks: (segment, tuple(blocks))
    made.nixlXferDList = lambda segment, ranges: (segment, ranges.tolist())
    assert set(vars(made)) - {"Refused"} <= set(RECORD["functions"])
    monkeypatch.setattr(nixl_agent, "_load", lambda: made)
    monkeypatch.setattr(Agent, "refuses", "")
    return made


@pytest.fixture
def aux():
    with HostArena(ROWS * 64) as arena:
        yield arena.region(0, 64, ROWS)


def memory(device, aux, heads=2, **fields):
    """KV and a state pool on a GPU, aux rows on the host. The addresses of the GPU are none of this process."""
    kv = tuple(Region(0x7F0000000000 + index * 0x100000, ITEM * heads // 2, PAGES, device) for index in range(2))
    pool = StatePool("swa", (Region(0x7F0000400000, 32, 6, device),))
    shape = {"page_tokens": 4, "layers": 1, "kv_heads": heads, "total_heads": 2, "head_dim": 8}
    return KVMemory(kv=kv, aux=(aux,), state=(pool,), dtype="float32", model="m", **{**shape, **fields})


def on_device(aux):
    """The list that is registered for the GPU's part of `memory`."""
    return "VRAM_SEG", tuple((block.address, block.nbytes, HERE, "") for block in memory(HERE, aux).blocks[1:])


def ids(*values):
    return np.array(values, np.int32)


def pair(aux, ours=None, theirs=None):
    backend = NixlBackend("us", target=False)
    local = memory(HERE, aux) if ours is None else ours
    backend.register(local)
    described = msgspec.msgpack.encode(nixl._Descriptor(b"them", 4096))
    remote = RemoteMemory(backend="nixl", memory=memory(THERE, aux) if theirs is None else theirs, descriptor=described)
    backend.connect("them", remote)
    return backend, backend._agent._agent, PairPlan(local, remote.memory)


def test_memory_of_a_gpu_is_registered_with_its_number(module, aux):
    _, agent, _ = pair(aux)
    host, device = (described[0] for described in agent.of("registerMem"))
    assert host[0] == "DRAM_SEG"
    assert [block[2] for block in host[1]] == [0, 0]
    assert device == on_device(aux)


def test_each_memory_has_descriptor_lists_of_its_own(module, aux):
    _, agent, _ = pair(aux)
    prepared = [(owner, segment, rows[:, 2].tolist()) for owner, segment, rows, _ in agent.of("prepXferDlist")]
    assert prepared == [
        ("them", "DRAM_SEG", [0, 0]),
        ("NIXL_INIT_AGENT", "DRAM_SEG", [0, 0]),
        ("them", "VRAM_SEG", [THERE] * 3),
        ("NIXL_INIT_AGENT", "VRAM_SEG", [HERE] * 3),
    ]


def test_pages_of_a_gpu_and_the_aux_row_go_out_as_two_chunks(module, aux):
    backend, agent, plan = pair(aux)
    pages, row = plan.cut(ids(1, 2), ids(5, 6), (0, 3), [(ids(4), ids(2))])
    assert (pages.group, row.group) == (1, 0)
    assert (row.aux, len(row.local_pages)) == (((0, 3),), 0)
    agent.calls.clear()
    assert [backend.poll(backend.submit("them", chunk)) for chunk in (pages, row)] == [Poll.DONE, Poll.DONE]
    lists = backend._peers["them"].lists
    made = [
        (local, ours.tolist(), remote, theirs.tolist())
        for _, local, ours, remote, theirs, *_ in agent.of("makeXferReq")
    ]
    assert made == [
        (lists[1].local, [1, 2, 9, 10, 20], lists[1].remote, [5, 6, 13, 14, 18]),
        (lists[0].local, [0], lists[0].remote, [3]),
    ]


def test_pages_of_the_host_may_go_to_a_gpu(module, aux):
    host = HostArena(4 * PAGES * ITEM)
    kv = tuple(host.region(index * PAGES * ITEM, ITEM, PAGES) for index in range(2))
    state = (StatePool("swa", (host.region(2 * PAGES * ITEM, 32, 6),)),)
    _, agent, plan = pair(aux, ours=structs.replace(memory(HERE, aux), kv=kv, state=state))
    assert [(group.local_device, group.remote_device) for group in plan.groups] == [(None, None), (None, THERE)]
    segments = [(owner, segment) for owner, segment, *_ in agent.of("prepXferDlist")]
    assert segments[2:] == [("them", "VRAM_SEG"), ("NIXL_INIT_AGENT", "DRAM_SEG")]


def test_gathered_pages_are_written_from_the_host_to_the_gpu(module, aux):
    host = HostArena(4 * PAGES * ITEM)
    kv = tuple(host.region(index * PAGES * ITEM, ITEM, PAGES) for index in range(2))
    ours = structs.replace(memory(HERE, aux), kv=kv, state=())
    theirs = structs.replace(memory(THERE, aux, heads=1), state=())
    backend, agent, plan = pair(aux, ours=ours, theirs=theirs)
    (chunk,) = plan.cut(ids(1, 2), ids(5, 6), gather=True)
    slot = Staging(1).reserve()
    assert backend.poll(backend.submit("them", plan.stage(chunk, slot))) is Poll.DONE
    ((_, source, target, *_),) = agent.of("createXferReq")
    assert (source[0], target[0]) == ("DRAM_SEG", "VRAM_SEG")
    assert source[1][0] == [slot.address, ITEM, 0]
    assert [row[2] for row in target[1]] == [THERE, THERE]


def test_the_cpu_never_gathers_pages_of_a_gpu(module, aux):
    theirs = structs.replace(memory(THERE, aux, heads=1), state=())
    _, _, plan = pair(aux, ours=structs.replace(memory(HERE, aux), state=()), theirs=theirs)
    assert not plan.can_stage
    assert not plan.worth_staging(ids(1, 2, 3))


def test_a_chunk_of_two_memories_is_refused(module, aux):
    backend, _, _ = pair(aux)
    with pytest.raises(InvalidChunkError, match="chunk is of group 1 and names aux of group 0, must name one group"):
        backend.submit("them", Chunk(ids(1), ids(2), ((0, 0),), group=1))
    with pytest.raises(InvalidChunkError, match="chunk is of group 0 and names state of group 1"):
        backend.submit("them", Chunk(ids(), ids(), (), (StateItems(0, ids(1), ids(2)),)))


def test_memory_that_nixl_refuses_leaves_none_registered(module, aux, monkeypatch):
    backend = NixlBackend("us", target=False)
    agent = backend._agent._agent
    monkeypatch.setattr(agent, "refuses", str(on_device(aux)))
    with pytest.raises(BackendError, match="NIXL cannot register the memory: Refused: registerMem"):
        backend.register(memory(HERE, aux))
    assert [described[0][0] for described in agent.of("deregisterMem")] == ["DRAM_SEG"]


def loaded(monkeypatch, torch=None, **bindings):
    """The bindings that are taken; `bindings`: packages, and whether the process has imported them already."""
    for package in nixl_agent.PACKAGES:
        monkeypatch.delitem(sys.modules, f"{package}._bindings", raising=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=torch)) if torch else None)
    modules = {f"{package}._bindings": ModuleType(package) for package in bindings}
    for name, imported in zip(modules, bindings.values(), strict=True):
        if imported:
            monkeypatch.setitem(sys.modules, name, modules[name])

    def load(name):
        if name not in modules:
            raise ImportError(f"no {name}")
        return modules[name]

    monkeypatch.setattr(nixl_agent.importlib, "import_module", load)
    monkeypatch.setenv("UCX_MODULES", "^ib")
    return nixl_agent._load().__name__


@pytest.mark.parametrize(
    ("torch", "bindings", "taken"),
    [
        (None, {"nixl_cu12": False, "nixl_cu13": True}, "nixl_cu13"),
        ("12.8", {"nixl_cu12": False, "nixl_cu13": True}, "nixl_cu13"),
        ("13.0", {"nixl_cu12": False, "nixl_cu13": False}, "nixl_cu13"),
        ("12.8", {"nixl_cu12": False, "nixl_cu13": False}, "nixl_cu12"),
        ("13.0", {"nixl_cu12": False}, "nixl_cu12"),
        (None, {"nixl_cu13": False}, "nixl_cu13"),
    ],
)
def test_bindings_follow_the_process_then_torch_then_what_is_installed(monkeypatch, torch, bindings, taken):
    assert loaded(monkeypatch, torch, **bindings) == taken


def test_without_any_bindings_both_packages_are_named(monkeypatch):
    with pytest.raises(BackendUnavailableError, match=r"nixl_cu12: no .*; nixl_cu13: no .* nixl-cu12==1\.5\.1"):
        loaded(monkeypatch)

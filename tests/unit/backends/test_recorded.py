"""Backends for hardware that is not here, on stand-ins that have the interfaces of the real packages. These are the
cases that the conformance suite, which runs over them too, does not show.
"""

import contextlib
import gc
import inspect
import sys
import weakref

import numpy as np
import pytest
from msgspec import structs
from pdpool_connector.backends import mori, open_backend
from pdpool_connector.backends.base import (
    BackendError,
    BackendUnavailableError,
    Finished,
    IncompatiblePeerError,
    PeerUnreachableError,
    Poll,
    UnknownPeerError,
)
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.chunk import Chunk, StateItems
from pdpool_connector.layout.memory import KVMemory, RemoteMemory, StatePool
from pdpool_connector.protocol.timeouts import Timeouts

from tests.integration.backend_cases import CANARY
from tests.unit.backends import recorded_packages as packages

PAGES, PAGE_BYTES, ROWS, ROW_BYTES = 48, 512, 8, 64
STRIDE = PAGES * PAGE_BYTES
PLACES = {"us": (2, 0, 3, 1), "them": (1, 3, 0, 2)}
"""Where the regions lie (K, V, state, aux): not in their own order, and not in the same order on both sides."""


class Side:
    """A backend with memory of its own: two KV regions, one of state, aux rows."""

    def __init__(self, backend, name, *, target=False, device=None):
        self.arena = HostArena(4 * STRIDE)
        self.starts = [place * STRIDE for place in PLACES.get(name, (0, 1, 2, 3))]
        regions = [self.arena.region(start, PAGE_BYTES, PAGES) for start in self.starts[:3]]
        regions = [structs.replace(region, device=device) for region in regions]
        self.memory = KVMemory(
            kv=tuple(regions[:2]),
            state=(StatePool("mamba", (regions[2],)),),
            aux=(self.arena.region(self.starts[3], ROW_BYTES, ROWS),),
            page_tokens=1,
            layers=1,
            kv_heads=1,
            head_dim=128,
            dtype="float32",
            model="m",
        )
        self.bytes = self.arena.array(0, self.arena.nbytes, np.uint8)
        self.backend = open_backend(backend, name, target=target, host="10.0.0.1")
        self.remote = RemoteMemory(backend=backend, memory=self.memory, descriptor=self.backend.register(self.memory))

    def items(self, index, image=None):
        """Rows of bytes of region `index` (K, V, state, aux), of an image of the arena or of the arena itself."""
        count, width = (ROWS, ROW_BYTES) if index == 3 else (PAGES, PAGE_BYTES)
        data = self.bytes if image is None else image
        return data[self.starts[index] :][: count * width].reshape(-1, width)


@pytest.fixture(params=["mori", "ascend"])
def backend(request, monkeypatch):
    for cls, names in (
        (packages.IOEngine, ("rounds", "failure", "raises")),
        (packages.TransferEngine, ("code", "raises", "last_error")),
    ):
        for name in names:
            monkeypatch.setattr(cls, name, getattr(cls, name))
    monkeypatch.setitem(sys.modules, "mori.io", packages.mori_io())
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", packages.memfabric())
    monkeypatch.setattr(mori, "_rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setenv("MF_CONFIG_STORE_URL", "tcp://10.0.0.9:6650")
    for name in ("PDPOOL_DEVICE", "ASCEND_MF_STORE_URL", "ASCEND_MF_TRANSFER_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    yield request.param
    for native in packages.TransferEngine.made:
        if not native.ended:  # a test that closes nothing
            native.destroy()


@pytest.fixture
def pair(backend):
    ours, theirs = Side(backend, "us"), Side(backend, "them", target=True)
    ours.backend.connect("them", theirs.remote)
    yield ours, theirs
    for side in (ours, theirs):
        side.backend.close()


def ids(*values):
    return np.array(values, np.int32)


def ended(backend, handle):
    for _ in range(100):
        if (outcome := backend.poll(handle)) is not Poll.PENDING:
            return outcome
    pytest.fail("still pending after 100 polls")


def test_pages_state_and_aux_rows_land_exactly_wherever_the_regions_lie(pair):
    ours, _ = pair
    source, sink = pair
    source.bytes[:] = np.random.default_rng(0).integers(0, 256, source.arena.nbytes, np.uint8)
    sink.bytes[:] = CANARY
    before, wanted = source.bytes.copy(), sink.bytes.copy()
    pages, state, aux = (ids(3, 4, 9, 31), ids(20, 21, 0, 5)), (ids(1, 2), ids(7, 6)), (1, 3)
    for region, (froms, tos) in enumerate((pages, pages, state, ((1,), (3,)))):
        for start, to in zip(froms, tos, strict=True):
            sink.items(region, wanted)[to] = source.items(region)[start]
    chunk = Chunk(*pages, (aux,), (StateItems(0, *state),))
    assert ended(ours.backend, ours.backend.submit("them", chunk)) is Poll.DONE
    assert np.array_equal(sink.bytes, wanted)
    assert np.array_equal(source.bytes, before)


def test_a_failure_is_unsettled_has_its_reason_and_ends_the_connection(pair, backend, monkeypatch):
    ours, _ = pair
    monkeypatch.setattr(packages.IOEngine, "failure", "retry exceeded")
    monkeypatch.setattr(packages.TransferEngine, "code", -7)
    handle = ours.backend.submit("them", Chunk(ids(0), ids(0)))
    assert ended(ours.backend, handle) is Poll.FAILED_UNSETTLED
    assert handle.failure == {"mori": "retry exceeded", "ascend": "error -7 the NPU said no"}[backend]
    with pytest.raises(UnknownPeerError, match=handle.failure):
        ours.backend.submit("them", Chunk(ids(0), ids(0)))
    monkeypatch.undo()


def test_an_exception_from_the_package_is_an_unsettled_failure(pair, monkeypatch):
    ours, _ = pair
    monkeypatch.setattr(packages.IOEngine, "raises", "lost")
    monkeypatch.setattr(packages.TransferEngine, "raises", "lost")
    handle = ours.backend.submit("them", Chunk(ids(0), ids(0)))
    assert ended(ours.backend, handle) is Poll.FAILED_UNSETTLED
    assert handle.failure == "RuntimeError: lost"


def test_an_engine_holds_nothing_for_a_handle_that_is_done(pair):
    ours, _ = pair
    alone = sys.getrefcount(Finished(Poll.DONE))
    handle = ours.backend.submit("them", Chunk(ids(0), ids(0)))
    assert ended(ours.backend, handle) is Poll.DONE
    assert sys.getrefcount(handle) == alone + 1, "our own name for it, and no more"


def test_a_descriptor_of_another_kind_is_refused(pair, backend):
    ours, theirs = pair
    with pytest.raises(IncompatiblePeerError):
        ours.backend.connect("x", RemoteMemory(backend=backend, memory=theirs.memory, descriptor=b"\xff"))


def test_close_gives_everything_back_once(pair, backend):
    for side in pair:
        side.backend.close()
        side.backend.close()
        with pytest.raises(UnknownPeerError):
            side.backend.submit("them", Chunk(ids(0), ids(0)))
    made = packages.IOEngine.made if backend == "mori" else packages.TransferEngine.made
    assert [native.memories for native in made] == [{}, {}]
    if backend == "ascend":
        assert [native.ended for native in made] == [["destroy", "unInitialize"]] * 2
    else:
        assert [native.remotes for native in made] == [{}, {}]


# --- MORI alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["mori"], indirect=True)
def test_mori_is_pending_until_every_status_has_ended(pair, monkeypatch):
    ours, theirs = pair
    monkeypatch.setattr(packages.IOEngine, "rounds", 3)
    ours.bytes[:] = 1
    handle = ours.backend.submit("them", Chunk(ids(0), ids(0)))
    assert [ours.backend.poll(handle) for _ in range(4)] == [Poll.PENDING, Poll.PENDING, Poll.DONE, Poll.DONE]
    assert theirs.items(1)[0].all()


@pytest.mark.parametrize("backend", ["mori"], indirect=True)
def test_statuses_that_moris_threads_may_still_write_to_live_until_close(pair, monkeypatch):
    ours, _ = pair
    monkeypatch.setattr(packages.IOEngine, "rounds", 1000)
    handle = ours.backend.submit("them", Chunk(ids(0), ids(0)))
    status = weakref.ref(handle.statuses[0])
    ours.backend.disconnect("them")
    assert ours.backend.poll(handle) is Poll.FAILED_UNSETTLED
    del handle
    gc.collect()
    assert status() is not None
    ours.backend.close()
    gc.collect()
    assert status() is None


@pytest.mark.parametrize("backend", ["mori"], indirect=True)
def test_a_peer_that_does_not_answer_the_warm_up_is_unreachable(backend, monkeypatch):
    ours, theirs = mori.MoriBackend("us", host="h", timeouts=Timeouts(backend_connect_s=0.05)), Side(backend, "them")
    ours.register(theirs.memory)
    monkeypatch.setattr(packages.IOEngine, "rounds", 1_000_000)
    with pytest.raises(PeerUnreachableError, match=r"did not answer within 0\.05 s"):
        ours.connect("them", theirs.remote)
    monkeypatch.setattr(packages.IOEngine, "failure", "no route")
    with pytest.raises(PeerUnreachableError, match="failed: no route"):
        ours.connect("them", theirs.remote)


@pytest.mark.parametrize("backend", ["mori"], indirect=True)
def test_a_region_that_mori_refuses_leaves_no_other_registered(backend, monkeypatch):
    theirs = Side(backend, "them")
    ours = mori.MoriBackend("us", host="h")
    native, register = packages.IOEngine.made[-1], packages.IOEngine.register_memory

    def refuse_fourth(self, *given):
        if len(self.memories) == 3:
            raise RuntimeError("no room")
        return register(self, *given)

    monkeypatch.setattr(packages.IOEngine, "register_memory", refuse_fourth)
    with pytest.raises(BackendError, match="no room"):
        ours.register(theirs.memory)
    assert native.memories == {}


@pytest.mark.parametrize("backend", ["mori"], indirect=True)
def test_memories_that_are_not_those_of_the_geometry_are_refused(backend):
    ours, theirs, third = Side(backend, "us"), Side(backend, "them"), Side(backend, "third")
    lying = RemoteMemory(backend=backend, memory=third.memory, descriptor=theirs.remote.descriptor)
    with pytest.raises(IncompatiblePeerError, match="not those of its geometry"):
        ours.backend.connect("them", lying)


@pytest.mark.parametrize("backend", ["mori"], indirect=True)
def test_mori_registers_each_region_with_its_device(backend):
    Side(backend, "host")
    Side(backend, "gpu", device=3)
    on_host, on_gpu = packages.IOEngine.made
    assert on_host.backends[0][1].poll_cq_mode.name == "EVENT"
    assert {(device, place.name) for _, device, place in on_host.memories.values()} == {(-1, "CPU")}
    assert {(device, place.name) for _, device, place in on_gpu.memories.values()} == {(3, "GPU"), (-1, "CPU")}


# --- Ascend alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["ascend"], indirect=True)
def test_ascend_tells_the_store_role_device_and_protocol(backend, monkeypatch):
    Side(backend, "us")
    monkeypatch.setenv("PDPOOL_DEVICE", "5")
    monkeypatch.setenv("ASCEND_MF_TRANSFER_PROTOCOL", "DEVICE_RDMA")
    Side(backend, "them", target=True)
    first, second = (native.started for native in packages.TransferEngine.made)
    assert first[:4] == ("tcp://10.0.0.9:6650", "10.0.0.1:0", "Prefill", 0)
    assert second[:4] == ("tcp://10.0.0.9:6650", "10.0.0.1:0", "Decode", 5)
    assert (first[4].name, second[4].name) == ("SDMA", "DEVICE_RDMA")


@pytest.mark.parametrize("backend", ["ascend"], indirect=True)
def test_ascend_refuses_memory_of_another_npu(backend, monkeypatch):
    monkeypatch.setenv("PDPOOL_DEVICE", "5")
    Side(backend, "us", device=5)
    with pytest.raises(BackendError, match=r"memory lies on devices \['3'\], must lie on NPU 5: set PDPOOL_DEVICE"):
        Side(backend, "them", device=3)


@pytest.mark.parametrize("backend", ["ascend"], indirect=True)
def test_ascend_puts_an_ipv6_address_in_brackets(backend):
    with contextlib.closing(open_backend(backend, "us", target=False, host="fd00::1")):
        assert packages.TransferEngine.made[0].started[1] == "[fd00::1]:0"


@pytest.mark.parametrize("backend", ["ascend"], indirect=True)
def test_ascend_says_what_is_missing(backend, monkeypatch):
    monkeypatch.setattr(packages.TransferEngine, "start_code", -1)
    with pytest.raises(BackendUnavailableError, match="cannot start: error -1 the NPU said no"):
        open_backend(backend, "us", target=False)
    monkeypatch.setenv("PDPOOL_DEVICE", "first")
    with pytest.raises(BackendUnavailableError, match="PDPOOL_DEVICE is 'first'"):
        open_backend(backend, "us", target=False)
    monkeypatch.setenv("ASCEND_MF_TRANSFER_PROTOCOL", "pigeon")
    with pytest.raises(BackendUnavailableError, match="is 'pigeon', must be one of sdma, device_rdma"):
        open_backend(backend, "us", target=False)
    monkeypatch.delenv("MF_CONFIG_STORE_URL")
    with pytest.raises(BackendUnavailableError, match="MF_CONFIG_STORE_URL is not set"):
        open_backend(backend, "us", target=False)


# --- Missing, and the record ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "module", "hint"),
    [("mori", "mori.io", "pip install amd-mori==1.2.4"), ("ascend", "memfabric_hybrid", "memfabric-hybrid==1.3.0")],
)
def test_without_the_package_the_error_says_how_to_install_it(monkeypatch, backend, module, hint):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendUnavailableError, match=hint):
        open_backend(backend, "me", target=False)


def test_without_an_rdma_device_mori_is_unavailable(monkeypatch):
    monkeypatch.setitem(sys.modules, "mori.io", packages.mori_io())
    monkeypatch.setattr(mori, "_rdma_devices", list)
    with pytest.raises(BackendUnavailableError, match="no RDMA device"):
        open_backend("mori", "me", target=False)


def methods(cls):
    return {
        name: list(inspect.signature(member).parameters)[1:]
        for name, member in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def test_the_stand_in_for_memfabric_offers_what_the_real_one_does():
    real = packages.record("memfabric_hybrid")
    for name, parameters in methods(packages.TransferEngine).items():
        assert parameters == real["TransferEngine"][name][: len(parameters)], name
    module = packages.memfabric()
    assert set(vars(module)) <= set(real["functions"])
    assert {kind.name for kind in module.TransDataOpType} <= set(real["TransDataOpType"])


def test_the_stand_in_for_mori_offers_what_the_real_one_does():
    real = packages.record("amd_mori")
    backend = real["classes"]["IOEngine"]
    for name, parameters in methods(packages.IOEngine).items():
        wanted = backend["_batch_single_side_transfer"][1:] if name.startswith("batch_") else backend[name]
        assert parameters == wanted, name
    bound = set(real["bound"])
    for cls in (packages.EngineDesc, packages.MemoryDesc, packages.TransferStatus):
        assert {name for name in vars(cls) if not name.startswith("_") and name != "fields"} <= bound
        assert set(getattr(cls, "fields", ())) <= bound
    module = packages.mori_io()
    assert set(vars(module)) <= bound | set(real["classes"])
    for kind in (module.BackendType, module.PollCqMode, module.MemoryLocationType):
        assert {member.name for member in kind} <= bound

# ruff: noqa: N802 - the names are NIXL's own
"""The parts of the NIXL backend that need no second process."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from pdpool_connector.backends import nixl, nixl_agent
from pdpool_connector.backends.base import BackendUnavailableError, Poll, UnknownPeerError
from pdpool_connector.backends.nixl import NixlBackend
from pdpool_connector.layout.arena import HostArena
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import KVMemory, RemoteMemory

ARENA = HostArena(3 * 1024)
MEMORY = KVMemory(
    kv=(ARENA.region(0, 64, 16), ARENA.region(1024, 64, 16)),
    aux=(ARENA.region(2048, 64, 16),),
    page_tokens=16,
    layers=1,
    kv_heads=1,
    head_dim=1,
    dtype="float32",
    model="m",
)


class RefusedError(Exception):
    """NIXL's."""


class Native:
    """NIXL's agent, whose transfers are over at once. `posting`: called while one is posted."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.handles: set[int] = set()
        self.posting = lambda _: None

    def createBackend(self, *_):
        return 1

    def registerMem(self, *_):
        pass

    def getLocalMD(self):
        return b"us"

    def loadRemoteMD(self, metadata):
        self.known.add(metadata.decode())
        return metadata

    def invalidateRemoteMD(self, name):
        self.known.remove(name)

    def prepXferDlist(self, owner, *_):
        if owner != "ours" and owner not in self.known:
            raise RefusedError("NOT_FOUND")
        return 1

    def releasedDlistH(self, _):
        pass

    def makeXferReq(self, *_):
        handle = max(self.handles, default=0) + 1
        self.handles.add(handle)
        return handle

    def postXferReq(self, handle):
        self.posting(handle)
        return "over"

    def releaseXferReq(self, handle):
        self.handles.remove(handle)


@pytest.fixture
def native(monkeypatch):
    one = Native()
    module = SimpleNamespace(
        nixlAgent=lambda *_: one,
        nixlAgentConfig=SimpleNamespace,
        nixlRegDList=lambda *_: None,
        NIXL_THREAD_SYNC_STRICT=1,
        NIXL_INIT_AGENT="ours",
        DRAM_SEG=0,
        NIXL_SUCCESS="over",
        NIXL_IN_PROG="running",
        NIXL_WRITE=0,
        VRAM_SEG=1,
        RefusedError=RefusedError,
    )
    monkeypatch.setattr(nixl_agent, "_load", lambda: module)
    return one


@pytest.fixture
def backend(native):
    one = NixlBackend("us", target=False)
    one.register(MEMORY)
    return one


def remote(peer):
    descriptor = msgspec.msgpack.encode(nixl._Descriptor(peer.encode(), 4096))
    return RemoteMemory(backend="nixl", memory=MEMORY, descriptor=descriptor)


PAGE = Chunk(np.array([1], np.int32), np.array([2], np.int32))


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", None)
    monkeypatch.setenv("UCX_MODULES", "^ib")
    with pytest.raises(BackendUnavailableError, match=r"pip install --no-deps nixl-cu12==1\.5\.1"):
        NixlBackend("me", target=False)


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [(False, None, "^ib"), (True, None, None), (False, "^cuda", "^cuda"), (True, "^ib", "^ib")],
)
def test_ucx_modules_are_chosen_only_when_unset_and_without_infiniband(monkeypatch, device, before, after):
    monkeypatch.setenv("UCX_MODULES", before or "")
    if before is None:
        monkeypatch.delenv("UCX_MODULES")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: device if str(path) == "/dev/infiniband" else exists(path))
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", None)
    with pytest.raises(BackendUnavailableError):
        nixl_agent.NixlAgent("me", progress_thread=False)
    assert os.environ.get("UCX_MODULES") == after


@pytest.mark.parametrize(
    ("gpu", "before", "after"),
    [("", None, "n"), ("", "y", "y"), ("/dev/nvidiactl", None, None), ("/dev/kfd", None, None), ("/dev/kfd", "n", "n")],
)
def test_emulation_by_the_peer_is_switched_off_where_no_gpu_needs_it_and_the_user_says_nothing(
    monkeypatch, gpu, before, after
):
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", before or "")
    if before is None:
        monkeypatch.delenv("UCX_PROTO_EMULATION_ENABLE")
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == gpu)
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", None)
    with pytest.raises(BackendUnavailableError):
        nixl_agent.NixlAgent("me", progress_thread=False)
    assert os.environ.get("UCX_PROTO_EMULATION_ENABLE") == after


def test_the_lock_is_handed_over_in_the_order_of_asking():
    lock = nixl_agent._FairLock()
    order, threads = [], []

    def worker(number):
        with lock:
            order.append(number)

    with lock:
        for number in range(5):
            threads.append(threading.Thread(target=worker, args=(number,)))
            threads[-1].start()
            while len(lock._waiting) <= number:
                threads[-1].join(0.001)
        assert order == []
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4]
    with lock:
        pass  # free again


def test_the_lock_excludes_under_contention():
    lock, inside, worst = nixl_agent._FairLock(), [0], [0]

    def worker():
        for _ in range(100):
            with lock:
                inside[0] += 1
                worst[0] = max(worst[0], inside[0])
                time.sleep(0)  # gives the GIL to a thread that could wrongly enter
                inside[0] -= 1

    threads = [threading.Thread(target=worker) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert worst == [1]


def waits(lock, thread):
    """Return once `thread` waits for the lock that another thread has."""
    while not lock._waiting:
        assert thread.is_alive()
        thread.join(0.001)


def test_a_peer_that_returns_while_it_is_evicted_is_known_when_it_is_paired(backend, native, monkeypatch):
    monkeypatch.setattr(nixl, "_PARKED", 0)
    backend.connect("them", remote("them"))
    forget, returned = backend._agent.forget_peer, []

    def evict(peer):
        if not backend._parked_lock.locked():  # otherwise the peer's own thread has to wait for it
            returned.append(backend._load(peer, b"them"))
        forget(peer)

    backend._agent.forget_peer = evict
    backend.disconnect("them")
    if not returned:
        backend._load("them", b"them")
    assert native.known == {"them"}


def test_a_peer_whose_warm_up_meets_an_error_of_another_kind_may_be_connected_again(backend, native):
    def exhausted(_):
        raise MemoryError

    native.posting = exhausted
    with pytest.raises(MemoryError):
        backend.connect("them", remote("them"))
    native.posting = lambda _: None
    backend.connect("them", remote("them"))


@pytest.mark.parametrize("failure", ["", "lost"])
def test_a_small_transfer_does_not_wait_behind_a_thread_that_asked_after_it(backend, native, failure):
    backend.connect("them", remote("them"))
    returned, waited = threading.Event(), []

    def copy():
        with backend._agent._calling:
            waited.append(not returned.wait(30))

    copying = threading.Thread(target=copy)

    def post(_):
        copying.start()
        waits(backend._agent._calling._lock, copying)
        if failure:
            raise RefusedError(failure)

    native.posting = post
    handle = backend.submit_at_once("them", PAGE)
    returned.set()
    copying.join(60)
    assert waited == [False]
    assert native.handles == set()
    assert backend.poll(handle) is (Poll.FAILED_UNSETTLED if failure else Poll.DONE)
    assert failure in handle.failure
    if failure:
        with pytest.raises(UnknownPeerError, match=failure):
            backend.submit_at_once("them", PAGE)


def test_a_handle_that_nixl_does_not_free_at_once_is_freed_at_close(backend, native, monkeypatch):
    backend.connect("them", remote("them"))
    with monkeypatch.context() as patch:
        patch.setattr(native, "releaseXferReq", lambda _: (_ for _ in ()).throw(RefusedError("busy")))
        assert backend.submit_at_once("them", PAGE).outcome is Poll.DONE
    assert len(native.handles) == 1
    native.deregisterMem = lambda *_: None
    backend.close()
    assert native.handles == set()


class Interrupt(BaseException):
    """A signal's, as Ctrl-C is."""


@pytest.mark.parametrize("granted", [False, True])
def test_a_waiter_that_a_signal_took_away_is_not_given_the_lock(monkeypatch, granted):
    lock, real = nixl_agent._FairLock(), threading.Lock

    class Turn:
        """A ticket whose owner is interrupted while it waits; `granted`: just after its turn had come."""

        def __init__(self):
            self._lock = real()

        def acquire(self):
            if not self._lock.acquire(blocking=False):
                if granted:
                    lock.__exit__()
                raise Interrupt

        def release(self):
            self._lock.release()

    lock.__enter__()
    monkeypatch.setattr(nixl_agent, "threading", SimpleNamespace(Lock=Turn))
    with pytest.raises(Interrupt):
        lock.__enter__()
    monkeypatch.undo()
    if not granted:
        assert not lock.enter_now()
        lock.__exit__()
    assert lock.enter_now()


def test_loading_nixl_leaves_the_log_handlers_of_the_process_alone(tmp_path) -> None:
    said = tmp_path / "backend.log"
    script = (
        "import logging\n"
        f"logging.basicConfig(handlers=[logging.FileHandler({str(said)!r}, mode='w')])\n"
        "logging.warning('before')\n"
        "from pdpool_connector.backends import nixl_agent\n"
        "nixl_agent._load()\n"
        "logging.warning('after')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert [line.rpartition(":")[2] for line in said.read_text().splitlines()] == ["before", "after"]

"""The parts of the NIXL engine that need no second process."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from pdpool_connector.engines import nixl_agent
from pdpool_connector.engines.base import EngineUnavailableError
from pdpool_connector.engines.nixl import NixlEngine


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", None)
    monkeypatch.setenv("UCX_MODULES", "^ib")
    with pytest.raises(EngineUnavailableError, match=r"pip install --no-deps nixl-cu12==1\.5\.1"):
        NixlEngine("me", target=False)


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
    with pytest.raises(EngineUnavailableError):
        nixl_agent.NixlAgent("me", progress_thread=False)
    assert os.environ.get("UCX_MODULES") == after


@pytest.mark.parametrize(("before", "after"), [(None, "n"), ("y", "y")])
def test_reads_emulated_by_the_peer_are_switched_off_unless_the_user_wants_them(monkeypatch, before, after):
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", before or "")
    if before is None:
        monkeypatch.delenv("UCX_PROTO_EMULATION_ENABLE")
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", None)
    with pytest.raises(EngineUnavailableError):
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
                time.sleep(0)  # gives the GIL to whoever could wrongly enter
                inside[0] -= 1

    threads = [threading.Thread(target=worker) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert worst == [1]

"""What the shared-memory backend refuses and reports; that it moves bytes rightly is shown on two processes."""

import errno
import gc
import os
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from pdpool_connector.backends.base import (
    BackendError,
    IncompatiblePeerError,
    InvalidChunkError,
    PeerUnreachableError,
    Poll,
    UnknownPeerError,
)
from pdpool_connector.backends.local import LocalBackend
from pdpool_connector.layout.arena import ArenaLocation, HostArena
from pdpool_connector.layout.chunk import Chunk
from pdpool_connector.layout.memory import KVMemory, Region, RemoteMemory

from tests.descriptors import descriptors


def describe(arena, **changes):
    fields = {
        "kv": (arena.region(0, 1024, 8), arena.region(8192, 1024, 8)),
        "aux": (arena.region(16384, 64, 4),),
        "page_tokens": 16,
        "layers": 1,
        "kv_heads": 1,
        "head_dim": 16,
        "dtype": "float32",
        "model": "m",
    }
    return KVMemory(**{**fields, **changes})


def ids(*values):
    return np.array(values, np.int32)


@pytest.fixture
def source():
    with HostArena(32768) as arena:
        arena.array(0, 32768, np.uint8)[:] = 1
        yield arena


@pytest.fixture
def sink():
    with HostArena(32768) as arena:
        yield arena


@pytest.fixture
def backend(source):
    opened = LocalBackend()
    opened.register(describe(source))
    yield opened
    opened.close()


def remote_of(arena, **changes):
    descriptor = changes.pop("descriptor", None) or msgspec.msgpack.encode(arena.location())
    return RemoteMemory(
        backend=changes.pop("backend", "local"), memory=describe(arena, **changes), descriptor=descriptor
    )


def test_a_chunk_is_done_when_submit_returns(backend, sink):
    backend.connect("p", remote_of(sink))
    handle = backend.submit("p", Chunk(ids(0, 1, 5), ids(2, 3, 0), ((1, 3),)))
    assert backend.poll(handle) is Poll.DONE
    assert backend.poll(handle) is Poll.DONE, "asked again it says the same"
    written = sink.array(0, 32768, np.uint8)
    assert written.sum() == 2 * 3 * 1024 + 64
    assert written[:1024].all()
    assert written[2048:4096].all()
    assert written[16384 + 3 * 64 : 16384 + 4 * 64].all()


def test_more_ranges_than_one_system_call_takes_are_all_copied(source):
    with HostArena(1 << 20) as wide, HostArena(1 << 20) as target:
        wide.array(0, 1 << 20, np.uint8)[:] = 1
        memories = [
            describe(
                arena,
                kv=(arena.region(0, 64, 4000), arena.region(1 << 19, 64, 4000)),
                aux=(arena.region(300000, 64, 4),),
            )
            for arena in (wide, target)
        ]
        backend = LocalBackend()
        backend.register(memories[0])
        location = msgspec.msgpack.encode(target.location())
        backend.connect("p", RemoteMemory(backend="local", memory=memories[1], descriptor=location))
        pages = np.arange(0, 4000, 2, dtype=np.int32)
        assert backend.poll(backend.submit("p", Chunk(pages, pages))) is Poll.DONE
        assert target.array(0, 1 << 20, np.uint8).sum() == 2 * 2000 * 64
        backend.close()


def test_memory_that_went_away_is_a_settled_failure_not_a_crash(backend, source, sink):
    backend.connect("p", remote_of(sink))
    source.close()  # the last reference to the mapping: its addresses are no longer ours
    gc.collect()
    handle = backend.submit("p", Chunk(ids(0, 1), ids(0, 1)))
    assert backend.poll(handle) is Poll.FAILED_SETTLED
    assert "copy failed" in handle.failure


@pytest.mark.parametrize("part", ["kv", "aux"])
def test_memory_outside_an_arena_is_refused(source, part):
    elsewhere = np.zeros(4096, np.uint8)
    region = Region(elsewhere.ctypes.data, 64, 4)
    change = {"aux": (region,)} if part == "aux" else {"kv": (source.region(0, 64, 4), region)}
    with pytest.raises(BackendError, match="not in"):
        LocalBackend().register(describe(source, **change))


def test_registering_twice_is_refused(backend, source):
    with pytest.raises(BackendError, match="registered already"):
        backend.register(describe(source))


def test_a_registering_that_failed_for_want_of_a_descriptor_may_be_tried_again(source, monkeypatch):
    backend = LocalBackend()
    with monkeypatch.context() as patch:
        patch.setattr(HostArena, "location", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(OSError, match="Too many open files"):
            backend.register(describe(source))
    assert backend.register(describe(source))


def test_connecting_before_registering_is_refused(sink):
    with pytest.raises(BackendError, match="register memory before"):
        LocalBackend().connect("p", remote_of(sink))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "nixl"}, "backend is 'local' at prefill and 'nixl' at decode"),
        ({"model": "other"}, "model is 'm' at prefill and 'other' at decode"),
        ({"descriptor": b"\xff\x00"}, ""),
        ({"descriptor": msgspec.msgpack.encode({"pid": 1})}, "fd"),
        ({"descriptor": b"\xa1\x80"}, ""),
        pytest.param({"descriptor": b"\x81\xa1x" + b"\x91" * 100_000}, "recursion", id="lists within lists"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused(backend, sink, changes, message):
    with pytest.raises(IncompatiblePeerError) as caught:
        backend.connect("p", remote_of(sink, **changes))
    assert message in str(caught.value)
    with pytest.raises(UnknownPeerError):
        backend.submit("p", Chunk(ids(0), ids(0)))


@pytest.mark.parametrize("address", [0x1000, 2**62])
def test_regions_outside_the_peers_arena_are_refused_before_any_address_is_computed(backend, sink, address):
    with pytest.raises(IncompatiblePeerError, match="outside the peer's arena"):
        backend.connect("p", remote_of(sink, aux=(Region(address, 64, 4),)))


def test_an_arena_that_lies_about_its_size_is_refused(backend, sink):
    location = msgspec.structs.replace(sink.location(), nbytes=1 << 40)
    with pytest.raises(PeerUnreachableError, match="has 32768 bytes, must have 1099511627776"):
        backend.connect("p", remote_of(sink, descriptor=msgspec.msgpack.encode(location)))


def test_another_users_arena_is_refused_with_the_reason(backend, sink):
    location = msgspec.structs.replace(sink.location(), uid=os.geteuid() + 1)
    with pytest.raises(PeerUnreachableError, match="the peer runs as another user"):
        backend.connect("p", remote_of(sink, descriptor=msgspec.msgpack.encode(location)))


def test_a_bad_index_moves_nothing(backend, sink):
    backend.connect("p", remote_of(sink))
    with pytest.raises(InvalidChunkError, match=r"remote_pages\[1\] is 8, must be 0\.\.7"):
        backend.submit("p", Chunk(ids(0, 1), ids(0, 8)))
    assert not sink.array(0, 32768, np.uint8).any()


def test_disconnect_and_close_give_everything_back(source, sink):
    before = descriptors()
    backend = LocalBackend()
    descriptor = backend.register(describe(source))
    assert msgspec.msgpack.decode(descriptor, type=ArenaLocation) == source.location()
    for _ in range(3):
        backend.connect("p", remote_of(sink))
        backend.disconnect("p")
        backend.disconnect("p")
    backend.connect("p", remote_of(sink))
    backend.close()
    backend.close()
    assert descriptors() == before
    with pytest.raises(UnknownPeerError):
        backend.submit("p", Chunk(ids(0), ids(0)))

"""The shared arena: what it gives out, what a peer may map, and what it refuses."""

import fcntl
import mmap
import multiprocessing
import os
import signal

import msgspec
import numpy as np
import pytest
from pdpool_connector.layout.arena import ArenaError, ArenaLocation, HostArena, MappedArena, find_arena
from pdpool_connector.layout.memory import LayoutError, Region

from dev.processes import send
from tests.descriptors import descriptors


def changed(location, **changes):
    return msgspec.structs.replace(location, **changes)


def test_views_and_regions_name_the_same_bytes():
    with HostArena(3 * 4096) as arena:
        view = arena.array(4096, (2, 8), np.float32)
        view[1, 7] = 1.5
        region = arena.region(4096, 32, 2)
        assert region == Region(view.ctypes.data, 32, 2)
        assert arena.array(region.address - arena.address + 32, 8, "f4")[7] == 1.5
        assert not arena.array(8192, 4096, np.uint8).any()


@pytest.mark.parametrize(("offset", "length"), [(-1, 4), (4096, 1), (0, 4097), (4090, 8), (0, 0), (0, -8)])
def test_nothing_outside_the_arena_is_given_out(offset, length):
    with HostArena(4096) as arena:
        with pytest.raises(LayoutError, match=r"not within the arena's 0\.\.4096"):
            arena.array(offset, length, np.uint8)
        with pytest.raises(LayoutError):
            arena.region(offset, 1, length)


def test_a_misaligned_view_is_refused():
    with HostArena(4096) as arena, pytest.raises(LayoutError, match="offset is 2, must be a multiple of 4 for float32"):
        arena.array(2, 4, np.float32)


def test_an_empty_arena_is_refused():
    with pytest.raises(LayoutError, match="arena size is 0 bytes"):
        HostArena(0)


def test_close_gives_up_everything_once_the_last_view_is_gone():
    before = descriptors()
    arena = HostArena(4096)
    view = arena.array(0, 4, np.uint8)
    region = arena.region(0, 4, 1)
    assert descriptors() > before
    arena.close()
    arena.close()
    view[:] = 7  # still mapped: a view never dangles
    for use in (arena.location, lambda: arena.array(0, 1, np.uint8), lambda: arena.region(0, 1, 1)):
        with pytest.raises(LayoutError, match="closed"):
            use()
    assert find_arena(region) is None
    del view
    assert descriptors() == before


def test_an_arena_that_is_forgotten_leaks_no_descriptor():
    before = descriptors()
    for _ in range(5):
        HostArena(4096)
    assert descriptors() == before


def test_the_arena_of_a_region_is_found_only_if_it_holds_all_of_it():
    with HostArena(8192) as first, HostArena(8192) as second:
        assert find_arena(first.region(0, 4096, 2)) is first
        assert find_arena(second.region(8191, 1, 1)) is second
        assert find_arena(Region(first.address, 8193, 1)) is None
        assert find_arena(Region(4096, 16, 1)) is None


def write_and_tell(location, offset, pipe):
    mapped = MappedArena(location)
    mapped.view[offset] = 99
    pipe.send(mapped.owner_alive())
    mapped.close()


def test_another_process_maps_the_same_bytes():
    spawn = multiprocessing.get_context("spawn")
    with HostArena(4096) as arena:
        ours, theirs = spawn.Pipe()
        child = spawn.Process(target=write_and_tell, args=(arena.location(), 77, theirs))
        child.start()
        assert ours.poll(60)
        assert ours.recv() is True
        child.join(60)
        assert arena.array(0, 4096, np.uint8)[77] == 99
        ours.close()
        theirs.close()


def own_and_wait(pipe):
    arena = HostArena(1 << 20)
    pipe.send(arena.location())
    signal.pause()


@pytest.fixture
def owner():
    """A process that owns an arena and waits to be killed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=own_and_wait, args=(theirs,), daemon=True)
    child.start()
    assert ours.poll(60)
    yield child, ours.recv()
    child.kill()
    child.join(60)
    ours.close()
    theirs.close()


def test_a_mapping_outlives_its_owner_and_says_that_it_died(owner):
    child, location = owner
    mapped = MappedArena(location)
    assert mapped.owner_alive()
    send(child.pid, signal.SIGSTOP)
    assert mapped.owner_alive(), "stopped is not dead"
    child.kill()
    child.join(60)
    assert not mapped.owner_alive()
    mapped.view[:] = 1
    mapped.close()
    with pytest.raises(ArenaError, match="is not running"):
        MappedArena(location)


def test_mapping_and_closing_leaves_no_descriptor():
    with HostArena(4096) as arena:
        before = descriptors()
        for _ in range(3):
            mapped = MappedArena(arena.location())
            assert descriptors() > before
            mapped.close()
            mapped.close()
        assert descriptors() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boot_id": "another"}, "the peer is on another host"),
        ({"pid_namespace": "pid:[1]"}, "the peer is in another container or pod"),
        ({"uid": 12345}, "the peer runs as another user"),
        ({"pid": 2**22 + 1}, "is not running"),
        ({"pid": -1}, "is not running"),
        ({"pid": 2**70}, "is not running"),
        ({"fd": 10**6}, "cannot open the arena"),
        ({"fd": 0}, "the owner has ended or gave up the arena"),
        ({"token": "0" * 32}, "the owner has ended or gave up the arena"),
        ({"token": "../../etc"}, "the owner has ended or gave up the arena"),
        ({"nbytes": 8192}, "has 4096 bytes, must have 8192"),
    ],
)
def test_what_is_not_the_arena_is_refused_with_the_reason(changes, message):
    with HostArena(4096) as arena:
        before = descriptors()
        with pytest.raises(ArenaError) as caught:
            MappedArena(changed(arena.location(), **changes))
        assert message in str(caught.value)
        assert descriptors() == before


def test_a_file_that_could_shrink_under_a_write_is_refused():
    with HostArena(4096) as arena:
        fd = os.memfd_create("pdpool-unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            location = changed(arena.location(), fd=fd, token="unsealed")
            with pytest.raises(ArenaError, match="must have F_SEAL_SHRINK"):
                MappedArena(location)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            MappedArena(location).close()
        finally:
            os.close(fd)


def test_the_size_of_an_arena_is_sealed():
    with HostArena(4096) as arena:
        fd = arena.location().fd
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)


def test_memory_outside_every_arena_is_not_found():
    private = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    assert find_arena(Region(private.ctypes.data, 1, 1)) is None


def test_a_location_survives_the_wire():
    with HostArena(4096) as arena:
        location = arena.location()
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(location), type=ArenaLocation) == location

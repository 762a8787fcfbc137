"""Host memory that does not exist is refused before a backend reports transfers of it as done."""

import ctypes
import mmap

import numpy as np
import pytest
from pdpool_connector.layout.mapped import refuse_unmapped
from pdpool_connector.layout.memory import LayoutError, Region

PAGE = mmap.PAGESIZE


@pytest.fixture
def hole():
    """Addresses of four pages, the third of which is not mapped any more."""
    whole = mmap.mmap(-1, 4 * PAGE)
    address = np.frombuffer(whole, np.uint8).ctypes.data
    lib = ctypes.CDLL(None)
    kept = mmap.PROT_READ | mmap.PROT_WRITE
    assert lib.mprotect(ctypes.c_void_p(address + 2 * PAGE), PAGE, 0) == 0
    yield address
    assert lib.mprotect(ctypes.c_void_p(address + 2 * PAGE), PAGE, kept) == 0


def test_what_is_mapped_from_end_to_end_is_taken(hole: int) -> None:
    refuse_unmapped([Region(hole, PAGE, 2), Region(hole + 16, 16, 2), Region(hole + 3 * PAGE, PAGE, 1)])


@pytest.mark.parametrize(("start", "items"), [(0, 3), (1, 3), (2, 1), (2, 2), (0, 4)])
def test_a_region_with_a_hole_is_refused_by_its_address(hole: int, start: int, items: int) -> None:
    region = Region(hole + start * PAGE, PAGE, items)
    with pytest.raises(LayoutError, match=f"region at {region.address:#x} with {region.nbytes} bytes is not memory"):
        refuse_unmapped([Region(hole, PAGE, 2), region])


def test_an_address_at_which_there_is_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="region at 0x1000 with 64 bytes"):
        refuse_unmapped([Region(0x1000, 64, 1)])


def test_a_region_of_a_device_is_not_looked_for() -> None:
    refuse_unmapped([Region(0x1000, 64, 1, 0)])

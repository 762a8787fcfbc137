"""Regions of memory, and the checks that all descriptions of memory share.

A *region* is a dense array of equal items. It lies in host memory or in the memory of one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

MAX_ITEMS: Final = 2**31 - 1
"""Most items of one memory: backends number them as int32."""
MAX_ITEM_BYTES: Final = 2**32
MAX_ADDRESS: Final = 2**63 - 1
"""Bound on the end of a region, so that address arithmetic in int64 cannot wrap."""
MAX_DEVICES: Final = 1024
MAX_NAME: Final = 256
"""Most characters of a name."""


class LayoutError(ValueError):
    """A memory, page list or plan that cannot be right. The message names the field, its value and what is allowed."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A dense array of equal items.

    Args:
        address: Virtual address of the first item.
        item_bytes: Bytes of one item.
        items: Number of items.
        device: Index of the GPU or NPU that holds the region, None for host memory.

    Raises:
        LayoutError: A field is out of bounds, or the region would end beyond `MAX_ADDRESS`.
    """

    address: int
    item_bytes: int
    items: int
    device: int | None = None

    def __post_init__(self) -> None:
        check_range("region.address", self.address, 1, MAX_ADDRESS)
        check_range("region.item_bytes", self.item_bytes, 1, MAX_ITEM_BYTES)
        check_range("region.items", self.items, 1, MAX_ITEMS)
        check_range("region end (address + item_bytes * items)", self.end, 1, MAX_ADDRESS)
        if self.device is not None:
            check_range("region.device", self.device, 0, MAX_DEVICES - 1)

    @property
    def nbytes(self) -> int:
        """Length of the region in bytes."""
        return self.item_bytes * self.items

    @property
    def end(self) -> int:
        """First address behind the region."""
        return self.address + self.nbytes


class Block(NamedTuple):
    """A stretch of memory to register: `nbytes` bytes at `address`, on the host where `device` is None."""

    address: int
    nbytes: int
    device: int | None


def blocks_of(regions: Iterable[Region]) -> tuple[Block, ...]:
    """The stretches that the regions cover, by device and address. Regions that overlap become one stretch.

    Regions that only touch stay apart: they may be different allocations of a device.
    """
    found: list[Block] = []
    for region in sorted(regions, key=lambda region: (device_key(region.device), region.address)):
        last = found[-1] if found else None
        if last is None or last.device != region.device or region.address >= last.address + last.nbytes:
            found.append(Block(region.address, region.nbytes, region.device))
            continue
        end = max(last.address + last.nbytes, region.end)
        found[-1] = Block(last.address, end - last.address, last.device)
    return tuple(found)


def device_key(device: int | None) -> int:
    """A number that sorts the host before every device."""
    return -1 if device is None else device


def place_of(device: int | None) -> str:
    """The name of the memory in messages."""
    return "host memory" if device is None else f"device {device}"


def check_range(field: str, value: int, low: int, high: int) -> None:
    """Raise LayoutError unless `value` is a plain int within `low`..`high`."""
    if type(value) is not int:
        raise LayoutError(f"{field} is {value!r} ({type(value).__name__}), must be a plain int")
    if not low <= value <= high:
        raise LayoutError(f"{field} is {value}, must be {low}..{high}")


def check_kind(field: str, value: object, kind: type) -> None:
    """Raise LayoutError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise LayoutError(f"{field} is {value!r} ({type(value).__name__}), must be a {kind.__name__}")


def check_kinds(field: str, values: object, kind: type, *, or_none: bool = False) -> None:
    """Raise LayoutError unless `values` is a tuple or list of `kind`."""
    if not isinstance(values, tuple | list):
        raise LayoutError(f"{field} is {values!r} ({type(values).__name__}), must be a tuple of {kind.__name__}")
    for index, value in enumerate(values):
        if value is not None or not or_none:
            check_kind(f"{field}[{index}]", value, kind)


def check_name(field: str, value: str) -> None:
    """Raise LayoutError unless `value` is text of 1..`MAX_NAME` characters."""
    check_kind(field, value, str)
    if not 1 <= len(value) <= MAX_NAME:
        raise LayoutError(f"{field} has {len(value)} characters, must have 1..{MAX_NAME}")


def check_pool(field: str, unit: str, regions: Sequence[Region]) -> None:
    """Raise LayoutError unless the regions of one pool have equally many items, one place and no byte in common."""
    counts = sorted({region.items for region in regions})
    if len(counts) > 1:
        raise LayoutError(f"{field} regions hold {counts} {unit}, must all hold the same number")
    places = sorted({region.device for region in regions}, key=device_key)
    if len(places) > 1:
        named = " and ".join(place_of(place) for place in places)
        raise LayoutError(f"{field} regions lie in {named}, must all lie in the same memory")
    ordered = sorted(regions, key=lambda region: region.address)
    for left, right in itertools.pairwise(ordered):
        if left.end > right.address:
            raise LayoutError(
                f"{field} region at {left.address:#x} with {left.nbytes} bytes overlaps the {field} region at "
                f"{right.address:#x}"
            )


def differs(field: str, ours: object, theirs: object) -> str:
    """The line for a field that must be the same at prefill (`ours`) and at decode (`theirs`), and is not."""
    return f"{field} is {ours!r} at prefill and {theirs!r} at decode, must be the same"


def first_of(found: list[str]) -> list[str]:
    """The first line, with the number of the others. Mostly all regions differ in the same way."""
    more = f" ({len(found) - 1} more regions differ)" if len(found) > 1 else ""
    return [line + more for line in found[:1]]

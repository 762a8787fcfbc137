"""What pages hold: words that identify their owner, so that a byte out of place shows where it is from.

Memory is looked at as uint64 words of shape (regions, pages, words of one item). Every item of a page is filled with
one word. That of a request's page is drawn from (owner, logical page, region), that of a free page from (side, page,
region). The draw mixes all bits, so that two patterns agree in a byte by chance only (1 in 256).
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

AUX_PAGE: Final = (1 << 20) - 1
"""Stands in for the logical page of an aux row."""


def _mixed(numbers: Words) -> Words:
    """The finaliser of splitmix64: a bijection in which every bit of the result depends on every bit of the number."""
    numbers = numbers ^ (numbers >> np.uint64(30))
    numbers = numbers * np.uint64(0xBF58476D1CE4E5B9)
    numbers = numbers ^ (numbers >> np.uint64(27))
    numbers = numbers * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _drawn(space: int, pages: NDArray[np.int64], regions: int) -> Words:
    numbers = np.uint64(space) + (pages.astype(np.uint64)[None, :] << np.uint64(12))
    return _mixed(numbers + np.arange(regions, dtype=np.uint64)[:, None])


def owned(owner: int, first_page: int, count: int, regions: int) -> Words:
    """Words of the logical pages `first_page` onward of request `owner` (below 2**30), shape (regions, count)."""
    return _drawn(owner << 32, np.arange(first_page, first_page + count), regions)


def canary(side: int, pages: NDArray[np.int32], regions: int) -> Words:
    """Words of free pages of a process (`side` below 2**30), shape (regions, len(pages))."""
    return _drawn(1 << 63 | side << 32, pages.astype(np.int64), regions)


def foreign_bytes(found: Words, *allowed: Words) -> int:
    """How many bytes of `found` (regions, pages, words) are that byte of none of the `allowed` words (regions, pages).

    By bytes, for a write under way may have filled half a word.
    """
    fits = found == allowed[0][:, :, None]
    for words in allowed[1:]:
        fits |= found == words[:, :, None]
    if fits.all():
        return 0
    odd = ~fits
    strange = found[odd].view(np.uint8)
    fits_byte = np.zeros(strange.shape, bool)
    for words in allowed:
        expected = np.broadcast_to(words[:, :, None], found.shape)[odd]
        fits_byte |= strange == expected.view(np.uint8)
    return int(np.count_nonzero(~fits_byte))

"""Matrix products whose rows do not depend on what else is in the batch, bit for bit.

A BLAS picks its kernel by the shape of the product, and kernels add up in different orders. So every product is cut
into calls of few shapes: (tile, depth) x (depth, BLOCK), with rows padded to a tile. `choose_tiles` tries on this
machine which tiles give a row the same bits at any place in any of them; nothing else is used. A depth of at most
`MAX_DEPTH` keeps OpenBLAS from splitting the sum itself, which it does for some shapes only. Narrow blocks have a
second use: OpenBLAS reads the weights of small calls in place. It copies those of large calls first, which costs more
than the arithmetic of one decode step.
"""

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

Floats = NDArray[np.float32]
Tiles = tuple[int, ...]

BLOCK: Final = 192
"""Columns of one call; 64 to 192 were equally fast for one row, 192 the fastest for many."""
MAX_DEPTH: Final = 288
"""OpenBLAS 0.3.31 sums up to 320 (AVX-512) or 384 (AVX2) products in one go."""
LADDERS: Final[tuple[Tiles, ...]] = ((2, 4, 12, 24, 48, 96), (4, 8), (4,), (2,))
"""Sets of tiles to try, fastest first. With AVX-512 the first one holds; OpenBLAS' AVX2 kernels give the rows of a call
of more than 8 different orders, there the second one holds."""


class BatchVariantError(RuntimeError):
    """With every tile, this machine's BLAS gives a row other bits in another place."""


def pack(matrix: Floats) -> Floats:
    """Lay out a weight matrix (inputs, outputs) as (depths, blocks, depth, BLOCK), outputs padded with zeros.

    Raises ValueError when the inputs cannot be cut into equal depths of at most MAX_DEPTH.
    """
    inputs, outputs = matrix.shape
    depths = -(-inputs // MAX_DEPTH)
    if inputs % depths:
        raise ValueError(f"inputs of a matrix are {inputs}, must be a multiple of {depths}")
    blocks = -(-outputs // BLOCK)
    padded = np.zeros((inputs, blocks * BLOCK), np.float32)
    padded[:, :outputs] = matrix
    return np.ascontiguousarray(padded.reshape(depths, inputs // depths, blocks, BLOCK).transpose(0, 2, 1, 3))


def product(rows: Floats, packed: Floats, tiles: Tiles) -> Floats:
    """`rows` (n, inputs) times a packed matrix: (n, outputs padded to a multiple of BLOCK).

    `tiles` come from `choose_tiles`. The bits of a row depend on that row alone.
    """
    count, inputs = rows.shape
    out = np.empty((count, packed.shape[1] * BLOCK), np.float32)
    done = 0
    while done < count:
        left = count - done
        tile = next((tile for tile in tiles if tile >= left), tiles[-1])
        part = rows[done : done + tile]
        if left < tile:
            part = np.zeros((tile, inputs), np.float32)
            part[:left] = rows[done:]
        out[done : done + tile] = _tile_product(part, packed)[:left]
        done += tile
    return out


@cache
def choose_tiles(depths: tuple[int, ...]) -> Tiles:
    """The fastest set of tiles that is invariant on this machine for calls of these depths.

    Limits BLAS to one thread, for the whole process: threads would cut the products in yet other ways, and engines
    share cores. Raises BatchVariantError when no set holds.
    """
    threadpool_limits(1, "blas")
    for tiles in LADDERS:
        if all(_invariant(tiles, depth) for depth in depths):
            return tiles
    raise BatchVariantError(f"none of the tiles {LADDERS} is batch invariant here for depths {depths}")


def _tile_product(rows: Floats, packed: Floats) -> Floats:
    depths, blocks, depth, _ = packed.shape
    tile = len(rows)
    parts: Floats = rows.reshape(tile, depths, 1, depth).transpose(1, 2, 0, 3) @ packed
    total: Floats = parts[0]
    for part in parts[1:]:
        total += part
    return total.transpose(1, 0, 2).reshape(tile, blocks * BLOCK)


def _invariant(tiles: Tiles, depth: int) -> bool:
    """Whether rows come out the same in each tile, each place in it, and beside other rows."""
    generator = np.random.default_rng(0)
    packed = generator.standard_normal((2, 2, depth, BLOCK), np.float32)
    rows = generator.standard_normal((2 * tiles[-1], 2 * depth), np.float32)
    expected = product(rows, packed, tiles[:1])
    for tile in tiles:
        for _ in range(4):
            order = generator.permutation(len(rows))
            if product(rows[order], packed, (tile,)).tobytes() != expected[order].tobytes():
                return False
    return True

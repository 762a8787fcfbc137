"""Packed matrices multiply rightly, and rows keep their bits."""

import numpy as np
import pytest
from pdpool_reference import products
from pdpool_reference.products import BLOCK, BatchVariantError, choose_tiles, pack, product

RNG = np.random.default_rng(3)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 259), (576, 960), (1536, 576), (7, 1)])
@pytest.mark.parametrize("count", [1, 5, 12, 97, 200])
def test_product_is_the_matrix_product(inputs, outputs, count):
    matrix = RNG.standard_normal((inputs, outputs), np.float32)
    rows = RNG.standard_normal((count, inputs), np.float32)
    packed = pack(matrix)
    found = product(rows, packed, choose_tiles((packed.shape[2],)))
    expected = rows.astype(np.float64) @ matrix
    np.testing.assert_allclose(found[:, :outputs], expected, rtol=0, atol=1e-3)
    assert not found[:, outputs:].any()
    assert found.shape[1] % BLOCK == 0


@pytest.mark.parametrize("inputs", [64, 576, 1536])
def test_row_keeps_bits_beside_other_rows(inputs):
    packed = pack(RNG.standard_normal((inputs, 300), np.float32))
    tiles = choose_tiles((packed.shape[2],))
    rows = RNG.standard_normal((130, inputs), np.float32)
    together = product(rows, packed, tiles)
    for count in (1, 2, 3, 4, 5, 8, 11, 13, 30, 60, 96, 97, 129):
        chosen = RNG.permutation(130)[:count]
        assert product(rows[chosen], packed, tiles).tobytes() == together[chosen].tobytes()


def test_machine_that_varies_bits_is_refused(monkeypatch):
    noise = iter(range(1, 1_000_000))
    honest = products._tile_product
    monkeypatch.setattr(products, "_tile_product", lambda *a: honest(*a) + np.float32(next(noise)))
    with pytest.raises(BatchVariantError, match="batch invariant"):
        choose_tiles.__wrapped__((64,))


def test_tiles_that_vary_bits_are_not_chosen(monkeypatch):
    honest = products._tile_product

    def uneven(rows, packed):
        out = honest(rows, packed)
        out[8:] += np.float32(1e-3)
        return out

    monkeypatch.setattr(products, "_tile_product", uneven)
    assert choose_tiles.__wrapped__((64,)) == (4, 8)


def test_depth_without_even_cut_is_refused():
    with pytest.raises(ValueError, match="inputs of a matrix are 289"):
        pack(np.zeros((289, 3), np.float32))

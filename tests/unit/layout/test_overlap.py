"""Which memories may be paired, and what is said of those that may not."""

import pytest
from pdpool_connector.layout.memory import LayerHeads, LayoutError
from pdpool_connector.layout.overlap import compatible, overlap
from pdpool_connector.layout.plan import PairPlan

from tests.unit.layout.model import Rank


def memory(**fields):
    return Rank(**fields).memory


HALF = {"kv_heads": 2, "total_heads": 4}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {"pages": 999, "aux_rows": 77}),
        ({"kv_heads": 4}, {**HALF, "first_head": 2}),
        ({**HALF, "first_head": 1}, {"kv_heads": 3, "total_heads": 4, "first_head": 0}),
        ({"layers": 1, "total_layers": 6}, {"layers": 4, "total_layers": 6, "first_layer": 2}),
        ({"head_bytes": (5,)}, {"head_bytes": (5,)}),
        ({"kv_order": "interleaved", "kv_heads": 4}, {"kv_order": "interleaved", **HALF}),
        ({"layout": "HND", "kv_heads": 4}, {"layout": "HND", **HALF}),
        (
            {"layout": "HND", "kv_heads": 2, "page_tokens": 2048},
            {"layout": "HND", "total_heads": 2, "page_tokens": 2048},
        ),
        ({"state": (4, 9)}, {"state": (4, 9), "state_items": 50}),
        (
            {"total_layers": 4, "first_layer": 1, "state": (4, 4, 9), "state_layers": (1, 2, 2)},
            {"layers": 4, "state": (6, 4, 4, 9, 7), "state_layers": (0, 1, 2, 2, 3)},
        ),
        (
            {"total_layers": 4, "state": (4,), "state_layers": (0,)},
            {"total_layers": 4, "first_layer": 1, "state": (9,), "state_layers": (2,)},
        ),
        ({"page_tokens": 1023, "kv_heads": 2}, {"page_tokens": 1023, "kv_heads": 1, "total_heads": 2}),
        ({"page_tokens": 4096}, {"page_tokens": 4096}),
    ],
)
def test_parts_of_one_model_may_be_paired_both_ways(ours, theirs):
    assert compatible(memory(**ours), memory(**theirs)) == []
    assert compatible(memory(**theirs), memory(**ours)) == []


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"model": "other"}, ["model is 'm' at prefill and 'other' at decode, must be the same"]),
        ({"dtype": "float16"}, ["dtype is 'uint8' at prefill and 'float16' at decode"]),
        (
            {"page_tokens": 32, "head_dim": 2},
            ["page_tokens is 2 at prefill and 32 at decode", "head_dim is 1 at prefill and 2 at decode"],
        ),
        ({"total_heads": 8}, ["total_heads is 1 at prefill and 8 at decode"]),
        ({"total_layers": 3}, ["total_layers is 2 at prefill and 3 at decode"]),
        ({"head_bytes": (4,)}, ["regions_per_layer is 2 at prefill and 1 at decode"]),
        (
            {"head_bytes": (2, 4)},
            ["is 4 at prefill for 1 heads and 8 at decode for 1 heads, must be the same for each head (1 more"],
        ),
        ({"state": (4,)}, ["state pools (names and order) is [] at prefill and ['mamba'] at decode"]),
        ({"more_state": {"swa": (4,)}}, ["state pools (names and order) is [] at prefill and ['swa'] at decode"]),
        ({"layout": "HND"}, ["layout is 'NHD' at prefill and 'HND' at decode"]),
        ({"kv_order": "interleaved"}, ["kv_order is 'separate' at prefill", "regions_per_layer is 2 at prefill and 1"]),
        ({"aux": (12, 4)}, ["item_bytes of the aux regions is [12] at prefill and [12, 4] at decode"]),
        (
            {"heads": (LayerHeads(1, 1, 0, 1), LayerHeads(1, 3, 0, 1))},
            ["(total_heads, head_dim) of layer 1 is (1, 1) at prefill and (1, 3) at decode, must be the same"],
        ),
    ],
)
def test_every_mismatch_is_named_with_both_values(changes, lines):
    found = compatible(memory(), memory(**changes))
    assert len(found) == len(lines)
    assert all(line in entry for line, entry in zip(lines, found, strict=True))
    with pytest.raises(LayoutError, match="memories cannot be paired"):
        PairPlan(memory(), memory(**changes))


@pytest.mark.parametrize(
    ("ours", "theirs", "line"),
    [
        (
            {"kv_heads": 2},
            {"total_heads": 2, "head_bytes": (1, 2)},
            "is 8 at prefill for 2 heads and 2 at decode for 1 heads",
        ),
        (
            {"layers": 3, "state": (4, 4), "state_layers": (0, 1)},
            {"total_layers": 3, "first_layer": 1, "state": (4, 4), "state_layers": (1, 2)},
            "layers of state pool 'mamba' that both hold is [1] at prefill and [1, 2] at decode, must be the same",
        ),
        (
            {"layers": 3, "state": (4, 4)},
            {"total_layers": 3, "first_layer": 1, "state": (4, 4)},
            "'mamba' is of layers 0..2 and heads 0..0 at prefill and of layers 1..2 and heads 0..0 at decode",
        ),
        (
            {"state": (4,), "state_layers": (0,), "kv_heads": 2},
            {"state": (4,), "state_layers": (0,), "kv_heads": 1, "total_heads": 2},
            "must be of the same heads (as many tensor-parallel ranks on both sides), or `cuts` must say",
        ),
        (
            {"state": (4, 4)},
            {"state": (4, 8)},
            "item_bytes of region 1 of state pool 'mamba' is 4 at prefill and 8 at decode",
        ),
        (
            {"state": (4,), "kv_heads": 2},
            {"state": (4,), "kv_heads": 1, "total_heads": 2},
            "region 0 of state pool 'mamba' is of layers 0..1 and heads 0..1 at prefill and of layers 0..1 and",
        ),
        (
            {"page_tokens": 1024, "kv_heads": 2},
            {"page_tokens": 1024, "total_heads": 2},
            "a page has 1024 strips (page_tokens 1024, layout NHD), must have at most 1023 where the two sides hold",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(ours, theirs, line):
    (found,) = compatible(memory(**ours), memory(**theirs))
    assert line in found


def test_state_of_ranks_with_nothing_in_common_does_not_matter():
    first = memory(layers=1, total_layers=2, state=(4,))
    second = memory(layers=1, total_layers=2, first_layer=1, state=(8, 8))
    assert overlap(first, second).empty
    assert compatible(first, second) == []


def test_the_overlap_is_told_by_the_numbers_of_the_model():
    ours = memory(layers=3, total_layers=8, first_layer=2, kv_heads=4, total_heads=6)
    theirs = memory(layers=4, total_layers=8, first_layer=4, kv_heads=3, total_heads=6, first_head=3)
    assert overlap(ours, theirs) == overlap(theirs, ours) == (4, 1, 3, 1)

"""Pools of SGLang's own classes, described to the connector: K and V, drafts, MLA, windows, Mamba state."""

import pytest


@pytest.fixture(scope="module")
def cases(run_script, engines):
    return {row["name"]: row for row in run_script("pools.py", engines / "models/tiny")}


@pytest.mark.parametrize("name", ["mha", "draft", "mla", "mla draft", "window", "mamba tp1", "mamba tp2"])
def test_regions_are_the_tensors(cases, name):
    case = cases[name]
    assert case["kv"] == case["tensors"]
    assert case["pages"] == 32
    assert case["aux"] == [8, 10]


def test_second_tensor_rank_holds_later_heads(cases):
    assert cases["mha"]["heads"] == [2, 2, 4]


def test_draft_has_its_own_heads(cases):
    assert cases["draft"]["layers"] == [[2, 32], [2, 32], [2, 32], [1, 64]]


def test_latent_is_whole_on_every_rank(cases):
    assert (cases["mla"]["heads"], cases["mla"]["head_dim"]) == ([1, 0, 1], 80)


def test_window_is_cut_by_heads(cases):
    (pool,) = cases["window"]["state"]
    assert (pool["name"], pool["cuts"]) == ("swa", [[16, 2]] * 4)


def test_mamba_shares_make_up_the_whole(cases):
    (whole,), (half,) = cases["mamba tp1"]["state"], cases["mamba tp2"]["state"]
    assert whole["cuts"] == [[1, 16, 16, 32]] * 2 + [[1, 8]] * 2
    assert half["cuts"] == [[1, 8, 8, 16]] * 2 + [[1, 4]] * 2
    assert half["share"] == [1, 2]
    assert [one[1] for one in whole["regions"]] == [2 * one[1] for one in half["regions"]]

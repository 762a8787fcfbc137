"""What the plugin reads of SGLang's own published configuration: data parallelism, DP attention, refusals."""

import itertools

import pytest

ENGINES = [
    # tensor, data, DP attention: ranks of an instance, connectors of the pod
    ((1, 1, False), 1, 1),
    ((4, 1, False), 4, 4),
    ((2, 2, False), 2, 4),
    ((2, 2, True), 1, 2),
    ((4, 2, True), 2, 4),
    ((4, 4, True), 1, 4),
    ((8, 2, True), 4, 8),
]


@pytest.fixture(scope="module")
def rows(run_script, engines):
    return run_script("ranks.py", engines / "models/tiny")


@pytest.mark.parametrize(("engine", "width", "connectors"), ENGINES)
def test_each_data_parallel_rank_is_an_instance_with_a_registry_of_its_own(rows, engine, width, connectors):
    found = [row for row in rows if row["engine"] == [*engine, ""] and not row["refused"]]
    assert [row["pod"] for row in found] == [[number, connectors] for number in range(connectors)]
    assert [row["control"] for row in found] == list(range(9100, 9100 + connectors))
    instances = {
        rank: [row["place"] for row in members] for rank, members in itertools.groupby(found, lambda row: row["dp"][0])
    }
    assert instances == {rank: [[one, width] for one in range(width)] for rank in range(engine[1])}
    assert {(row["dp"][0], row["registry"]) for row in found} == {(rank, 8998 + rank) for rank in range(engine[1])}


def test_sglang_dp_rank_moves_no_registry(rows):
    (row,) = [row for row in rows if row["engine"][3]]
    assert (row["dp"], row["registry"], row["control"]) == ([0, 1], 8998, 9100)


def test_each_setting_that_cannot_work_is_refused(rows):
    assert [row["refused"] for row in rows if row["refused"]] == [
        ["--pp-size above 1"],
        ["--enable-memory-saver"],
        ["--load-balance-method"],
        ["data parallelism of prefill over several nodes"],
        ["SGLANG_DISAGG_STAGING_BUFFER"],
        ["SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK"],
        ["KV cache layout hnd"],
    ]

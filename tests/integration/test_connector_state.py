"""Hybrid models between instances of different tensor parallelism, each rank a real process.

A layer of the model has two state pools. The first holds three convolutions. One is of q, k and v,
one of a single group behind another axis, one of a Mamba whose B and C every rank has. It also holds heads of a
recurrent state. The second holds pages of a sliding window, which move whole, under ids of their own. The cache has
fewer heads than ranks: some ranks write state to a rank to which they write no page.
"""

from dataclasses import astuple

import numpy as np
import pytest

from tests.integration.connector_peer import STATE_ITEMS, Side
from tests.integration.handoffs import TIMEOUTS
from tests.integration.instances import AUX_FROM, AUX_TO, SOURCE, TARGET, Instance, check_bytes, open_both, shape
from tests.state_kinds import Kind

KINDS = {
    "mamba": (
        Kind(1, (8, 8, 16), (False, False, False), 6),
        Kind(3, (4,), (False,), 2),
        Kind(1, (8, 5, 5), (False, True, True), 6),
        Kind(1, (4,), (False,), 256),
    ),
    "window": (Kind(),),
}
FROM = {"mamba": [6], "window": [3, 0]}
TO = {"mamba": [2], "window": [7, 4]}


def hybrid(layers, heads, tp) -> dict:
    return shape(layers, heads, tp) | {"split_state": True}


SHAPES = {
    "TP 4 to 2, two heads": (hybrid([1], 2, 4), hybrid([1], 2, 2)),
    "TP 2 to 4, two heads": (hybrid([1], 2, 2), hybrid([1], 2, 4)),
    "PP 2 x TP 2 to PP 2, split elsewhere, one head": (hybrid([2, 1], 1, 2), hybrid([1, 2], 1, 1)),
}


@pytest.fixture
def pair(instances):
    def make(backend: str, shapes: str) -> tuple[Instance, Instance]:
        state = {name: [astuple(kind) for kind in kinds] for name, kinds in KINDS.items()}
        prefill, decode = SHAPES[shapes]
        return instances("prefill", backend, prefill, state=state), instances("decode", backend, decode, state=state)

    return make


def share(side: Side, seed: int) -> dict[str, list[np.ndarray]]:
    """What this rank's regions hold of the model's state, by pool."""
    shard = side.shard
    return {
        name: [
            kind.share(STATE_ITEMS, (seed, layer, at, len(name)), shard.state_rank, shard.state_ranks)
            for layer in range(shard.first_layer, shard.layer_end)
            for at, kind in enumerate(kinds)
        ]
        for name, kinds in KINDS.items()
    }


def fill(prefill: Instance, seed: int) -> np.ndarray:
    for side in prefill.ranks:
        for name, contents in share(side, seed).items():
            for region, content in zip(side.state[name], contents, strict=True):
                region[:] = content
    return prefill.fill(seed)


def send(prefill: Instance, name: str) -> None:
    prefill.send(name, SOURCE, aux_slot=AUX_FROM, state=FROM)


def check_state(decode: Instance, seed: int) -> None:
    """Each decode rank has its share in the items that it offered, and its other items are as they were."""
    for side in decode.ranks:
        for name, contents in share(side, seed).items():
            for region, content in zip(side.state[name], contents, strict=True):
                expected = np.zeros_like(region)
                expected[TO[name]] = content[FROM[name]]
                assert np.array_equal(region, expected), name


@pytest.mark.parametrize(
    ("backend", "shapes"),
    [("nixl", "TP 2 to 4, two heads"), ("local", "PP 2 x TP 2 to PP 2, split elsewhere, one head")],
)
def test_each_share_of_state_arrives_once(pair, backend, shapes) -> None:
    prefill, decode = pair(backend, shapes)
    whole = fill(prefill, 1)
    open_both(prefill, decode, 7, state=TO)
    send(prefill, "r")
    decode.until("r", "done")
    prefill.until("r", "done")
    check_bytes(prefill, decode, whole)
    check_state(decode, 1)
    for side in decode.ranks:
        cells = side.cells[:, :, TARGET].nbytes
        state = sum(region[TO[name]].nbytes for name, regions in side.state.items() for region in regions)
        assert side.status("r")["bytes_moved"] == cells + state + side.aux[AUX_TO].nbytes, "once, and no byte more"
    for instance in (prefill, decode):
        instance.settle_empty()


def test_state_of_aborted_hand_off_serves_the_next(pair) -> None:
    prefill, decode = pair("nixl", "TP 4 to 2, two heads")
    fill(prefill, 1)
    open_both(prefill, decode, 7, "cut short", state=TO)
    prefill.until("cut short", "ready")
    for side in prefill.ranks:
        side.call("hold_writes")
    send(prefill, "cut short")
    prefill.settle(lambda stats: stats["held_writes"] > 0)
    decode.abort("cut short")
    assert not any(status["releasable"] for status in decode.until("cut short", "ended"))
    prefill.until("cut short", "ended")
    for side in prefill.ranks:
        side.call("release_writes")
    assert {status["cause"] for status in decode.until("cut short", "releasable")} == {"aborted"}
    assert {status["cause"] for status in prefill.until("cut short", "releasable")} == {"peer_aborted"}
    for instance in (prefill, decode):
        instance.settle_empty()
    whole = fill(prefill, 2)
    for side in decode.ranks:
        side.pages[:] = side.aux[:] = 0
        for region in (region for regions in side.state.values() for region in regions):
            region[:] = 0
    open_both(prefill, decode, 8, "next", state=TO)
    send(prefill, "next")
    decode.until("next", "done")
    prefill.until("next", "done")
    check_bytes(prefill, decode, whole)
    check_state(decode, 2)
    for instance in (prefill, decode):
        instance.settle_empty()


def test_cut_and_whole_state_do_not_pair(instances) -> None:
    state = {"mamba": [astuple(Kind(1, (4,), (False,), 2))]}
    prefill = instances("prefill", "local", hybrid([1], 1, 1), state=state)
    decode = instances("decode", "local", shape([1], 1), timeouts={**TIMEOUTS, "connect_s": 5.0})
    open_both(prefill, decode, 7)
    (status,) = decode.until("r", "ended")
    assert (status["cause"], status["releasable"]) == ("invalid", True)
    assert "state_ranks is 1 at prefill and 0 at decode, must be 0 on both sides or on neither" in status["message"]

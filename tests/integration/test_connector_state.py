"""Hybrid models between instances of different tensor parallelism, each rank a real process: whose state arrives where.

A layer of the model keeps a convolution of q, k and v, one of a single group behind another axis, one of a Mamba whose
B and C every rank has, heads of a recurrent state, and pages of a sliding window, which move whole. Heads of the cache
are fewer than ranks: some ranks write state to a rank to which they write no page.
"""

from dataclasses import astuple

import numpy as np
import pytest

from tests.integration.connector_peer import STATE_ITEMS, Side
from tests.integration.instances import AUX_FROM, AUX_TO, SOURCE, TARGET, Instance, check_bytes, meet, shape
from tests.state_kinds import Kind

KINDS = (
    Kind(1, (8, 8, 16), (False, False, False), 6),
    Kind(3, (4,), (False,), 2),
    Kind(1, (8, 5, 5), (False, True, True), 6),
    Kind(1, (4,), (False,), 256),
    Kind(),
)
FROM, TO = [6], [2]


def hybrid(layers, heads, tp) -> dict:
    return shape(layers, heads, tp) | {"split_state": True}


SHAPES = {
    "TP 4 to 2, two heads": (hybrid([1], 2, 4), hybrid([1], 2, 2)),
    "TP 2 to 4, two heads": (hybrid([1], 2, 2), hybrid([1], 2, 4)),
    "PP 2 x TP 2 to PP 2, split elsewhere, one head": (hybrid([2, 1], 1, 2), hybrid([1, 2], 1, 1)),
}


@pytest.fixture
def pair(instances):
    def make(backend: str, direction: str, shapes: str) -> tuple[Instance, Instance]:
        more = {"direction": direction, "state": [astuple(kind) for kind in KINDS]}
        prefill, decode = SHAPES[shapes]
        return instances("prefill", backend, prefill, **more), instances("decode", backend, decode, **more)

    return make


def share(side: Side, seed: int) -> list[np.ndarray]:
    """What this rank's regions hold of the model's state."""
    part = side.part
    return [
        kind.share(STATE_ITEMS, (seed, layer, at), part.state_rank, part.state_ranks)
        for layer in range(part.first_layer, part.layer_end)
        for at, kind in enumerate(KINDS)
    ]


def fill(prefill: Instance, seed: int) -> np.ndarray:
    for side in prefill.ranks:
        for region, content in zip(side.state, share(side, seed), strict=True):
            region[:] = content
    return prefill.fill(seed)


def send(prefill: Instance, name: str) -> None:
    prefill.send(name, SOURCE, aux_slot=AUX_FROM, state=FROM)


def check_state(decode: Instance, seed: int) -> None:
    """Each decode rank has its share in the item that it offered, and nothing of its other items was touched."""
    for side in decode.ranks:
        for region, content in zip(side.state, share(side, seed), strict=True):
            expected = np.zeros_like(region)
            expected[TO] = content[FROM]
            assert np.array_equal(region, expected)


@pytest.mark.parametrize(
    ("backend", "direction", "shapes"),
    [
        ("nixl", "write", "TP 2 to 4, two heads"),
        ("local", "read", "TP 4 to 2, two heads"),
        ("local", "read", "PP 2 x TP 2 to PP 2, split elsewhere, one head"),
    ],
)
def test_each_share_of_state_arrives_once_whatever_the_two_shapes_are(pair, backend, direction, shapes) -> None:
    prefill, decode = pair(backend, direction, shapes)
    whole = fill(prefill, 1)
    meet(prefill, decode, 7, state=TO)
    send(prefill, "r")
    decode.until("r", "done")
    prefill.until("r", "done")
    check_bytes(prefill, decode, whole)
    check_state(decode, 1)
    for side in decode.ranks:
        cells = side.cells[:, :, TARGET].nbytes
        state = sum(region[TO].nbytes for region in side.state)
        assert side.status("r")["bytes_moved"] == cells + state + side.aux[AUX_TO].nbytes, "once, and no byte more"
    for instance in (prefill, decode):
        instance.settle_empty()


def test_an_abort_while_state_is_under_way_leaves_nothing_and_its_memory_serves_the_next(pair) -> None:
    prefill, decode = pair("nixl", "write", "TP 4 to 2, two heads")
    fill(prefill, 1)
    meet(prefill, decode, 7, "cut short", state=TO)
    prefill.until("cut short", "ready")
    for side in prefill.ranks:
        side.call("hold_writes")
    send(prefill, "cut short")
    prefill.settle(lambda stats: stats["held_writes"] > 0)
    decode.abort("cut short")
    assert not any(status["releasable"] for status in decode.until("cut short", "ended"))
    for side in prefill.ranks:
        side.call("release_writes")
    assert {status["cause"] for status in decode.until("cut short", "releasable")} == {"aborted"}
    assert {status["cause"] for status in prefill.until("cut short", "releasable")} == {"peer_aborted"}
    for instance in (prefill, decode):
        instance.settle_empty()
    whole = fill(prefill, 2)
    for side in decode.ranks:
        side.pages[:] = side.aux[:] = 0
        for region in side.state:
            region[:] = 0
    meet(prefill, decode, 8, "next", state=TO)
    send(prefill, "next")
    decode.until("next", "done")
    prefill.until("next", "done")
    check_bytes(prefill, decode, whole)
    check_state(decode, 2)
    for instance in (prefill, decode):
        instance.settle_empty()


def test_a_prefill_whose_state_is_cut_and_a_decode_whose_is_not_are_told_why_they_do_not_pair(instances) -> None:
    kinds = [astuple(Kind(1, (4,), (False,), 2))]
    prefill = instances("prefill", "local", hybrid([1], 1, 1), state=kinds)
    decode = instances("decode", "local", shape([1], 1), connect_deadline_s=5.0)
    meet(prefill, decode, 7)
    (status,) = decode.until("r", "ended")
    assert (status["cause"], status["releasable"]) == ("invalid", True)
    assert "state_ranks is 1 at prefill and 0 at decode, must be 0 on both sides or on neither" in status["message"]

"""Instances of which one, or one rank, speaks the version before ours at most: ranks that share a peer.

Each rank is a real process.
"""

import pytest
from pdpool_connector.protocol import frames as f

from tests.integration.instances import AUX_FROM, SOURCE, Instance, check_bytes, hand_over, meet, shape

OURS, THEIRS = f.VERSION_MAX, f.VERSION_MAX - 1
SHAPES = {
    "two decode ranks share a prefill rank": (shape([2]), shape([2], tp=2)),
    "two prefill ranks share a decode rank": (shape([1, 1]), shape([2])),
}


def versions(instance: Instance, peers: int) -> set[int]:
    """In which its ranks have spoken to peers that they have settled one with."""
    said = {frame for stats in instance.settle(lambda stats: len(stats["peers"]) == peers) for frame in stats["said"]}
    return {int(frame.split()[1]) for frame in said if not frame.startswith("Hello ")}


def give_up(prefill: Instance, decode: Instance, direction: str, giver: Instance) -> None:
    """The last rank of one side gives up a hand-off that moves: all others end with it, once nothing is in flight."""
    movers, peers = (prefill, decode) if direction == "write" else (decode, prefill)
    meet(prefill, decode, 8, "cut short")
    prefill.until("cut short", "ready")
    for side in movers.ranks:
        side.call("hold_writes")
    prefill.send("cut short", SOURCE, aux_slot=AUX_FROM)
    movers.settle(lambda stats: stats["held_writes"] == len(peers.ranks))
    giver.ranks[-1].abort("cut short")
    (told,) = [instance for instance in (prefill, decode) if instance is not giver]
    assert giver.ranks[-1].until("cut short", "ended")["cause"] == "aborted"
    ended = told.until("cut short", "ended")
    assert {status["cause"] for status in ended} == {"peer_aborted"}
    assert not any(status["releasable"] for status in ended)
    for side in movers.ranks:
        side.call("release_writes")
    for instance in (prefill, decode):
        instance.until("cut short", "releasable")
        instance.settle_empty()


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("older", ["prefill", "decode"])
def test_every_part_arrives_and_one_that_gives_up_ends_the_others(instances, older, direction, shapes) -> None:
    prefill, decode = (
        instances(role, "local", ranks, direction=direction, speaks=THEIRS if role == older else OURS)
        for role, ranks in zip(("prefill", "decode"), SHAPES[shapes], strict=True)
    )
    check_bytes(prefill, decode, hand_over(prefill, decode, 7, "first"))
    for giver in (prefill, decode):
        give_up(prefill, decode, direction, giver)
    for side in decode.ranks:
        side.pages[:] = side.aux[:] = 0
    check_bytes(prefill, decode, hand_over(prefill, decode, 9, "next", seed=2))
    assert versions(prefill, len(decode.ranks)) == versions(decode, len(prefill.ranks)) == {THEIRS}


@pytest.mark.parametrize(("mixed", "first"), [("prefill", OURS), ("prefill", THEIRS), ("decode", OURS)])
def test_an_instance_with_ranks_of_both_speaks_with_each_in_its_own(instances, mixed: str, first: int) -> None:
    theirs, ours = SHAPES[f"two {mixed} ranks share a {'decode' if mixed == 'prefill' else 'prefill'} rank"]
    prefill, decode = (
        instances(role, "local", ranks, speaks=first if role == mixed else OURS)
        for role, ranks in (("prefill", theirs), ("decode", ours))
    )
    one, other = (prefill, decode) if mixed == "prefill" else (decode, prefill)
    one.kill(1)
    one.options["speaks"] = THEIRS if first == OURS else OURS
    one.restart(1)
    check_bytes(prefill, decode, hand_over(prefill, decode, 7, "r"))
    assert versions(other, 2) == {THEIRS, OURS}

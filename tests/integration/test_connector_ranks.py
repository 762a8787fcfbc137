"""Instances of many ranks, each a real process: what arrives, and what is left when one rank fails or dies."""

import contextlib
import re
import socket
import time

import pytest
from pdpool_connector import Cause, Phase
from pdpool_connector.protocol.timeouts import Timeouts

from tests.integration.cable import Cable, ask
from tests.integration.connector_peer import HEAD_BYTES, TOKENS, Side
from tests.integration.handoffs import TIMEOUTS
from tests.integration.instances import AUX_FROM, AUX_TO, SOURCE, TARGET, check_bytes, hand_over, open_both, shape

REGISTRY_S = Timeouts().registry_s
SHAPES = {
    "TP 2 to 2": (shape([3], tp=2), shape([3], tp=2)),
    "TP 1 to 2": (shape([3]), shape([3], tp=2)),
    "TP 2 to 1": (shape([3], tp=2), shape([3])),
    "PP 2 to 1": (shape([2, 1]), shape([3])),
    "PP 2 to PP 2, split elsewhere": (shape([2, 1]), shape([1, 2])),
    "PP 2 x TP 2 to TP 2": (shape([2, 1], tp=2), shape([3], tp=2)),
    "one head replicated, TP 2 to 1": (shape([3], heads=1, tp=2), shape([3], heads=1)),
    "one head replicated, TP 1 to 2": (shape([3], heads=1), shape([3], heads=1, tp=2)),
}


@pytest.mark.parametrize("backend", ["local", "nixl"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_every_cell_arrives_once_between_unlike_shapes(instances, backend: str, shapes: str) -> None:
    theirs, ours = SHAPES[shapes]
    prefill, decode = instances("prefill", backend, theirs), instances("decode", backend, ours)
    whole = hand_over(prefill, decode, 7, "r")
    check_bytes(prefill, decode, whole)
    moved = sum(side.status("r")["bytes_moved"] for side in decode.ranks)
    cells = sum(shard.layers * shard.kv_heads for shard in decode.shards)
    aux_bytes = decode.ranks[0].aux.shape[1]
    assert moved == cells * 2 * len(SOURCE) * TOKENS * HEAD_BYTES + len(decode.shards) * aux_bytes
    for instance in (prefill, decode):
        instance.settle_empty()
    decode.settle(lambda stats: stats["checksums"] == {"matched": 1, "mismatched": 0, "skipped": 0})


@pytest.mark.parametrize("backend", ["local", "nixl"])
def test_killed_rank_fails_its_own_attempts(instances, backend) -> None:
    two = shape([3], tp=2)
    prefill, other, decode = (instances(role, backend, two) for role in ("prefill", "prefill", "decode"))
    prefill.fill(1)
    open_both(prefill, decode, 7, "lost")
    open_both(other, decode, 7, "kept", pages=[20])
    for instance in (prefill, other):
        instance.until("lost" if instance is prefill else "kept", "ready")
    gone = prefill.kill(1)
    killed = time.monotonic()
    status = decode.ranks[1].until("lost", "ended")
    assert status["at"] - killed < 2.0
    assert (status["cause"], status["releasable"]) == ("peer_lost", False)
    assert "rank 1 of prefill" in status["message"]
    assert decode.ranks[0].status("lost")["phase"] == "transferring"
    assert prefill.ranks[0].status("lost")["phase"] == "ready"

    decode.ranks[0].abort("lost")
    assert decode.ranks[0].until("lost", "releasable")["cause"] == "aborted"
    assert prefill.ranks[0].until("lost", "releasable")["cause"] == "peer_aborted"
    decode.ranks[1].call("fence", incarnation=gone.incarnation)
    decode.ranks[1].until("lost", "releasable")
    other.send("kept", [5], aux_slot=AUX_FROM)
    decode.until("kept", "done")

    prefill.restart(1)
    for side in decode.ranks:
        side.pages[:] = side.aux[:] = 0
    check_bytes(prefill, decode, hand_over(prefill, decode, 7, "again", seed=2))
    for instance in (prefill, other, decode):
        instance.settle_empty()


def test_rank_cut_off_fails_its_own_attempts(instances) -> None:
    prefill, decode = instances("prefill", "local", shape([2, 1])), instances("decode", "local", shape([3]))
    with contextlib.closing(Cable(prefill.ranks[1])) as wire:
        prefill.open("r", 7)
        decode.open("r", 7, prefill=wire.bootstrap, pages=TARGET, aux_slot=AUX_TO)
        prefill.until("r", "ready")
        wire.plugged = False
        wire.cut()
        (status,) = decode.until("r", "ended")
        assert (status["cause"], status["releasable"]) == ("peer_lost", False)
        assert prefill.ranks[1].until("r", "ended")["cause"] == "peer_lost"
        assert prefill.ranks[0].until("r", "releasable")["cause"] in ("peer_lost", "peer_aborted")
        (stats,) = decode.settle(lambda stats: stats["holds"] == 1)
        assert [peer["incarnation"] for peer in stats["peers"]] == [prefill.ranks[0].incarnation]
        wire.plugged = True
        prefill.open("meanwhile", 8)
        decode.open("meanwhile", 8, prefill=wire.bootstrap, pages=[0], aux_slot=0)
        prefill.abort("meanwhile")
        assert decode.until("meanwhile", "ended")[0]["cause"] == "peer_aborted"
        assert decode.until("r", "releasable")[0]["cause"] == "peer_lost"
        whole = prefill.fill(2)
        open_both(prefill, decode, 9, "again")
        prefill.send("again", SOURCE, aux_slot=AUX_FROM)
        decode.until("again", "done")
        check_bytes(prefill, decode, whole)
        for instance in (prefill, decode):
            instance.settle_empty()


def test_killed_decode_rank_fails_ranks_beside_it(instances) -> None:
    prefill, decode = instances("prefill", "local", shape([3])), instances("decode", "local", shape([3], tp=2))
    open_both(prefill, decode, 7)
    prefill.until("r", "ready")
    decode.kill(1)
    killed = time.monotonic()
    (status,) = prefill.until("r", "ended")
    assert status["cause"] == "peer_lost"
    told = decode.ranks[0].until("r", "ended")
    assert told["releasable"]
    assert max(status["at"], told["at"]) - killed < 2.0
    decode.restart(1)
    check_bytes(prefill, decode, hand_over(prefill, decode, 8, "again", seed=2))
    for instance in (prefill, decode):
        instance.settle_empty()


@pytest.mark.parametrize(
    "when", ["before decode knows", "ready", "after the other rank has sent", "its data plane fails"]
)
def test_failure_of_one_stage_fails_every_rank(capfd, instances, when: str) -> None:
    prefill = instances("prefill", "local", shape([2, 1]), log="INFO")
    # A rank that only the other stage serves gets its pages, also when a write of this stage fails.
    decode = instances("decode", "local", shape([3] if when == "its data plane fails" else [1, 2]), log="INFO")
    own, told, outcome = ("aborted", "peer_aborted", "aborted")
    prefill.fill(1)
    prefill.open("r", 7)
    if when == "before decode knows":
        prefill.ranks[1].abort("r")
    decode.open("r", 7, prefill=prefill.bootstrap, pages=TARGET, aux_slot=AUX_TO)
    if when != "before decode knows":
        prefill.until("r", "ready")
    if when == "after the other rank has sent":
        prefill.ranks[0].send("r", SOURCE, aux_slot=AUX_FROM)
        prefill.ranks[0].settle(lambda stats: stats["bytes_moved_total"] > 0)
    if when == "its data plane fails":
        own, told, outcome = ("transfer_failed", "transfer_failed", "failed")
        prefill.ranks[1].call("break_writes", pages=SOURCE)
        prefill.send("r", SOURCE, aux_slot=AUX_FROM)
    elif when != "before decode knows":
        prefill.ranks[1].abort("r")
    assert prefill.ranks[1].until("r", "releasable")["cause"] == own
    for status in decode.until("r", "releasable"):
        assert status["cause"] == told
    assert prefill.ranks[0].until("r", "releasable")["phase"] in ("failed", "done")
    for instance in (prefill, decode):
        instance.settle_empty()
    counted = [
        stats for instance in (prefill, decode) for stats in instance.settle(lambda one: sum(one["outcomes"].values()))
    ]
    nothing = {"done": 0, "failed": 0, "aborted": 0}
    for stats in counted:
        if (stats["role"], stats["rank"]) == ("prefill", 0):  # it may have done all that it had to by then
            assert sum(stats["outcomes"].values()) == 1
            assert stats["causes"] in ({}, {told: 1})
        else:
            cause = own if stats["role"] == "prefill" else told
            assert stats["outcomes"] == nothing | {outcome: 1}
            assert stats["causes"] == {cause: 1}
    ends = re.findall(
        r"(prefill|decode) rank=(\d) attempt=\S+ room=7 request_id='r'.* (done|failed|aborted): (?:cause=(\w+))?",
        capfd.readouterr().err,
    )
    said = {(role, int(rank)): (ended, cause) for role, rank, ended, cause in ends}
    assert len(ends) == len(said) == len(counted), "one line for each rank"
    assert said["prefill", 1] == (outcome, own)
    assert {said["decode", rank] for rank in range(len(decode.ranks))} == {(outcome, told)}
    assert said["prefill", 0] in {("done", ""), (outcome, told)}


def test_ranks_without_common_peer_agree_on_root_cause(instances) -> None:
    two = shape([3], tp=2)
    prefill, decode = instances("prefill", "local", two), instances("decode", "local", two)
    open_both(prefill, decode, 7)
    prefill.until("r", "ready")
    prefill.ranks[0].send("r", SOURCE, aux_slot=AUX_FROM)
    decode.ranks[0].until("r", "done")
    assert prefill.agreed("r", 7).phase is Phase.READY
    prefill.ranks[1].send("r", SOURCE, start=5, aux_slot=AUX_FROM)
    decode.ranks[1].until("r", "ended")
    for instance in (prefill, decode):
        agreed = instance.agreed("r", 7)
        assert (agreed.phase, agreed.rank, agreed.cause) == (Phase.FAILED, 1, Cause.INVALID)
        assert "decode offered" in agreed.message
        instance.abort("r")
        instance.until("r", "releasable")
        assert instance.agreed("r", 7) == agreed
        instance.settle_empty()


def test_attempts_wait_for_late_rank(instances) -> None:
    prefill, decode = instances("prefill", "local", shape([2, 1])), instances("decode", "local", shape([3]))
    prefill.kill(1)
    decode.open("r", 7, prefill=prefill.bootstrap, pages=TARGET, aux_slot=AUX_TO)
    (link,) = decode.ranks[0].settle(lambda stats: stats["links"] and stats["links"][0]["failure"])["links"]
    assert decode.ranks[0].status("r")["phase"] == "waiting"
    assert link["state"] in ("asking", "pausing", "joining")
    prefill.restart(1)
    whole = prefill.fill(3)
    prefill.open("r", 7)
    prefill.send("r", SOURCE, aux_slot=AUX_FROM)
    decode.until("r", "done")
    check_bytes(prefill, decode, whole)


def test_attempts_fail_naming_missing_ranks(instances) -> None:
    two = shape([1, 1, 1])
    lonely = Side("prefill", "local", timeouts=TIMEOUTS, shape=two)
    with contextlib.ExitStack() as stack:
        stack.callback(lonely.end)
        decode = instances("decode", "local", shape([3]), timeouts={**TIMEOUTS, "connect_s": 1.0})
        decode.open("r", 7, prefill=lonely.bootstrap, pages=TARGET, aux_slot=AUX_TO)
        (status,) = decode.until("r", "ended")
        assert (status["cause"], status["releasable"]) == ("peer_lost", True)
        assert "these are missing: 1 (never registered), 2 (never registered)" in status["message"]
        (registry,) = lonely.stats()["links"]
        assert (registry["state"], registry["missing"]) == ("incomplete", [1, 2])


def test_restarted_instance_is_paired_again(instances) -> None:
    prefill, decode = instances("prefill", "local", shape([2, 1])), instances("decode", "local", shape([3]))
    hand_over(prefill, decode, 7, "first")
    for rank in (0, 1):
        prefill.kill(rank)
    for rank in (0, 1):
        prefill.restart(rank)
    for side in decode.ranks:
        side.pages[:] = side.aux[:] = 0
    check_bytes(prefill, decode, hand_over(prefill, decode, 8, "second", seed=2))


def test_silent_bootstrap_hosts_delay_no_other(instances) -> None:
    prefill = instances("prefill", "local", shape([3]))
    decode = instances("decode", "local", shape([3]), request_deadline_s=120.0)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(60)]
    with contextlib.ExitStack() as stack:
        for number, listener in enumerate(listeners):
            stack.enter_context(listener)
            silent = f"127.0.0.1:{listener.getsockname()[1]}"
            decode.open(f"silent{number}", 100 + number, prefill=silent)
        begun = time.monotonic()
        hand_over(prefill, decode, 7, "r")
        assert time.monotonic() - begun < 60 * REGISTRY_S / 2, "as if they were asked one after the other"
        (side,) = decode.ranks
        side.settle(lambda stats: sum(bool(link["failure"]) for link in stats["links"]) == 60)
        links = {link["address"]: link for link in ask(side.admin, "/v1/state")["links"]}
        assert links[prefill.bootstrap]["state"] == "linked"
        assert f"no answer within {REGISTRY_S} s" in links[silent]["failure"]

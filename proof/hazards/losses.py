"""H24: frames that are lost, and the staging memory that a hand-off has reserved at that moment."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, get_args

import numpy as np
from pdpool_connector.layout.staging import SLOT_BYTES
from pdpool_connector.protocol import frames as f

from proof.hazards.stage import CANARY, Stage, hazard
from tests.integration import instances
from tests.integration.handoffs import TIMEOUTS, offer, open_both
from tests.integration.instances import Instance, shape

KINDS: Final = frozenset(kind.__name__ for kind in get_args(f.SingleFrame))
TURNS: Final = 20
PAGES: Final = 12
TARGET: Final = list(range(30, 30 + PAGES))
HELLO_S: Final = 1.0

Trial = Callable[[Stage, str], None]


@hazard(24, "one lost message stalls a hand-off for ever, or keeps a slot of staging memory")
def lost_message(stage: Stage) -> str:
    tried = [*TRIALS, *GREETINGS]
    assert sorted(tried) == sorted(KINDS), f"not tried, or unknown: {KINDS.symmetric_difference(tried)}"
    slowest = 0.0
    trials = {**TRIALS, **(GREETINGS if stage.backend == "nixl" else {})}
    for kind, trial in trials.items():
        begun = time.monotonic()
        trial(stage, kind)
        slowest = max(slowest, time.monotonic() - begun)
    return f"lost: {', '.join(trials)}, which took {slowest:.1f} s at most; {_staged(stage)}"


@contextmanager
def _losing(side: Any, kind: str) -> Iterator[None]:  # noqa: ANN401 - the tests' driver is not typed
    """Inside, a side's frames of a kind are lost; it ends when one was."""
    before = _lost(side, kind)
    side.lose(kind)
    try:
        yield
        side.settle(lambda stats: stats["lost"].get(kind, 0) > before)
    finally:
        side.lose()


def _lost(side: Any, kind: str) -> int:  # noqa: ANN401 - as above
    return int(side.stats()["lost"].get(kind, 0))


def _on_the_way(sender: str) -> Trial:
    """A hand-off in two sends, for which decode offers memory after the first."""

    def trial(stage: Stage, kind: str) -> None:
        prefill, decode = stage.prefill, stage.decode
        name, room = stage.name(), stage.room()
        decode.pages[:, [8, 3]] = CANARY
        with _losing(prefill if sender == "prefill" else decode, kind):
            prefill.open(name, room)
            decode.open(name, room, prefill=prefill.bootstrap)
            prefill.send(name, [1], last=False)
            decode.offer(name, [8, 3])
            prefill.send(name, [2], start=1)
        for side in (decode, prefill):
            side.until(name, "done")
        assert (decode.pages[:, [8, 3]] == prefill.pages[:, [1, 2]]).all(), f"wrong bytes when {kind} was lost"

    return trial


def _accepted(stage: Stage, kind: str) -> None:
    """Prefill answers decode's repetitions while there is nothing to write yet."""
    name, _ = stage.open_both()
    with _losing(stage.prefill, kind):
        stage.prefill.until(name, "ready")
    stage.prefill.send(name, [1, 2])
    for side in (stage.decode, stage.prefill):
        side.until(name, "done")


def _query(stage: Stage, kind: str) -> None:
    name, _ = stage.open_both()
    with _losing(stage.decode, kind):
        stage.prefill.until(name, "ready")
    stage.prefill.send(name, [1, 2])
    stage.decode.until(name, "done")


def _abort(stage: Stage, kind: str) -> None:
    name, _ = stage.open_both()
    stage.prefill.until(name, "ready")
    with _losing(stage.decode, kind):
        stage.decode.abort(name)
    assert stage.prefill.until(name, "releasable")["cause"] == "peer_aborted"
    stage.decode.until(name, "releasable")


def _ended(stage: Stage, kind: str) -> None:
    """The result is lost when a hand-off is done, when it fails during a write, and when it fails without one."""
    _on_the_way("prefill")(stage, kind)
    name, _ = stage.write_on_its_way()
    with _losing(stage.prefill, kind):
        stage.prefill.abort(name)
    status = stage.decode.until(name, "ended")
    assert (status["cause"], status["releasable"]) == ("peer_aborted", False), status
    stage.prefill.call("release_writes")
    for side in (stage.prefill, stage.decode):
        side.until(name, "releasable")
    name, _ = stage.open_both()
    stage.prefill.until(name, "ready")
    with _losing(stage.prefill, kind):
        stage.prefill.abort(name)
    assert stage.decode.until(name, "releasable")["cause"] == "peer_aborted"


def _greeting(sender: str) -> Trial:
    def trial(stage: Stage, kind: str) -> None:
        fresh = stage.extra("decode", timeouts={**TIMEOUTS, "hello_s": HELLO_S})
        name, room = stage.name(), stage.room()
        stage.prefill.open(name, room)
        with _losing(stage.prefill if sender == "prefill" else fresh, kind):
            offer(fresh, stage.prefill, room, name=name, pages=[8])
        stage.prefill.send(name, [1])
        fresh.until(name, "done")

    return trial


def _refusal(stage: Stage, kind: str) -> None:
    stranger = stage.extra("decode", timeouts={**TIMEOUTS, "hello_s": HELLO_S}, model="another")
    name = stage.name()
    with _losing(stage.prefill, kind):
        offer(stranger, stage.prefill, stage.room(), name=name, pages=[8])
    status = stranger.until(name, "releasable")
    assert "model" in status["message"], f"the reason of the refusal did not come: {status}"


def _goodbye(stage: Stage, kind: str) -> None:
    leaving = stage.extra("prefill")
    name, room = stage.name(), stage.room()
    open_both(leaving, stage.decode, room, name=name, pages=[8])
    leaving.until(name, "ready")
    leaving.lose(kind)
    leaving.call("close")
    assert _lost(leaving, kind), f"no {kind} was lost"
    stage.decode.until(name, "ended")
    who = leaving.incarnation
    stage.decode.settle(lambda stats: who not in {peer["incarnation"] for peer in stats["peers"]})
    stage.decode.call("fence", incarnation=who)
    stage.decode.until(name, "releasable")


TRIALS: Final[Mapping[str, Trial]] = {
    "Open": _on_the_way("decode"),
    "Offer": _on_the_way("decode"),
    "Accepted": _accepted,
    "Ended": _ended,
    "Ack": _on_the_way("decode"),
    "Query": _query,
    "Abort": _abort,
}
"""How a frame of each kind is sent; `Batch` only carries others."""
GREETINGS: Final[Mapping[str, Trial]] = {
    "Hello": _greeting("decode"),
    "HelloOk": _greeting("prefill"),
    "HelloRefused": _refusal,
    "Goodbye": _goodbye,
}
"""These need processes of their own, and are the same on each data plane: NIXL tries them."""


def _staged(stage: Stage) -> str:
    """One slot of staging memory for two ranks of decode, frames lost and aborts at random points."""
    prefill = stage.instance("prefill", shape([2]), staging_bytes=SLOT_BYTES)
    decode = stage.instance("decode", shape([2], tp=2))
    whole = prefill.fill(1)
    (sender,) = prefill.ranks
    _serve(stage, prefill, decode, whole)
    _abort_with_the_slot_taken(stage, prefill, decode, whole)
    ends = [_interfere(stage, prefill, decode, whole) for _ in range(TURNS)]
    _slot_is_back(sender)
    assert set(ends) == {"done", "aborted"}, f"the aborts came all too early or too late: {ends}"
    assert any(side.stats()["lost"] for side in (sender, *decode.ranks)), "no frame was lost: this shows nothing"
    _kill_with_the_slot_taken(stage, prefill, decode, whole)
    staged, done = sender.stats()["staged_writes"], ends.count("done")
    assert staged, "nothing was staged: this shows nothing"
    return f"{done} of {TURNS} staged hand-offs were done, the others aborted, and the only slot was back ({staged=})"


def _open(stage: Stage, prefill: Instance, decode: Instance) -> str:
    name = stage.name()
    for side in decode.ranks:
        side.pages[:] = CANARY
    instances.open_both(prefill, decode, stage.room(), name, TARGET)
    return name


def _serve(stage: Stage, prefill: Instance, decode: Instance, whole: np.ndarray) -> None:
    """A whole hand-off, which must go through staging memory, bring the right bytes and give the slot back."""
    before = prefill.ranks[0].stats()["staged_writes"]
    name = _open(stage, prefill, decode)
    prefill.send(name, range(PAGES))
    for instance in (decode, prefill):
        instance.until(name, "done")
    _check(decode, whole)
    assert prefill.ranks[0].stats()["staged_writes"] > before, "the hand-off was not staged"
    _slot_is_back(prefill.ranks[0])


def _check(decode: Instance, whole: np.ndarray, ranks: Sequence[int] = (0, 1)) -> None:
    for side, shard in ((decode.ranks[rank], decode.shards[rank]) for rank in ranks):
        wanted = whole[shard.first_layer : shard.layer_end, :, :PAGES, :, shard.first_head : shard.head_end]
        assert np.array_equal(side.cells[:, :, TARGET], wanted), "a staged hand-off brought other bytes"


def _slot_is_back(side: Any) -> None:  # noqa: ANN401 - as above
    side.settle(lambda stats: stats["free_slots"] == 1, within_s=10)


def _take_the_slot(stage: Stage, prefill: Instance, decode: Instance) -> str:
    """A hand-off whose writes wait to begin; one of them is in the slot."""
    (sender,) = prefill.ranks
    sender.call("hold_writes")
    name = _open(stage, prefill, decode)
    prefill.send(name, range(PAGES))
    sender.settle(lambda stats: stats["held_writes"] >= len(decode.ranks))
    assert sender.stats()["free_slots"] == 0, "no write was staged: this shows nothing"
    return name


def _abort_with_the_slot_taken(stage: Stage, prefill: Instance, decode: Instance, whole: np.ndarray) -> None:
    """The abort of one rank is lost meanwhile. The slot is kept as long as it may be read, and not longer."""
    (sender,) = prefill.ranks
    name = _take_the_slot(stage, prefill, decode)
    with _losing(decode.ranks[0], "Abort"):
        decode.abort(name)
    prefill.until(name, "ended")
    assert sender.stats()["free_slots"] == 0, "the slot was given back while a write still read from it"
    sender.call("release_writes")
    for instance in (prefill, decode):
        instance.until(name, "releasable")
    _slot_is_back(sender)
    _serve(stage, prefill, decode, whole)


def _interfere(stage: Stage, prefill: Instance, decode: Instance, whole: np.ndarray) -> str:
    """A hand-off in pieces; frames of some kind are lost for a while, and one side may abort. How it ended."""
    draw = stage.random
    (sender,) = prefill.ranks
    loser, kind = draw.choice(
        [(sender, kind) for kind in ("Accepted", "Ended")]
        + [(side, kind) for side in decode.ranks for kind in ("Open", "Offer", "Abort", "Ack", "Query")]
    )
    quits = draw.choice((None, sender, *decode.ranks))
    loser.lose(kind)
    name = _open(stage, prefill, decode)
    cuts = [0, *sorted(draw.sample(range(1, PAGES), 2)), PAGES]
    for start, stop in pairwise(cuts):
        prefill.send(name, range(start, stop), start=start, last=stop == PAGES)
        time.sleep(draw.uniform(0, 0.004))  # the point at which the abort meets the hand-off
        if quits is not None and draw.random() < 0.4:
            quits.abort(name)
    if quits is not None:
        quits.abort(name)
    loser.lose()
    here, there = (instance.until(name, "releasable") for instance in (prefill, decode))
    ends = {status["phase"] for status in (*here, *there)}
    _slot_is_back(sender)
    _check(decode, whole, [rank for rank, status in enumerate(there) if status["phase"] == "done"])
    if ends == {"done"}:
        return "done"
    assert quits is not None, f"no side aborted, and it ended as {ends}"
    return "aborted"


def _kill_with_the_slot_taken(stage: Stage, prefill: Instance, decode: Instance, whole: np.ndarray) -> None:
    """A rank of decode dies; the slot that may still be read for it comes back when it is fenced."""
    (sender,) = prefill.ranks
    name = _take_the_slot(stage, prefill, decode)
    gone = decode.kill(0)
    sender.until(name, "ended")
    sender.call("release_writes")
    decode.ranks[1].until(name, "ended")
    sender.call("fence", incarnation=gone.incarnation)
    for side in (sender, decode.ranks[1]):
        side.until(name, "releasable")
    _slot_is_back(sender)
    stage.restart(decode, 0)
    _serve(stage, prefill, decode, whole)

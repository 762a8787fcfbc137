"""Decode's connection to an instance: asking, joining, losing one rank and finding it again. Time is the test's."""

import errno
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import zmq
from pdpool_connector.layout.pairing import Writer, shard_model
from pdpool_connector.protocol.status import Cause
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.instance_connection import Found, InstanceConnection, MisfitError, Stage
from pdpool_connector.transport.bootstrap import BootstrapError, RankInfo

from tests.unit.runtime.timers import Timers

PART = shard_model([2], 4)[0]
CONNECT_S = 30.0
TIMEOUTS = Timeouts(connect_s=CONNECT_S, refused_s=5.0)
GRACE_S, PAUSE_S, REFUSED_S = TIMEOUTS.lost_grace_s, TIMEOUTS.connect_max_s, TIMEOUTS.refused_s


def found(rank: int, life: int = 0, **changes) -> Found:
    fields = {
        "rank": rank,
        "incarnation": peer(rank, life),
        "control": f"127.0.0.1:{9000 + rank}",
        "shard": PART,
        "protocol": (1, 1),
    }
    return Found(RankInfo(**fields | changes), Writer(rank, 0, 1, kv=True, aux=rank == 0))


def peer(rank: int, life: int = 0) -> str:
    return f"{rank * 100 + life:032x}"


class World(Timers):
    """Reactor, owner and clock in one; `did` has everything that the connection does."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Future] = []
        self.lines: dict[str, SimpleNamespace] = {}
        self.did: list[tuple] = []
        self.wanted = True
        self.owed = False
        self.broken = 0
        self.fenced: set[str] = set()
        self.unable: Exception | None = None

    # The owner
    def find(self, _prefill) -> Future:
        self.asked.append(Future())
        return self.asked[-1]

    def connect(self, _link, one, name):
        if self.unable is not None:
            raise self.unable
        line = SimpleNamespace(peer=one.info.incarnation, paired=False, version=1, closed=False, name=name)
        line.close = lambda: setattr(line, "closed", True)
        self.lines[line.peer] = line
        return line

    def on_paired(self, _link, peer, _version) -> None:
        self.did.append(("paired", peer))

    def on_linked(self, _link, writers) -> None:
        self.did.append(("linked", tuple(one.info.rank for one in writers)))
        self.wanted = False

    def on_unlinked(self, _link) -> None:
        self.broken += 1

    def on_lost(self, _link, peer, message) -> None:
        self.did.append(("lost", peer, message))

    def on_unreachable(self, _link, cause, message) -> None:
        self.did.append(("failed", cause, message))
        self.wanted = False

    def is_wanted(self, _link) -> bool:
        return self.wanted

    def is_owed(self, _link) -> bool:
        return self.owed

    def is_fenced(self, peer) -> bool:
        return peer in self.fenced

    # What happens
    def answer(self, *ranks: Found) -> None:
        self.asked[-1].set_result(list(ranks))

    def refuse(self, error: Exception) -> None:
        self.asked[-1].set_exception(error)

    def pair(self, link: InstanceConnection, rank: int, life: int = 0) -> None:
        self.lines[peer(rank, life)].paired = True
        link.on_rank_paired(peer(rank, life))

    def cut(self, link: InstanceConnection, rank: int, life: int = 0) -> None:
        line = self.lines[peer(rank, life)]
        was, line.paired = line.paired, False
        link.on_rank_ended(line.peer, "the connection ended", paired=was)

    def take(self) -> list[tuple]:
        did, self.did = self.did, []
        return did


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def link(world) -> InstanceConnection:
    return InstanceConnection("p:1", world, world, TIMEOUTS)


@pytest.fixture
def linked(world, link) -> InstanceConnection:
    """Two ranks, both paired."""
    world.answer(found(0), found(1))
    world.pair(link, 0)
    world.pair(link, 1)
    world.take()
    return link


def test_linked_when_all_ranks_are_paired(world, link) -> None:
    world.answer(found(0), found(1))
    world.pair(link, 1)
    assert world.take() == [("paired", peer(1))]
    assert link.stats(world.time).missing == (0,)
    world.pair(link, 0)
    assert world.take() == [("paired", peer(0)), ("linked", (0, 1))]
    assert (link.stage, len(world.asked), world.timers) == (Stage.LINKED, 1, {})


def test_failure_shows_until_linked(world, link, caplog) -> None:
    world.refuse(BootstrapError("bootstrap p:1 cannot be reached"))
    assert "cannot be reached" in caplog.text
    world.wait(5)
    stats = link.stats(world.time)
    assert (stats.failure, stats.failing_s) == ("bootstrap p:1 cannot be reached", 5.0)
    world.answer(found(0))
    world.pair(link, 0)
    assert (link.stats(world.time).failure, link.stats(world.time).failing_s) == ("", None)
    assert len(caplog.records) == 1


def test_gives_up_in_time_and_says_why(world, link) -> None:
    while world.wanted and world.time < 1000 + 2 * CONNECT_S:
        if not world.asked[-1].done():
            world.refuse(BootstrapError("these are missing: 1 (never registered)"))
        world.wait(0.1)
    assert CONNECT_S <= world.time - 1000 < CONNECT_S + 2
    assert world.take() == [("failed", Cause.PEER_LOST, "these are missing: 1 (never registered)")]
    assert (link.stage, world.timers) == (Stage.CLOSED, {})


NOBODY = BootstrapError("bootstrap p:1 cannot be reached: refused", refused=True)


def hear(world: World, seconds: float, error: BootstrapError) -> None:
    """Let the registry be asked, in vain, for so long."""
    end = world.time + seconds
    while world.wanted and world.time < end:
        if not world.asked[-1].done():
            world.refuse(error)
        world.wait(0.05)


def test_refusing_address_is_given_up_early(world, link) -> None:
    begun = world.time
    hear(world, CONNECT_S, NOBODY)
    assert REFUSED_S <= world.time - begun < REFUSED_S + 2
    assert len(world.asked) > 5
    ((_, cause, message),) = world.take()
    assert cause is Cause.PEER_LOST
    assert message.startswith(f"{NOBODY}; it has refused connections for 5.")
    assert (link.stage, world.timers) == (Stage.CLOSED, {})


@pytest.mark.parametrize("between", ["silence", "an answer"])
def test_address_that_refuses_now_and_then_is_kept(world, link, between) -> None:
    hear(world, REFUSED_S - 1, NOBODY)
    if between == "silence":
        hear(world, 2, BootstrapError("no answer within 2 s"))
    else:
        world.wait(PAUSE_S)
        world.answer(found(0))
        world.cut(link, 0)
    hear(world, REFUSED_S - 1, NOBODY)
    assert world.take() == []
    hear(world, 3, NOBODY)
    assert [did[0] for did in world.take()] == ["failed"]


def test_later_attempt_waits_for_refusing_address_again(world, linked) -> None:
    world.cut(linked, 1)
    world.wanted = True
    hear(world, CONNECT_S, NOBODY)
    assert linked.stage is Stage.RESTING
    world.take()
    world.wanted = True
    linked.hurry()
    hear(world, REFUSED_S - 1, NOBODY)
    assert world.take() == []
    world.wait(PAUSE_S)
    world.answer(found(0), found(1))
    world.pair(linked, 1)
    assert world.take()[-1] == ("linked", (0, 1))


def test_misfit_fails_at_once(world, link) -> None:
    world.refuse(MisfitError("total_layers is 4 at prefill and 5 at decode", []))
    (failed,) = world.take()
    assert failed[:2] == ("failed", Cause.INVALID)
    assert "total_layers is 4 at prefill" in failed[2]
    assert link.stage is Stage.CLOSED


def test_rank_of_another_version_is_not_connected(world, link) -> None:
    world.answer(found(0), found(1, protocol=(70, 80)))
    (failed,) = world.take()
    assert failed[1] is Cause.INVALID
    assert "protocol version is 70..80 at prefill and 1..1 at decode (rank 1 of prefill)" in failed[2]
    assert [misfit.info.rank for misfit in link.misfits] == [0, 1], "prefill's ranks are not informed"
    assert not world.lines


@pytest.mark.parametrize("error", [zmq.ZMQError(errno.EMFILE), OSError(errno.ENOSPC, "no watches are left")])
def test_missing_socket_is_tried_again(world, link, error) -> None:
    world.unable = error
    world.answer(found(0))
    failure = f"rank 0 of prefill p:1 cannot be connected to: {error}"
    assert link.stats(world.time).failure == failure
    world.unable = None
    world.wait(PAUSE_S)
    world.answer(found(0))
    world.pair(link, 0)
    assert world.take() == [("paired", peer(0)), ("linked", (0,))]


def test_missing_socket_fails_attempts_in_time(world, link) -> None:
    world.unable = zmq.ZMQError(errno.EMFILE)
    while world.wanted and world.time < 1000 + 2 * CONNECT_S:
        if not world.asked[-1].done():
            world.answer(found(0))
        world.wait(0.1)
    (failed,) = world.take()
    assert failed == ("failed", Cause.PEER_LOST, f"rank 0 of prefill p:1 cannot be connected to: {world.unable}")
    assert (link.stage, world.timers) == (Stage.CLOSED, {})


def test_connection_back_within_grace_loses_nothing(world, linked) -> None:
    world.cut(linked, 1)
    assert world.broken == 1, "nothing new is offered meanwhile"
    world.wait(GRACE_S / 2)
    world.answer(found(0), found(1))
    world.pair(linked, 1)
    world.wait(GRACE_S * 2)
    assert world.take() == [("paired", peer(1)), ("linked", (0, 1))]
    assert linked.stage is Stage.LINKED


def test_lost_rank_leaves_others_connected(world, linked) -> None:
    world.cut(linked, 1)
    world.wait(GRACE_S)
    lost, failed = world.take()
    assert lost[:2] == ("lost", peer(1))
    assert failed[:2] == ("failed", Cause.PEER_LOST)
    assert linked.stage is Stage.RESTING
    assert linked.connection(peer(0)) is world.lines[peer(0)]
    assert not world.lines[peer(0)].closed


def test_successor_of_lost_rank_is_linked(world, linked) -> None:
    world.cut(linked, 1)
    world.wait(GRACE_S)
    world.take()
    world.wanted = True
    linked.hurry()
    world.answer(found(0), found(1, life=1))
    world.pair(linked, 1, life=1)
    assert world.take() == [("paired", peer(1, 1)), ("linked", (0, 1))]
    assert not world.lines[peer(0)].closed


def test_each_rank_has_its_own_grace(world, linked) -> None:
    world.cut(linked, 1)
    world.wait(GRACE_S / 2)
    world.cut(linked, 0)
    world.wait(GRACE_S / 2)
    assert [did[:2] for did in world.take()] == [("lost", peer(1))]
    world.wait(GRACE_S / 2)
    assert [did[:2] for did in world.take()] == [("lost", peer(0)), ("failed", Cause.PEER_LOST)]
    assert (linked.stage, world.timers) == (Stage.CLOSED, {})


def test_successor_ends_the_grace(world, linked) -> None:
    world.cut(linked, 1)
    world.answer(found(0), found(1, life=1))
    (lost,) = world.take()
    assert lost[:2] == ("lost", peer(1))
    assert "rank 1 of prefill p:1 was restarted" in lost[2]
    world.pair(linked, 1, life=1)
    assert world.take() == [("paired", peer(1, 1)), ("linked", (0, 1))]


def test_restarted_instance_loses_every_rank(world, linked) -> None:
    world.cut(linked, 0)
    world.cut(linked, 1)
    world.answer(found(0, life=1), found(1, life=1))
    assert [did[:2] for did in world.take()] == [("lost", peer(0)), ("lost", peer(1))]
    world.pair(linked, 0, life=1)
    world.pair(linked, 1, life=1)
    assert world.take()[-1] == ("linked", (0, 1))


def test_not_linked_without_rank_lost_while_joining(world, linked) -> None:
    world.cut(linked, 0)
    world.cut(linked, 1)
    world.wanted = True
    world.answer(found(0), found(1))
    world.wait(GRACE_S)
    assert [did[:2] for did in world.take()] == [("lost", peer(0)), ("lost", peer(1))]
    world.wait(1)
    world.answer(found(0), found(1))
    world.pair(linked, 0)
    assert ("linked", (0,)) not in world.take()
    world.pair(linked, 1)
    assert world.take()[-1] == ("linked", (0, 1))


def test_goodbye_loses_rank_without_grace(world, linked) -> None:
    world.lines[peer(1)].paired = False
    linked.on_rank_left(peer(1), "rank 1 has shut down")
    assert [did[:2] for did in world.take()] == [("lost", peer(1)), ("failed", Cause.PEER_LOST)]
    assert linked.stage is Stage.RESTING


def test_fenced_rank_is_lost_at_once(world, linked) -> None:
    linked.mark_lost(peer(1), "was fenced")
    assert [did[:2] for did in world.take()] == [("lost", peer(1)), ("failed", Cause.PEER_LOST)]
    assert world.lines[peer(1)].closed
    assert (linked.stage, world.timers) == (Stage.RESTING, {})
    linked.mark_lost(peer(1), "was fenced")
    assert world.take() == []


def test_registry_naming_fenced_rank_fails_at_once(world, link) -> None:
    world.fenced.add(peer(1))
    world.answer(found(0), found(1))
    (failed,) = world.take()
    assert failed[:2] == ("failed", Cause.PEER_LOST)
    assert "rank 1 of prefill p:1 was fenced, and no other process has taken its place" in failed[2]
    assert not world.lines


def test_refusal_for_good_fails_attempts(world, link) -> None:
    world.answer(found(0), found(1))
    world.pair(link, 0)
    link.on_rank_refused(peer(1), "rank 1 refused to pair: model is 'a'", retry=False)
    assert world.take()[1:] == [("failed", Cause.INVALID, "rank 1 refused to pair: model is 'a'")]
    assert link.stage is Stage.RESTING
    world.wanted = True
    link.hurry()
    assert len(world.asked) == 2


def lose_both(world, linked) -> None:
    world.owed = True
    world.cut(linked, 0)
    world.cut(linked, 1)
    world.refuse(BootstrapError("nobody there"))
    for _ in range(round(GRACE_S / PAUSE_S) + 1):
        world.wait(PAUSE_S)
        if not world.asked[-1].done():
            world.refuse(BootstrapError("nobody there"))
    assert [event[0] for event in world.take()] == ["lost", "lost"]


def test_held_pages_keep_lost_ranks_wanted(world, linked) -> None:
    lose_both(world, linked)
    world.wait(PAUSE_S)
    world.answer(found(0), found(1))
    world.pair(linked, 0)
    world.pair(linked, 1)
    assert world.take() == [("paired", peer(0)), ("paired", peer(1)), ("linked", (0, 1))]


def test_held_pages_ask_slowly_until_wanted(world, linked) -> None:
    lose_both(world, linked)
    while not (did := world.take()):
        world.wait(PAUSE_S)
        world.refuse(BootstrapError("nobody there"))
    assert did[0][:2] == ("failed", Cause.PEER_LOST)
    asked = len(world.asked)
    world.wait(TIMEOUTS.held_retry_s + 1)
    assert len(world.asked) == asked + 1
    world.refuse(BootstrapError("nobody there"))
    world.take()
    world.wanted = True
    linked.hurry()
    assert len(world.asked) == asked + 2


def test_hurry_reports_what_is_linked(world, linked) -> None:
    linked.hurry()
    assert world.take() == [("paired", peer(0)), ("paired", peer(1)), ("linked", (0, 1))]


def test_close_leaves_no_timer_or_connection(world, linked) -> None:
    world.cut(linked, 1)
    linked.close()
    world.answer(found(0), found(1))
    assert (world.timers, world.take()) == ({}, [])
    assert world.lines[peer(0)].closed


def test_only_a_try_of_full_length_is_in_vain(world, link) -> None:
    world.refuse(BootstrapError("nobody answers"))
    world.wait(1)
    world.wanted = False
    world.refuse(BootstrapError("nobody answers"))
    assert (link.stage, link.in_vain) == (Stage.CLOSED, False)


def test_try_of_full_length_is_in_vain(world, link) -> None:
    while link.stage is not Stage.CLOSED:
        world.refuse(BootstrapError("nobody answers"))
        world.wait(PAUSE_S)
    assert link.in_vain
    assert world.time >= 1000 + CONNECT_S


def test_try_goes_on_after_its_requests_have_ended(world, link) -> None:
    world.wanted = False
    world.answer(found(0))
    world.pair(link, 0)
    assert link.stage is Stage.LINKED

"""A prefill and a decode of which one speaks the version of the protocol before ours at most, each a real process."""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

import numpy as np
import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.versions import SHARES_SINCE

from tests.integration.connector_peer import PAGES, Side
from tests.integration.handoffs import SOON, fill, meet
from tests.integration.instances import shape
from tests.state_kinds import Kind

OURS, THEIRS = f.VERSION_MAX, f.VERSION_MAX - 1
BROKEN = PAGES - 1
SPLIT = {"split_state": True}
OF_NO_VERSION = {"Hello", "HelloRefused"}
"""Said before a version is settled."""
NOT_UNDERSTOOD = {"version", "malformed", "oversized", "unencodable", "direction"}


@dataclass
class Pair:
    older: str
    direction: str
    prefill: Side
    decode: Side

    @property
    def mover(self) -> Side:
        return self.prefill if self.direction == "write" else self.decode

    @property
    def both(self) -> tuple[Side, Side]:
        return self.prefill, self.decode

    def meet(self, room: int, name: str, **more) -> None:
        meet(self.prefill, self.decode, room, name=name, **more)

    def hand_over(self, room: int, name: str = "r") -> None:
        """One hand-off in two sends; every byte is where it belongs, and no other was touched."""
        fill(self.prefill, room)
        self.decode.pages[:] = self.decode.aux[:] = 0
        self.meet(room, name, pages=[8, 3, 60])
        self.prefill.send(name, [1, 2], last=False)
        self.prefill.send(name, [33], start=2, aux_slot=4)
        for side in self.both:
            assert side.until(name, "done")["bytes_moved"] == 3 * 4 * 512 + 64
        check_bytes(self.prefill, self.decode, [1, 2, 33], [8, 3, 60], {4: 5})


def check_bytes(prefill: Side, decode: Side, source: list[int], target: list[int], aux: dict[int, int]) -> None:
    pages, rows = np.zeros_like(decode.pages), np.zeros_like(decode.aux)
    pages[:, target] = prefill.pages[:, source]
    for sent, taken in aux.items():
        rows[taken] = prefill.aux[sent]
    assert np.array_equal(decode.pages, pages)
    assert np.array_equal(decode.aux, rows)


def versions(side: Side) -> set[int]:
    """Those in which it has spoken to peers with which one was settled."""
    said = (frame.split() for frame in side.stats()["said"])
    return {int(version) for kind, version in said if kind not in OF_NO_VERSION}


def newest_of(role: str, older: str, version: int = THEIRS) -> int:
    return version if role == older else OURS


def check_spoken(prefill: Side, decode: Side, older: str, version: int = THEIRS) -> None:
    """Each offered the newest that it knows, all was said in the older one, and all of it was understood."""
    hellos = {frame for frame in decode.stats()["said"] if frame.startswith("Hello ")}
    assert hellos == {f"Hello {newest_of('decode', older, version)}"}
    assert versions(prefill) == versions(decode) == {version}
    for side in (prefill, decode):
        assert NOT_UNDERSTOOD.isdisjoint(side.stats()["drops"])


def settle_empty(*sides: Side) -> None:
    for side in sides:
        stats = side.settle(lambda stats: stats["rows"] == stats["kept"] == stats["holds"] == stats["expected"] == 0)
        assert stats["faults"] == 0


@pytest.fixture(scope="module")
def standing() -> Iterator[Callable[[str, str, str], Pair]]:
    """One pair of each kind that tests share which leave it as they found it."""
    pairs: dict[tuple[str, str, str], Pair] = {}

    def get(older: str, direction: str, backend: str) -> Pair:
        key = older, direction, backend
        if key not in pairs:
            options = {"timing": SOON, "request_deadline_s": 60.0, "direction": direction, "checksum_rate": 1.0}
            sides = [Side(role, backend, speaks=newest_of(role, older), **options) for role in ("prefill", "decode")]
            pairs[key] = Pair(older, direction, *sides)
        return pairs[key]

    yield get
    codes = [side.end() for pair in pairs.values() for side in reversed(pair.both)]
    assert set(codes) <= {0}, codes


@pytest.fixture(params=["prefill", "decode"])
def older(request) -> str:
    return request.param


@pytest.fixture(params=["write", "read"])
def direction(request) -> str:
    return request.param


def _checked(pair: Pair) -> Iterator[Pair]:
    fill(pair.prefill, 1)
    pair.decode.pages[:] = pair.decode.aux[:] = 0
    yield pair
    settle_empty(*pair.both)
    check_spoken(*pair.both, pair.older)


@pytest.fixture
def pair(standing, older: str, direction: str) -> Iterator[Pair]:
    yield from _checked(standing(older, direction, "local"))


@pytest.fixture
def writes(standing, older: str) -> Iterator[Pair]:
    yield from _checked(standing(older, "write", "local"))


def test_pages_and_aux_row_arrive_where_they_belong_and_nowhere_else(pair: Pair) -> None:
    pair.hand_over(7)
    checksums = pair.decode.settle(lambda stats: stats["checksums"]["matched"])["checksums"]
    assert not checksums["mismatched"]


@pytest.mark.parametrize(("older", "direction"), [("prefill", "read"), ("decode", "write")])
def test_they_arrive_over_a_real_data_plane(standing, older: str, direction: str) -> None:
    for pair in _checked(standing(older, direction, "nixl")):
        pair.hand_over(7)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_pages_come_back_by_the_word_that_nothing_is_in_flight_and_by_nothing_else(pair: Pair, who: str) -> None:
    mover, other = pair.mover, next(side for side in pair.both if side is not pair.mover)
    aborter, told = pair.both if who == "prefill" else reversed(pair.both)
    lost = mover.stats()["lost"].get("Drained", 0)
    mover.call("faults", delays={"Drained": None})
    mover.call("hold_writes")
    pair.meet(7, "r")
    pair.prefill.until("r", "ready")
    pair.prefill.send("r", [1, 2])
    mover.settle(lambda stats: stats["held_writes"] == 1)
    aborter.abort("r")
    assert aborter.until("r", "ended")["cause"] == "aborted"
    assert told.until("r", "ended")["cause"] == "peer_aborted"
    assert not any(side.status("r")["releasable"] for side in pair.both)
    assert not pair.decode.pages.any()
    mover.call("release_writes")
    mover.settle(lambda stats: stats["lost"].get("Drained", 0) >= lost + 2)
    assert mover.status("r")["releasable"]
    assert not other.status("r")["releasable"]
    assert (pair.decode.pages[:, [8, 3]] == pair.prefill.pages[:, [1, 2]]).all()
    mover.call("faults", delays={})
    other.until("r", "releasable")
    pair.hand_over(7, "next")


def test_a_data_plane_that_fails_ends_both_sides_with_its_cause(pair: Pair) -> None:
    pair.mover.call("break_writes", pages=[BROKEN])
    pair.meet(7, "r")
    pair.prefill.send("r", [1], last=False)
    pair.prefill.send("r", [BROKEN], start=1)
    for side in pair.both:
        assert side.until("r", "releasable")["cause"] == "transfer_failed"
    pair.mover.call("break_writes", pages=[])
    pair.hand_over(7, "next")


def test_what_decode_has_announced_is_known_until_it_is_opened(writes: Pair) -> None:
    writes.hand_over(6)
    writes.prefill.open("r", 7)
    writes.decode.call("expect", name="r", room=7, prefill=writes.prefill.bootstrap)
    writes.prefill.settle(lambda stats: stats["expected"] == 1)
    assert writes.prefill.status("r")["phase"] == "waiting"
    writes.decode.open("r", 7, prefill=writes.prefill.bootstrap, pages=[8, 3], aux_slot=5)
    writes.prefill.settle(lambda stats: stats["expected"] == 0)
    writes.prefill.send("r", [1, 2], aux_slot=4)
    writes.decode.until("r", "done")
    assert (writes.decode.pages[:, [8, 3]] == writes.prefill.pages[:, [1, 2]]).all()
    assert writes.decode.stats()["said"][f"Expect {THEIRS}"]


def test_a_room_that_is_used_again_at_once_gets_its_own_data(pair: Pair) -> None:
    for turn in range(4):
        # In READ decode is done before prefill knows: prompts keep a request from meeting the last one's half.
        prompt = {"prompt": f"prompt {turn}"}
        pair.prefill.open(f"t{turn}", 7, **prompt)
        offer = {"prefill": pair.prefill.bootstrap, "pages": [10 + turn], "aux_slot": turn}
        pair.decode.open(f"t{turn}", 7, **offer, **prompt)
        pair.prefill.send(f"t{turn}", [30 + turn], aux_slot=turn)
        pair.decode.until(f"t{turn}", "done")
    same = range(4)
    check_bytes(*pair.both, [30 + turn for turn in same], [10 + turn for turn in same], {turn: turn for turn in same})


def many_at_once(prefill: Side, decode: Side, count: int) -> None:
    """What `count` hand-offs have to say is ready at one moment: decode's when it is linked, prefill's in answer."""
    fill(prefill, 1)
    decode.call("faults", delays={"Hello": None})
    prefill.call("many", calls=[("open", {"name": f"{room}", "room": room}) for room in range(count)])
    where = {"prefill": prefill.bootstrap}
    offers = [{"name": f"{room}", "room": room, "pages": [room], "aux_slot": room} for room in range(count)]
    decode.call("many", calls=[("open", offer | where) for offer in offers])
    decode.settle(lambda stats: stats["lost"].get("Hello"))
    decode.call("faults", delays={})
    for room in range(count):
        prefill.until(f"{room}", "ready")
        prefill.send(f"{room}", [20 + room], aux_slot=room)
        decode.until(f"{room}", "done")
    rooms = range(count)
    check_bytes(prefill, decode, [20 + room for room in rooms], list(rooms), {room: room for room in rooms})


@pytest.mark.parametrize("version", range(f.VERSION_MIN, OURS))
def test_a_peer_is_told_together_and_ahead_what_its_version_knows_and_nothing_else(
    sides, older: str, version: int
) -> None:
    prefill, decode = (
        sides(role, speaks=newest_of(role, older, version), hello_s=0.3, timing=SOON) for role in ("prefill", "decode")
    )
    many_at_once(prefill, decode, 6)
    prefill.open("r", 7)
    decode.call("expect", name="r", room=7, prefill=prefill.bootstrap)
    decode.open("r", 7, prefill=prefill.bootstrap, pages=[8], aux_slot=6)
    prefill.send("r", [1])
    decode.until("r", "done")
    for side in (prefill, decode):
        assert (f"Batch {version}" in side.stats()["said"]) == (version >= f.BATCH_VERSION)
    assert (f"Expect {version}" in decode.stats()["said"]) == (version >= f.EXPECT_VERSION)
    settle_empty(prefill, decode)
    check_spoken(prefill, decode, older, version)


def test_a_killed_peer_fails_its_own_hand_offs_alone(sides, older: str) -> None:
    survivor = sides("decode" if older == "prefill" else "prefill", speaks=OURS, timing={**SOON, "verdict_s": 1.0})
    peers = {version: sides(older, speaks=version) for version in (THEIRS, OURS)}
    pairs = {version: (peer, survivor) if older == "prefill" else (survivor, peer) for version, peer in peers.items()}
    for version, (prefill, decode) in pairs.items():
        fill(prefill, version)
        meet(prefill, decode, version, name=f"{version}", pages=[version], aux_slot=version)
        prefill.until(f"{version}", "ready")
    ended = [f"{THEIRS}"]
    if older == "decode":
        survivor.open("announced", 9)
        peers[THEIRS].call("expect", name="announced", room=9, prefill=survivor.bootstrap)
        survivor.settle(lambda stats: stats["expected"] == 1)
        ended.append("announced")
    peers[THEIRS].kill()
    for name in ended:
        assert survivor.until(name, "ended")["cause"] == "peer_lost"
        assert survivor.status(name)["releasable"] == (older == "decode"), "only a lost writer may still write"
    prefill, decode = pairs[OURS]
    assert prefill.status(f"{OURS}")["phase"] == "ready"
    prefill.send(f"{OURS}", [5], aux_slot=3)
    decode.until(f"{OURS}", "done")
    check_bytes(prefill, decode, [5], [OURS], {3: OURS})
    survivor.call("fence", incarnation=peers[THEIRS].incarnation)
    survivor.until(f"{THEIRS}", "releasable")
    settle_empty(survivor, peers[OURS])
    assert versions(survivor) == {THEIRS, OURS}


def test_a_side_that_closes_is_understood(sides, older: str) -> None:
    prefill, decode = (sides(role, speaks=newest_of(role, older)) for role in ("prefill", "decode"))
    meet(prefill, decode, 7)
    prefill.until("r", "ready")
    stays, leaves = (prefill, decode) if older == "prefill" else (decode, prefill)
    stays.settle(lambda stats: stats["peers"])
    leaves.call("close")
    assert stays.until("r", "ended")["cause"] == "peer_lost"
    stats = stays.settle(lambda stats: not stats["peers"])
    assert NOT_UNDERSTOOD.isdisjoint(stats["drops"])


def test_state_that_is_cut_over_tensor_ranks_is_refused_with_what_its_version_lacks(sides, older: str) -> None:
    whole = {"speaks": SHARES_SINCE - 1, "state": [astuple(Kind())]}
    cut = {"speaks": OURS, "state": [astuple(Kind(1, (4,), (False,), 2))], "shape": shape([2], 2) | SPLIT}
    prefill, decode = (
        sides(role, connect_deadline_s=5.0, **(whole if role == older else cut)) for role in ("prefill", "decode")
    )
    decode.open("r", 7, prefill=prefill.bootstrap, pages=[8], aux_slot=0)
    status = decode.until("r", "ended")
    assert (status["cause"], status["releasable"]) == ("invalid", True)
    assert f"protocol version is 1..{SHARES_SINCE - 1} at the peer" in status["message"]
    assert f"state that is cut over tensor ranks needs version {SHARES_SINCE}" in status["message"]


def test_state_that_moves_whole_arrives(sides, older: str, direction: str) -> None:
    prefill, decode = (
        sides(role, speaks=newest_of(role, older), direction=direction, state=[astuple(Kind())], timing=SOON)
        for role in ("prefill", "decode")
    )
    for number, region in enumerate(prefill.state):
        region[:] = number + 1
    meet(prefill, decode, 7, pages=[8], state=[2])
    prefill.send("r", [1], state=[6])
    decode.until("r", "done")
    for sent, taken in zip(prefill.state, decode.state, strict=True):
        assert np.array_equal(np.flatnonzero(taken.any(axis=1)), [2])
        assert np.array_equal(taken[2], sent[6])
    settle_empty(prefill, decode)
    check_spoken(prefill, decode, older)

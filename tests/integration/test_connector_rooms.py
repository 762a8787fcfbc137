"""Ten thousand rooms through every path there is, over real processes that lose peers now and then."""

from collections import Counter
from collections.abc import Callable

import pytest

from tests.integration.connector_peer import PAGES, Side
from tests.integration.handoffs import TIMING, fill

ROOMS, WAVE, WARM = 10_000, 40, 1_000
LOSE_EVERY = 2_000
BYTES_PER_ROOM = 256
"""By so much may a process grow for each room, on average: less than the smallest row of any table costs."""
BROKEN = PAGES - 1
"""A page that the data plane of prefill takes nothing from."""
FAIL_EVERY = 5 * WAVE
ABORTERS = ("decode", "prefill")
SHORT_S = 0.02
MEMORY = {**TIMING, "drain_s": 10.0, "verdict_s": 4.0, "acked_s": 0.2}
"""Ends are remembered for longer than a busy machine takes to bring both halves, and no longer."""
LOST = 12
"""Hand-offs that a lost peer had."""
Calls = list[tuple[str, dict]]


class Wave:
    """What prefill and decode are told of some rooms; each path goes by the room's number."""

    def __init__(self, prefill: Side, rooms: range) -> None:
        self.prefill: Calls = []
        self.decode: Calls = []
        self.late: dict[str, Calls] = {"prefill": [], "decode": []}
        self._bootstrap = prefill.bootstrap
        self._free = iter(range(BROKEN))
        for room in rooms:
            paths = FAILURES if rooms.start % FAIL_EVERY == 0 else PATHS
            paths[room % len(paths)](self, room)

    def play(self, prefill: Side, decode: Side) -> None:
        prefill.call("many", calls=self.prefill)
        decode.call("many", calls=self.decode)
        for side, role in ((prefill, "prefill"), (decode, "decode")):
            side.call("many", calls=self.late[role])

    def request(self, room: int, **more) -> None:
        self.prefill.append(("open", {"name": f"{room}", "room": room, **more}))

    def offer(self, room: int, pages: int = 1, **more) -> None:
        ids = [next(self._free) for _ in range(pages)]
        where = {"prefill": self._bootstrap, "pages": ids, "aux_slot": room % 16}
        self.decode.append(("open", {"name": f"{room}", "room": room, **where, **more}))

    def send(self, room: int, pages: list[int], start: int = 0, *, last: bool = True) -> None:
        what = {"pages": pages, "start": start, "last": last, "aux_slot": 0 if last else None}
        self.prefill.append(("send", {"name": f"{room}", **what}))

    def succeed(self, room: int) -> None:
        self.request(room)
        self.offer(room)
        self.send(room, [room % BROKEN])

    def have_nothing_to_send(self, room: int) -> None:
        self.request(room)
        self.offer(room, 0, prefix_pages=3)
        self.send(room, [], 3)

    def fail_at_once(self, room: int) -> None:
        self.request(room)
        self.offer(room)
        self.send(room, [BROKEN])

    def fail_half_way(self, room: int) -> None:
        self.request(room)
        self.offer(room, 2)
        self.send(room, [1], last=False)
        self.send(room, [BROKEN], 1)

    def be_refused(self, room: int) -> None:
        """More is sent than decode has pages for."""
        self.request(room)
        self.offer(room)
        self.send(room, [1, 2, 3])

    def abort(self, room: int) -> None:
        who = ABORTERS[room // len(PATHS) % 2]
        self.request(room)
        self.offer(room)
        (self.prefill if who == "prefill" else self.decode).append(("abort", {"name": f"{room}"}))

    def abort_half_way(self, room: int) -> None:
        who = ABORTERS[room // len(PATHS) % 2]
        self.request(room)
        self.offer(room, 2)
        self.send(room, [1], last=False)
        self.late[who].append(("abort", {"name": f"{room}"}))

    def wait_for_decode(self, room: int) -> None:
        self.request(room, deadline_s=SHORT_S)

    def wait_for_prefill(self, room: int) -> None:
        self.offer(room, 0, deadline_s=SHORT_S)

    def wait_for_the_forward_pass(self, room: int) -> None:
        self.request(room, deadline_s=SHORT_S)
        self.offer(room)


PATHS: tuple[Callable[[Wave, int], None], ...] = (
    Wave.succeed,
    Wave.have_nothing_to_send,
    Wave.abort,
    Wave.be_refused,
    Wave.abort_half_way,
    Wave.wait_for_decode,
    Wave.wait_for_prefill,
    Wave.wait_for_the_forward_pass,
)
FAILURES = (Wave.fail_at_once, Wave.fail_half_way)
"""In waves of their own: what the data plane takes together fails together."""


def lose_a_peer(make: Callable[[str], Side], survivor: Side, room: int) -> None:
    """A peer of the survivor is killed in the midst of hand-offs, some of which are held until it is fenced."""
    is_prefill = bool(survivor.bootstrap)
    peer = make("decode" if is_prefill else "prefill")
    prefill, decode = (survivor, peer) if is_prefill else (peer, survivor)
    fill(prefill, 1)
    for index in range(LOST):
        name = f"{room + index}"
        prefill.open(name, room + index)
        decode.open(name, room + index, prefill=prefill.bootstrap, pages=[index], aux_slot=0)
        if index % 3:
            prefill.send(name, [index], last=index % 3 == 2)
        if index == LOST // 2 - 1:  # the later half does not get through
            for early in range(index + 1):
                if early % 3 == 2:
                    survivor.until(f"{room + early}", "done")
            prefill.call("hold_writes")
    prefill.settle(lambda stats: stats["held_writes"] > 0)
    peer.kill()
    for index in range(LOST):
        survivor.until(f"{room + index}", "ended")
    if is_prefill:
        survivor.call("release_writes")
    else:
        survivor.settle(lambda stats: stats["holds"] > 0)
    survivor.call("fence", incarnation=peer.incarnation)
    causes = survivor.call("forget", within_s=30.0)
    assert causes == {"": 2, "peer_lost": LOST - 2}


def at_rest(side: Side) -> dict:
    """What is left of all that was played."""
    stats = side.settle(lambda stats: stats["rows"] == stats["kept"] == stats["holds"] == 0)
    assert stats["faults"] == stats["held_bytes"] == stats["expected"] == 0
    assert not any(queue["reqs"] for queue in stats["attempts"].values())
    return {**stats, "tables": side.call("tables")}


@pytest.mark.parametrize("backend", ["local", "nixl"])
def test_ten_thousand_rooms_through_every_path_leave_nothing_behind(sides, backend) -> None:
    def make(role: str) -> Side:
        return sides(role, backend, grace_s=0.2, timing=MEMORY, log="ERROR")

    pair = prefill, decode = make("prefill"), make("decode")
    fill(prefill, 1)
    prefill.call("break_writes", pages=[BROKEN])
    causes: dict[Side, Counter[str]] = {side: Counter() for side in pair}
    before: dict[Side, dict] = {}
    for first in range(0, ROOMS, WAVE):
        Wave(prefill, range(first, first + WAVE)).play(prefill, decode)
        for side in pair:
            causes[side].update(side.call("forget", within_s=30.0))
        if first % LOSE_EVERY == 0:
            for number, survivor in enumerate(pair):
                lose_a_peer(make, survivor, ROOMS * (1 + number) + first)
        if first + WAVE == WARM:
            before = {side: at_rest(side) for side in pair}
    each = ROOMS // (len(PATHS) + len(FAILURES))
    paths = {"": 2, "transfer_failed": 2, "invalid": 1, "aborted": 1, "peer_aborted": 1, "timed_out": 2}
    for side in pair:
        assert causes[side] == {cause: count * each for cause, count in paths.items()}
        after = at_rest(side)
        assert len(after["peers"]) == 1, "those that were lost are forgotten"
        for name in ("fds", "threads"):
            assert after[name] <= before[side][name], name
        tables = {path: (before[side]["tables"].get(path, 0), size) for path, size in after["tables"].items()}
        grown = {path: counts for path, counts in tables.items() if counts[1] - counts[0] > ROOMS // 100}
        assert not grown
        assert after["rss"] - before[side]["rss"] < BYTES_PER_ROOM * (ROOMS - WARM)

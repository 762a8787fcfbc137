"""Ten thousand rooms through every path there is, over real processes that lose peers now and then.

A leak grows with the rooms, and a level does not. So what is left of 10 000 rooms is compared with what was left of
1 000. A table counts as grown only where it stays so.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from tests.integration.connector_peer import PAGES, Side
from tests.integration.handoffs import TIMEOUTS, fill, open_both, settle_empty
from tests.integration.instances import shape

ROOMS, WAVE, WARM = 10_000, 40, 6_000
"""Memory grows until the allocators have warmed up, which takes some thousand rooms; a leak grows on after that."""
LEG = 1_000
"""A leak grows in each leg of so many rooms; an allocator takes a mebibyte in one of them."""
LOSE_EVERY = 2_000
BYTES_PER_ROOM = 256
"""A process may grow by so much for each room of the best leg: less than the smallest row of any table costs."""
BROKEN = PAGES - 1
"""Writes from this page of prefill fail."""
FAIL_EVERY = 5 * WAVE
ABORTERS = ("decode", "prefill")
SHORT_S = 0.02
MEMORY = {**TIMEOUTS, "quiesce_s": 10.0, "result_s": 4.0, "acked_s": 0.2, "lost_grace_s": 0.2}
"""Ends are remembered for longer than a busy machine takes to bring both halves."""
LOST = 12
"""Hand-offs that a lost peer had."""
OF_LOST = ("._fenced", "_backend.failures", "_backend._abandoned", "_backend._named")
"""What is remembered of each lost peer, within a bound."""
LEVELS_S = 20.0
"""A table that is larger for so long is no level."""
LEVELS = (".fired", ".queues._steps")
"""What the last tick found due, a wave at most; and the kinds of steps that have occurred, a few dozen at most."""
Calls = list[tuple[str, dict]]


class Wave:
    """The commands of prefill and decode for some rooms; each path goes by the room's number."""

    def __init__(self, prefill: Side, rooms: range) -> None:
        self.prefill: Calls = []
        self.decode: Calls = []
        self.late: dict[str, Calls] = {"prefill": [], "decode": []}
        self._bootstrap = prefill.bootstrap
        self._free = iter(range(BROKEN))
        for room in rooms:
            paths = FAILURES if rooms.start % FAIL_EVERY == 0 else PATHS
            paths[room % len(paths)](self, room)

    def play(self, prefill: Side, decodes: Sequence[Side]) -> None:
        prefill.call("many", calls=self.prefill)
        for decode in decodes:
            decode.call("many", calls=self.decode)
        for side, role in ((prefill, "prefill"), *((decode, "decode") for decode in decodes)):
            side.call("many", calls=self.late[role])

    def request(self, room: int, **more) -> None:
        self.prefill.append(("open", {"name": f"{room}", "room": room, **more}))

    def await_cache(self, room: int, **more) -> None:
        """Decode opens its half and has no memory yet."""
        self.decode.append(("open", {"name": f"{room}", "room": room, "prefill": self._bootstrap, **more}))

    def offer(self, room: int, pages: int = 1, *, prefix_pages: int = 0, **more) -> None:
        ids = [next(self._free) for _ in range(pages)]
        self.await_cache(room, **more)
        memory = {"pages": ids, "aux_slot": room % WAVE, "prefix_pages": prefix_pages}
        self.decode.append(("offer", {"name": f"{room}", **memory}))

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

    def send_too_much(self, room: int) -> None:
        """More is sent than decode has pages for."""
        self.request(room)
        self.offer(room)
        self.send(room, [1, 2, 3])

    def abort(self, room: int) -> None:
        """Before or after decode has offered memory."""
        who = ABORTERS[room // len(PATHS) % 2]
        self.request(room)
        (self.offer if room // len(PATHS) % 4 < 2 else self.await_cache)(room)
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
        self.await_cache(room, deadline_s=SHORT_S)

    def wait_for_the_forward_pass(self, room: int) -> None:
        self.request(room, deadline_s=SHORT_S)
        self.offer(room)


PATHS: tuple[Callable[[Wave, int], None], ...] = (
    Wave.succeed,
    Wave.have_nothing_to_send,
    Wave.abort,
    Wave.send_too_much,
    Wave.abort_half_way,
    Wave.wait_for_decode,
    Wave.wait_for_prefill,
    Wave.wait_for_the_forward_pass,
)
FAILURES = (Wave.fail_at_once, Wave.fail_half_way)
"""In waves of their own: writes that are submitted together fail together."""

OF_TEN = {"": 2, "transfer_failed": 2, "invalid": 1, "aborted": 1, "peer_aborted": 1, "timed_out": 2}
EXPECTED = {cause: count * ROOMS // (len(PATHS) + len(FAILURES)) for cause, count in OF_TEN.items()}
"""How often each cause ends a hand-off."""


def lose_a_peer(make: Callable[[str], Side], survivor: Side, room: int) -> None:
    """A peer of the survivor is killed in the midst of hand-offs, some of which are held until it is fenced."""
    is_prefill = bool(survivor.bootstrap)
    peer = make("decode" if is_prefill else "prefill")
    prefill, decode = (survivor, peer) if is_prefill else (peer, survivor)
    fill(prefill, 1)
    for index in range(LOST):
        name = f"{room + index}"
        open_both(prefill, decode, room + index, name=name, pages=[index])
        prefill.until(name, "ready")  # else prefill may wait for a decode that it never got to know
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
    if survivor is prefill:
        survivor.call("release_writes")
    else:
        survivor.settle(lambda stats: [row["incarnation"] for row in stats["held_for"]] == [peer.incarnation])
    survivor.call("fence", incarnation=peer.incarnation)
    causes = survivor.call("forget", within_s=30.0)
    assert causes == {"": 2, "peer_lost": LOST - 2}


def at_rest(side: Side) -> dict:
    """What is left of all that was played."""
    settle_empty(side)
    stats = side.stats()
    assert stats["held_bytes"] == 0
    assert not any(queue["reqs"] for queue in stats["attempts"].values())
    return {**stats, "tables": side.call("tables")}


def grown(before: dict, after: dict) -> dict[str, tuple[int, int]]:
    """Tables that have more entries than losses of peers can explain."""
    losses = (ROOMS - WARM) // LOSE_EVERY
    sizes = {path: (before["tables"].get(path, 0), size) for path, size in after["tables"].items()}
    return {
        path: (old, new)
        for path, (old, new) in sizes.items()
        if new - old >= losses
        and not (any(name in path for name in OF_LOST) and new - old <= 4 * losses)
        and not (any(name in path for name in LEVELS) and new <= 2 * WAVE)
    }


def check_left(side: Side, before: dict, peers: int = 1) -> None:
    """What is left of many rooms is what was left of fewer: in every table, with the backend's, and in memory."""
    deadline = time.monotonic() + LEVELS_S
    while leaks := grown(before, after := at_rest(side)):
        assert time.monotonic() < deadline, f"{leaks}"
        time.sleep(0.2)  # levels fall
    assert len(after["peers"]) == peers, "a lost peer is remembered"
    for name in ("fds", "threads"):
        assert after[name] <= before[name], name
    assert not after["tables"].get("_staging._owners"), "a slot of staging is kept for a hand-off that is over"
    assert min(new - old for old, new in pairwise(before["legs"])) < BYTES_PER_ROOM * LEG, before["legs"]


def play_all(
    prefill: Side, decodes: Sequence[Side], lose: Callable[[int], None]
) -> tuple[dict[Side, Counter[str]], dict[Side, dict]]:
    """Each room by its path, in waves; which causes each side saw, and what it had after `WARM` rooms.

    With the latter, as `legs`, stands how much memory the process had then and after each further leg, in bytes.
    """
    sides = (prefill, *decodes)
    fill(prefill, 1)
    prefill.call("break_writes", pages=[BROKEN])
    causes: dict[Side, Counter[str]] = {side: Counter() for side in sides}
    before: dict[Side, dict] = {}
    for first in range(0, ROOMS, WAVE):
        Wave(prefill, range(first, first + WAVE)).play(prefill, decodes)
        for side in sides:
            causes[side].update(side.call("forget", within_s=30.0))
        lose(first)
        if first + WAVE == WARM:
            before = {side: {**at_rest(side), "legs": []} for side in sides}
        if first + WAVE >= WARM and (first + WAVE) % LEG == 0:
            for side in sides:
                before[side]["legs"].append(at_rest(side)["rss"])
    return causes, before


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["local", "nixl", "mooncake"])
def test_ten_thousand_rooms_leave_nothing_behind(sides, backend: str) -> None:
    def make(role: str) -> Side:
        return sides(role, backend, timeouts=MEMORY, log="ERROR")

    def lose(first: int) -> None:
        if first % LOSE_EVERY == 0:
            for number, survivor in enumerate(pair):
                lose_a_peer(make, survivor, ROOMS * (1 + number) + first)

    pair = prefill, decode = make("prefill"), make("decode")
    causes, before = play_all(prefill, [decode], lose)
    for side in pair:
        assert causes[side] == EXPECTED
        check_left(side, before[side])


@pytest.mark.timeout(600)
def test_ten_thousand_staged_rooms_leave_nothing_behind(sides) -> None:
    options = {"timeouts": MEMORY, "log": "ERROR"}
    prefill = sides("prefill", "nixl", staging_bytes=64 << 20, **options)
    decodes = [sides("decode", "nixl", shape=shape([2], heads=2, tp=2), rank=rank, **options) for rank in range(2)]
    causes, before = play_all(prefill, decodes, lambda _: None)
    assert prefill.stats()["staged_writes"] > before[prefill]["staged_writes"] > 0
    assert causes[prefill] == EXPECTED
    for side in (prefill, *decodes):
        check_left(side, before[side], len(decodes) if side is prefill else 1)
        # A rank may learn of the other rank's abort before it gets its own command.
        assert either_abort(causes[side]) == either_abort(EXPECTED)


def either_abort(causes: dict[str, int]) -> dict[str, int]:
    counts = Counter(causes)
    counts["aborted"] += counts.pop("peer_aborted", 0)
    return dict(counts)

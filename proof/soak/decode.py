"""A decode process of the soak, which also plays the router and the clients: it makes requests and aborts."""

import random
import time
from collections import Counter
from dataclasses import dataclass
from itertools import count

import msgspec
import zmq
from pdpool_connector import DecodeConnector
from pdpool_connector.protocol.status import Phase, TransferStatus
from pdpool_connector.runtime.transfer import DecodeTransfer

from proof.soak.pool import Lease, Pool
from proof.soak.process import REPORT_S, Process, Report, Request, rows, started

ROOMS = 48
"""Few for each pair of processes: A room is used again as soon as both sides have reported its last end. That
hand-off may still quiesce."""
IN_ROOM = 2
"""Hand-offs at a time in one room, of different prompts."""
SIZES = (1, 2, 8, 24, 48, 96)
SIZE_WEIGHTS = (3, 2, 3, 4, 4, 2)
TURN_S = 0.0005
WATCH_S = 1.0


@dataclass(slots=True)
class Plan:
    """How decode will abort a hand-off: so many seconds after `moment`.

    The moment is a phase, "open" (at once), or "landing" (the first page is there, others are on their way).
    """

    moment: str
    delay_s: float


@dataclass(slots=True)
class Live:
    """One hand-off under way, which takes its memory at `offer_at`. `landed`: pages that were there at the abort."""

    request: Request
    prefix: int
    transfer: DecodeTransfer
    plan: Plan | None
    offer_at: float
    lease: Lease | None = None
    abort_at: float | None = None
    landed: int | None = None
    ended: bool = False

    @property
    def wanted(self) -> int:
        """Pages that decode does not hold already."""
        return self.request.pages - self.prefix


class DecodeSide:
    """The loop."""

    def __init__(self, process: Process) -> None:
        self._process, order = process, process.order
        self._random = random.Random(order.seed)
        self._pool = Pool(order.side, order.seed)
        self._connector, self._changed = started(DecodeConnector, order, self._pool)
        self._context = zmq.Context()
        self._orders = []
        for _, address in order.prefills:
            socket = self._context.socket(zmq.DEALER)
            socket.connect(address)
            self._orders.append(socket)
        self._free_keys = [
            (prefill, order.side << 16 | room)
            for prefill in range(len(order.prefills))
            for room in range(ROOMS)
            for _ in range(IN_ROOM)
        ]
        self._serials = count(1)
        self._live: list[Live] = []
        self._open_halves: dict[int, int] = {}
        self._keys: dict[int, tuple[int, int]] = {}
        self._outcomes: Counter[str] = Counter()
        self._late = 0
        process.send({})

    def run(self) -> None:
        """Rounds of work; each ends when nothing is left of it."""
        while self._process.next_order() == "go":
            self._work()
            self._process.finish_round(self._connector, self._pool, self._report)
        self._connector.close()
        self._context.destroy(0)

    def _work(self) -> None:
        report_at = watch_at = 0.0
        while not (stopping := self._process.has_order()) or self._live:
            now = time.monotonic()
            self._receive_ends()
            while not stopping and len(self._live) < self._process.order.window and self._begin():
                pass
            self._live = [live for live in self._live if self._advance(live, now)]
            if now >= watch_at:
                self._watch()
                watch_at = now + WATCH_S
            if now >= report_at:
                self._process.send(self._report())
                report_at = now + REPORT_S
            self._changed.wait(TURN_S)
            self._changed.clear()

    def _report(self) -> Report:
        return Report(
            side=self._process.order.side,
            outcomes=dict(self._outcomes),
            stale_bytes=self._pool.stale_bytes,
            pages_reused=self._pool.pages_reused,
            late=self._late,
            rows=rows(self._connector) + len(self._live),
            faults=self._connector.stats().faults,
        )

    def _begin(self) -> bool:
        """Open one more hand-off; False when there is no room for it."""
        pick = self._random
        pages = pick.choices(SIZES, SIZE_WEIGHTS)[0]
        prefix = pick.choice((0, 0, 0, pages // 4, pages // 2, pages))
        waiting = [live.wanted for live in self._live if live.lease is None]
        if not self._free_keys or not self._pool.room_for(pages - prefix + sum(waiting), rows=1 + len(waiting)):
            return False
        # The room that was freed last comes first.
        key = prefill, room = self._free_keys.pop()
        owner = (self._process.order.side << 24) | next(self._serials)
        request = self._request(room, owner, pages)
        prefill_first = pick.random() < 0.5
        if prefill_first:
            self._orders[prefill].send(msgspec.msgpack.encode(request))
        address = self._process.order.prefills[prefill][0]
        transfer = self._connector.open(address, room, request.id, prompt=request.prompt)
        if not prefill_first:
            self._orders[prefill].send(msgspec.msgpack.encode(request))
        self._keys[owner], self._open_halves[owner] = key, 2
        offer_at = time.monotonic() + pick.choice((0.0, 0.0, 0.003, 0.02))
        self._live.append(Live(request, prefix, transfer, self._plan(request), offer_at))
        return True

    def _request(self, room: int, owner: int, pages: int) -> Request:
        pick = self._random
        sends = pick.randint(1, min(pages, 4))
        abort_after = pick.randint(0, sends) if pick.random() < 0.35 else None
        return Request(
            room=room,
            owner=owner,
            pages=pages,
            delay_s=pick.choice((0.0, 0.0, 0.0, 0.003, 0.02)),
            sends=sends,
            gap_s=pick.choice((0.0, 0.0, 0.001, 0.005)),
            abort_after=abort_after,
            abort_s=pick.choice((0.0, pick.expovariate(1000))),
        )

    def _plan(self, request: Request) -> Plan | None:
        pick = self._random
        if pick.random() < (0.1 if request.abort_after is None else 0.5):
            return None
        moment = pick.choice(("open", "landing", "landing", Phase.TRANSFERRING.value, Phase.DONE.value))
        delay_s = 0.0 if moment == "landing" else pick.choice((0.0, pick.expovariate(1000), pick.uniform(0, 0.02)))
        return Plan(moment, delay_s)

    def _advance(self, live: Live, now: float) -> bool:
        """One turn for one hand-off; False when it is over and its pages are free."""
        status = live.transfer.status
        if live.plan is not None and self._has_come(live.plan.moment, live, status):
            live.abort_at, live.plan = now + live.plan.delay_s, None
        if live.abort_at is not None and now >= live.abort_at:
            live.abort_at = None
            live.transfer.abort()
            live.landed = self._landed(live)
        elif live.lease is None and now >= live.offer_at and not status.ended:
            self._offer(live)
        if not status.ended:
            return True
        if not live.ended:
            live.ended = True
            self._outcomes[status.cause or "done"] += 1
            self._half_ended(live.request.owner)
        if not status.releasable:
            return True
        if live.lease is not None:
            if status.cause is not None and live.landed is not None and self._landed(live) > live.landed:
                self._late += 1
            self._pool.check(live.lease, complete=status.cause is None)
            self._pool.give_back(live.lease)
        return False

    def _offer(self, live: Live) -> None:
        live.lease = self._pool.take(live.request.owner, live.prefix, live.wanted)
        live.transfer.offer(live.lease.pages, aux_slot=live.lease.slot, prefix_pages=live.prefix)

    def _landed(self, live: Live) -> int:
        return 0 if live.lease is None else self._pool.landed(live.lease)

    def _has_come(self, moment: str, live: Live, status: TransferStatus) -> bool:
        match moment:
            case "open":
                return True
            case "landing":
                return self._landed(live) > 0
            case _:
                return status.phase.value == moment

    def _receive_ends(self) -> None:
        for socket in self._orders:
            while socket.poll(0):
                self._half_ended(msgspec.msgpack.decode(socket.recv(), type=int))

    def _half_ended(self, owner: int) -> None:
        """One side has answered its client: once both have, the room is free."""
        self._open_halves[owner] -= 1
        if not self._open_halves[owner]:
            del self._open_halves[owner]
            self._free_keys.append(self._keys.pop(owner))

    def _watch(self) -> None:
        """Look at all pages, free and owned, at a moment like any other."""
        self._pool.check_free()
        for live in self._live:
            if live.lease is not None:
                self._pool.check(live.lease, complete=False)


def main() -> None:
    DecodeSide(Process()).run()


if __name__ == "__main__":
    main()

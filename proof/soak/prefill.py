"""A prefill process of the soak: does what requests say, as a scheduler does (post, poll, never block)."""

import time
from collections import Counter, deque
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq
from pdpool_connector import PrefillConnector
from pdpool_connector.runtime.transfer import PrefillTransfer

from proof.soak.pool import Lease, Pool
from proof.soak.process import REPORT_S, Process, Report, Request, rows, started

TURN_S = 0.0005


@dataclass(slots=True)
class Live:
    """One request under way."""

    request: Request
    lease: Lease
    transfer: PrefillTransfer
    sent: int = 0
    next_at: float = 0.0
    abort_at: float | None = None
    ended: bool = False


class PrefillSide:
    """The loop."""

    def __init__(self, process: Process) -> None:
        self._process, order = process, process.order
        self._pool = Pool(order.side, order.seed)
        self._connector, self._changed = started(PrefillConnector, order, self._pool)
        self._context = zmq.Context()
        self._orders = self._context.socket(zmq.ROUTER)
        port = self._orders.bind_to_random_port("tcp://127.0.0.1")
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._late: list[tuple[float, Request]] = []
        self._queue: deque[Request] = deque()
        self._routes: dict[int, bytes] = {}
        self._live: list[Live] = []
        self._outcomes: Counter[str] = Counter()
        process.send({"bootstrap": self._connector.bootstrap_address, "orders": f"tcp://127.0.0.1:{port}"})

    def run(self) -> None:
        """Rounds of work; each ends when nothing is left of it."""
        while self._process.next_order() == "go":
            self._work()
            self._process.finish_round(self._connector, self._pool, self._report)
        self._connector.close()
        self._context.destroy(0)

    def _work(self) -> None:
        report_at = 0.0
        while not self._process.has_order() or self._live or self._queue or self._late:
            now = time.monotonic()
            self._receive(now)
            self._admit(now)
            self._live = [live for live in self._live if self._advance(live, now)]
            if now >= report_at:
                self._pool.check_free()
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
            rows=rows(self._connector) + len(self._live),
            faults=self._connector.stats().faults,
        )

    def _receive(self, now: float) -> None:
        while self._orders.poll(0):
            route, body = self._orders.recv_multipart()
            request = self._decoder.decode(body)
            self._routes[request.owner] = route
            self._late.append((now + request.delay_s, request))
        self._queue.extend(request for due, request in self._late if due <= now)
        self._late = [(due, request) for due, request in self._late if due > now]

    def _admit(self, now: float) -> None:
        while self._queue and self._pool.room_for(self._queue[0].pages):
            request = self._queue.popleft()
            transfer = self._connector.open(request.room, request.id, prompt=request.prompt)
            lease = self._pool.take(request.owner, 0, request.pages)
            self._pool.fill(lease)
            live = Live(request, lease, transfer, next_at=now)
            if request.abort_after == 0:
                live.abort_at = now + request.abort_s
            self._live.append(live)

    def _advance(self, live: Live, now: float) -> bool:
        """One turn for one request; False when it is over and its pages are free."""
        status, request = live.transfer.status, live.request
        if live.abort_at is not None and now >= live.abort_at:
            live.abort_at = None
            live.transfer.abort()
        if status.ended:
            if not live.ended:
                live.ended = True
                self._outcomes[status.cause or "done"] += 1
                # The client has the answer of this side too: the router may use the room again.
                self._orders.send_multipart([self._routes.pop(request.owner), msgspec.msgpack.encode(request.owner)])
            if not status.releasable:
                return True
            self._pool.check(live.lease, complete=True)
            self._pool.give_back(live.lease)
            return False
        if live.sent < request.sends and now >= live.next_at:
            self._send(live)
            live.next_at = now + request.gap_s
            if live.sent == request.abort_after:
                live.abort_at = now + request.abort_s
        return True

    def _send(self, live: Live) -> None:
        request, pages = live.request, live.lease.pages
        bounds = np.linspace(0, len(pages), request.sends + 1).astype(int)
        start, stop = int(bounds[live.sent]), int(bounds[live.sent + 1])
        live.sent += 1
        last = live.sent == request.sends
        live.transfer.send(pages[start:stop], start=start, last=last, aux_slot=live.lease.slot if last else None)


def main() -> None:
    PrefillSide(Process()).run()


if __name__ == "__main__":
    main()

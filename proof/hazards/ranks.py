"""H23: ranks of one instance whose queues do not look alike."""

import time
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
import numpy as np
from pdpool_connector.protocol.rank_consensus import Key, RankStatus, agree
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus

from proof.hazards.stage import CANARY, Stage, hazard
from tests.integration.instances import Instance, shape

SHAPES: Final = {"nixl": ("PP 2", shape([2, 1])), "mooncake": ("TP 2", shape([3], tp=2))}
"""By backend. Tensor ranks share no peer through which one could learn of the other's failure; stages do."""
ENDED_S: Final = 30.0


class _Request(NamedTuple):
    """One request: its pages on both sides, the same on all ranks, follow from its number."""

    name: str
    room: int
    number: int

    @property
    def source(self) -> int:
        """Its page at prefill."""
        return 30 + self.number

    @property
    def target(self) -> int:
        """Its page at decode."""
        return 3 + self.number


class Queues:
    """What the engine of each rank has in its queue, in its own order, and how it follows what the ranks agree on.

    The collective by which engines exchange their views is this process.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._of: list[list[_Request]] = [[] for _ in instance.ranks]
        self.over: dict[str, RankStatus] = {}
        """How requests have ended."""

    @property
    def waiting(self) -> list[list[str]]:
        """The requests that each rank has, [] when no rank has any."""
        return [[one.name for one in queue] for queue in self._of] if any(self._of) else []

    def open(self, rank: int, one: _Request, prefill: Instance | None = None) -> None:
        """The engine of one rank has a request; `prefill` is the instance that serves it, for a decode."""
        where = {"prefill": prefill.bootstrap, "pages": [one.target], "aux_slot": one.number} if prefill else {}
        self._instance.ranks[rank].open(one.name, one.room, **where)
        self._of[rank].append(one)

    def look(self) -> Mapping[Key, RankStatus]:
        """What the ranks agree on now."""
        views = [
            {Key(one.room, one.name): msgspec.convert(side.status(one.name), TransferStatus) for one in queue}
            for side, queue in zip(self._instance.ranks, self._of, strict=True)
        ]
        return agree(views)

    def turn(self) -> None:
        """Follow the agreement: abort on each rank what has failed, take out of each queue what is over."""
        agreed = self.look()
        for side, queue in zip(self._instance.ranks, self._of, strict=True):
            for one in list(queue):
                status = agreed[Key(one.room, one.name)]
                if status.phase is Phase.FAILED:
                    self.over.setdefault(one.name, status)
                    side.abort(one.name)
                if status.releasable:
                    self.over.setdefault(one.name, status)
                    queue.remove(one)


@hazard(23, "ranks agree by position in their queues and mix requests up")
def by_position(stage: Stage) -> str:
    called, ranks = SHAPES[stage.backend]
    _diverge(stage, stage.instance("prefill", ranks), stage.instance("decode", ranks))
    return (
        f"{called}, queues in unlike orders and one empty at first: what one rank aborted, or failed, ended so on "
        "both, by key; the others brought their bytes; the queues of all four ranks are empty"
    )


def _diverge(stage: Stage, prefill: Instance, decode: Instance) -> None:
    whole = prefill.fill(1)
    for side in decode.ranks:
        side.pages[:] = CANARY
    requests = [_Request(stage.name(), stage.room(), index) for index in range(5)]
    _, aborted, _, broken, _ = requests
    sending, receiving = _open_in_unlike_orders(prefill, decode, requests)
    _fail_on_one_rank_each(prefill, decode, requests, aborted, broken)
    deadline = time.monotonic() + ENDED_S
    while sending.waiting or receiving.waiting:
        assert time.monotonic() < deadline, f"still queued: {sending.waiting} at prefill, {receiving.waiting} at decode"
        for queues in (receiving, sending):
            queues.turn()
    ends = {aborted: (1, Cause.ABORTED, Cause.PEER_ABORTED), broken: (0, *[Cause.TRANSFER_FAILED] * 2)}
    for one in requests:
        root, learned = sending.over[one.name], receiving.over[one.name]
        wanted = ends.get(one, (None, None, None))
        assert (root.rank, root.cause, learned.cause) == wanted, f"{root} and {learned} are not {wanted}"
        if one not in ends:
            _check(decode, whole, one)
    for instance in (prefill, decode):
        instance.settle_empty()


def _open_in_unlike_orders(prefill: Instance, decode: Instance, requests: list[_Request]) -> tuple[Queues, Queues]:
    """Open all requests on all ranks; while one rank has none, no request of the other may end."""
    sending, receiving = Queues(prefill), Queues(decode)
    for one in requests:
        sending.open(0, one)
        receiving.open(0, one, prefill)
    for queues in (sending, receiving):
        for status in queues.look().values():
            assert status.phase in (Phase.WAITING, Phase.TRANSFERRING), status
            assert status.absent == (1,), f"one rank has nothing yet: {status}"
    for one in reversed(requests):
        sending.open(1, one)
    for one in requests[2:] + requests[:2]:
        receiving.open(1, one, prefill)
    for one in requests:
        prefill.until(one.name, "ready")
    return sending, receiving


def _fail_on_one_rank_each(
    prefill: Instance, decode: Instance, requests: list[_Request], aborted: _Request, broken: _Request
) -> None:
    """Send all, but one rank aborts one, and a write of another fails on the other rank."""
    prefill.ranks[1].abort(aborted.name)
    prefill.ranks[0].call("break_writes", pages=[broken.source])
    prefill.send(broken.name, [broken.source])
    # Small writes go out together and fail together: no other may go with this one.
    prefill.ranks[0].until(broken.name, "ended")
    for rank, side in enumerate(prefill.ranks):
        for one in requests:
            if one is not broken and (rank, one) != (1, aborted):
                side.send(one.name, [one.source], aux_slot=one.number)
    for instance in (prefill, decode):
        instance.ranks[1].until(aborted.name, "ended")
        instance.ranks[0].until(broken.name, "ended")


def _check(decode: Instance, whole: np.ndarray, one: _Request) -> None:
    for side, shard in zip(decode.ranks, decode.shards, strict=True):
        wanted = whole[shard.first_layer : shard.layer_end, :, one.source, :, shard.first_head : shard.head_end]
        assert np.array_equal(side.cells[:, :, one.target], wanted), f"{one} brought other bytes"

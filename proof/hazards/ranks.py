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
"""By backend. Tensor ranks share no peer that could tell one what has failed on the other; stages do, for aux rows."""
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
    """What the engine of each rank has in its queue, in its own order, and what it does about verdicts.

    The collective by which engines exchange their views is this process.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._of: list[list[_Request]] = [[] for _ in instance.ranks]
        self.over: dict[str, RankStatus] = {}
        """The verdicts by which requests have ended."""

    @property
    def waiting(self) -> list[list[str]]:
        """The requests that each rank has, [] when no rank has any."""
        return [[one.name for one in queue] for queue in self._of] if any(self._of) else []

    def open(self, rank: int, one: _Request, prefill: Instance | None = None) -> None:
        """The engine of one rank has got to a request; `prefill` is who serves it, for a decode."""
        where = {"prefill": prefill.bootstrap, "pages": [one.target], "aux_slot": one.number} if prefill else {}
        self._instance.ranks[rank].open(one.name, one.room, **where)
        self._of[rank].append(one)

    def look(self) -> Mapping[Key, RankStatus]:
        """What the ranks make of their queues now."""
        views = [
            {Key(one.room, 0, one.name): msgspec.convert(side.status(one.name), TransferStatus) for one in queue}
            for side, queue in zip(self._instance.ranks, self._of, strict=True)
        ]
        return agree(views)

    def turn(self) -> None:
        """Do as the verdicts say: abort on each rank what has failed, take out of each queue what is over."""
        verdicts = self.look()
        for side, queue in zip(self._instance.ranks, self._of, strict=True):
            for one in list(queue):
                verdict = verdicts[Key(one.room, 0, one.name)]
                if verdict.phase is Phase.FAILED:
                    self.over.setdefault(one.name, verdict)
                    side.abort(one.name)
                if verdict.releasable:
                    self.over.setdefault(one.name, verdict)
                    queue.remove(one)


@hazard(23, "ranks agree by position in their queues, and mix requests up")
def by_position(stage: Stage) -> str:
    called, ranks = SHAPES[stage.backend]
    _diverge(stage, stage.instance("prefill", ranks), stage.instance("decode", ranks))
    return (
        f"{called}, queues in unlike orders and one empty at first: what one rank gave up, or failed at, ended so on "
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
        root, told = sending.over[one.name], receiving.over[one.name]
        wanted = ends.get(one, (None, None, None))
        assert (root.rank, root.cause, told.cause) == wanted, f"{root} and {told} are not {wanted}"
        if one not in ends:
            _check(decode, whole, one)
    for instance in (prefill, decode):
        instance.settle_empty()


def _open_in_unlike_orders(prefill: Instance, decode: Instance, requests: list[_Request]) -> tuple[Queues, Queues]:
    """All requests on all ranks; while one rank has none, nothing may be said of those of the other."""
    sending, receiving = Queues(prefill), Queues(decode)
    for one in requests:
        sending.open(0, one)
        receiving.open(0, one, prefill)
    for queues in (sending, receiving):
        for verdict in queues.look().values():
            assert (verdict.phase, verdict.absent) == (Phase.WAITING, (1,)), f"one rank has nothing yet: {verdict}"
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
    """All are sent, but one rank gives one up, and the other's data plane fails another."""
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
    for side, part in zip(decode.ranks, decode.parts, strict=True):
        wanted = whole[part.first_layer : part.layer_end, :, one.source, :, part.first_head : part.head_end]
        assert np.array_equal(side.cells[:, :, one.target], wanted), f"{one} brought other bytes"

"""What `pdpool connector top` reads of those that say they are connectors, and shows."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
from pdpool_connector.console.look import ANSWER_S, MAX_STATE_BYTES, Look, State, look
from pdpool_connector.console.top import tables
from pdpool_connector.runtime.stats import LinkStats, PeerStats, QueueStats
from rich.console import Group
from rich.table import Table
from rich.text import Text

from proof.fuzz.allowance import Allowance
from proof.fuzz.samples import A, B, Fuzzed

ADDRESS = "h:1"


class _Answered:
    """An HTTP session, its answer and the answer's body: nothing is waited for."""

    status = 200

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.content = self

    @contextlib.asynccontextmanager
    async def get(self, url: str, timeout: Any) -> AsyncIterator["_Answered"]:  # noqa: ANN401, ASYNC109 - aiohttp's
        """The only request there is."""
        assert (url, timeout.total) == (f"http://{ADDRESS}/v1/state", ANSWER_S)
        yield self

    async def read(self, most: int) -> bytes:
        """All but the last byte, the last byte, and the end."""
        assert 0 < most <= MAX_STATE_BYTES
        count = max(len(self._body) - 1, 1)
        part, self._body = self._body[:count], self._body[count:]
        return part


def state() -> tuple[Fuzzed, Sequence[bytes]]:
    """`look`, and tables of what it saw: each error is part of the look, and nothing steers the terminal."""
    allowance = Allowance()
    before = {ADDRESS: Look(ADDRESS, -1.0, _state())}

    def fuzz(data: bytes) -> None:
        with allowance.for_input(data):
            seen = _ended(look(_Answered(data), ADDRESS))  # type: ignore[arg-type] # as much as it asks
        assert (seen.state is None) == bool(seen.error)
        for text in _texts(tables([seen], before)):
            assert text.isprintable(), f"{text!r} is shown"

    return fuzz, [msgspec.json.encode(one) for one in (_state(), _state(peers=(), links=(), holds=0, queues={}))]


def _ended(asking: Any) -> Look:  # noqa: ANN401 - a coroutine that waits for nothing
    try:
        asking.send(None)
    except StopIteration as end:
        seen: Look = end.value
        return seen
    raise AssertionError("it waits for something")


def _texts(shown: Group) -> Iterator[str]:
    for table in shown.renderables:
        assert isinstance(table, Table)
        for column in table.columns:
            for cell in column.cells:
                assert isinstance(cell, Text) or not cell, f"{cell!r} may be markup"  # rich fills a row with ""
                yield str(cell)


def _state(**changes: Any) -> State:  # noqa: ANN401 - fields
    said = State(
        role="decode",
        rank=0,
        incarnation=A,
        uptime_s=7.5,
        loop_lag_s=0.25,
        engine_beat_age_s=None,
        draining=True,
        queues={"waiting": QueueStats(2, 1.5, 3)},
        outcomes={"done": 3, "failed": 1},
        holds=1,
        held_bytes=4096,
        held_oldest_s=9.0,
        bytes_moved_total=1 << 20,
        peers=(PeerStats(B, "up", 0.5, 1, 1),),
        links=(LinkStats("h:2", "pausing", (1,), "no\x1b[2J", 2.0),),
        attempts={"open": QueueStats(1, 0.5, 2)},
        causes={"aborted\n": 1},
        checksums={"mismatched": 1},
        faults=1,
    )
    return msgspec.structs.replace(said, **changes)

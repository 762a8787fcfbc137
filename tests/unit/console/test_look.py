"""A look at a connector over a network that hands its answer on in pieces."""

import asyncio
import io

import aiohttp
import msgspec
import pytest
from pdpool_connector.console.look import Look, State, look_at_all
from pdpool_connector.console.story import story
from pdpool_connector.console.top import tables
from pdpool_connector.flight.record import Header, Record, Step
from pdpool_connector.protocol.events import Report, Tick
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.stats import LinkStats, PeerStats
from rich.console import Console

STATE = State(
    role="prefill",
    rank=0,
    incarnation="a" * 32,
    uptime_s=1.0,
    loop_lag_s=0.0,
    engine_beat_age_s=None,
    draining=False,
    queues={},
    outcomes={},
    holds=0,
    held_bytes=0,
    held_oldest_s=None,
    bytes_moved_total=0,
    peers=(),
)


async def test_a_state_that_comes_in_pieces_is_read_to_its_end(monkeypatch):
    begun, read = asyncio.Event(), aiohttp.StreamReader.read

    async def noted(reader, limit=-1):
        part = await read(reader, limit)
        begun.set()
        return part

    monkeypatch.setattr(aiohttp.StreamReader, "read", noted)
    body = msgspec.json.encode(STATE)

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:100])
        await begun.wait()
        writer.write(body[100:])
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        (seen,) = await look_at_all([f"127.0.0.1:{port}"])
    assert (seen.state, seen.error) == (STATE, "")


@pytest.mark.parametrize("field", ["holds", "held_bytes", "bytes_moved_total"])
def test_impossible_count_is_refused_by_name(field: str) -> None:
    said = msgspec.json.encode({**msgspec.structs.asdict(STATE), field: 1 << 63})
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(said, type=State)


def test_text_of_peers_cannot_control_the_terminal() -> None:
    said = "bye\n\x1b[2J[/red]"
    peer, link = PeerStats("b" * 32, said, 0.0, 1, 1), LinkStats("h:1", "pausing", (0,), said, 1.0)
    state = msgspec.structs.replace(STATE, peers=(peer,), links=(link,), causes={said: 1})
    console = Console(width=200, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(tables([Look("h:2", 1.0, state), Look("h:3", 1.0, None, said)], None))
    output = console.file.getvalue()
    assert output.count(r"bye\n\x1b[2J[/red]") == 4
    assert "\x1b[2J" not in output


def test_flight_record_keeps_to_its_lines() -> None:
    said = "bye\nreplay ok: events=1\x1b[2J"
    header = Header(
        role="decode",
        rank=0,
        incarnation="a" * 32,
        room=7,
        request_id="r",
        handle=1,
        cause="peer_aborted",
        message=said,
        releasable=False,
        missing=0,
        wall=1.0,
        at=1.0,
        timeouts=Timeouts(),
    )
    report = Report(1, TransferStatus(Phase.FAILED, Cause.PEER_ABORTED, said))
    lines = list(story(Record(header, (Step(1.0, Tick(), (report,), said),))))
    assert all(line.isprintable() for line in lines)
    assert sum(r"bye\nreplay ok: events=1\x1b[2J" in line for line in lines) == 3

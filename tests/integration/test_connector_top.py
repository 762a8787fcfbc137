"""`pdpool connector top` against real connectors, and against what is none."""

import asyncio
import io
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from threading import Thread

import pytest
from click.testing import CliRunner
from pdpool_connector.cli import main
from pdpool_connector.console.look import Look, State, look_at_all, rates
from pdpool_connector.console.top import seconds, tables
from pdpool_connector.transport.http import HttpServer, Page
from rich.console import Console

from tests.integration.connector_peer import Side
from tests.integration.handoffs import TIMEOUTS, hold_a_write, offer


@pytest.fixture(scope="module")
def pair():
    """A prefill and a decode with one hand-off that waits and one that is held for a write that does not end."""
    prefill, decode = Side("prefill", "local", timeouts=TIMEOUTS), Side("decode", "local", timeouts=TIMEOUTS)
    hold_a_write(prefill, decode, 8, name="held", pages=[4, 6])
    decode.abort("held")
    decode.settle(lambda stats: stats["holds"] == 1)
    offer(decode, prefill, 9, name="waits", pages=[5])
    decode.settle(lambda stats: stats["attempts"]["offered"]["reqs"] == 1)
    # The endpoint shows what was so a moment ago.
    deadline = time.monotonic() + 30
    while not any("offered" in line for line in top("--once", decode.admin).output.splitlines()):
        assert time.monotonic() < deadline, "the endpoint does not show the request that waits"
    yield prefill, decode
    prefill.call("release_writes")
    assert (prefill.end(), decode.end()) == (0, 0)


def top(*arguments: str):
    return CliRunner().invoke(main, ["connector", "top", *arguments], env={"COLUMNS": "140"})


def test_once_prints_one_look_and_exits(pair) -> None:
    prefill, decode = pair
    result = top("--once", prefill.admin, decode.admin)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()

    def line(*words: str) -> str:
        found = [text for text in lines if all(word in text for word in words)]
        assert len(found) == 1, (words, result.output)
        return found[0]

    assert "1, 4.2 kB" in line(decode.admin, "decode 0")
    assert " 1 " in line(decode.admin, "offered")
    assert " 1 " in line(decode.admin, "failed: aborted")
    assert prefill.control in line(decode.admin, prefill.incarnation[:8])
    assert decode.control in line(prefill.admin, decode.incarnation[:8])
    assert "decode_transfer" in result.output


def printed(looks: list[Look], columns: int) -> list[list[str]]:
    """Lines of connectors and their peers: the first words of each."""
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(tables(looks, None))
    return [line.split()[:3] for line in console.export_text().splitlines() if "127.0.0.1:" in line]


def test_80_columns_are_wide_enough(pair) -> None:
    looks = asyncio.run(look_at_all([side.admin for side in pair]))
    assert all(look.state is not None for look in looks)
    assert printed(looks, 80) == printed(looks, 140)


def test_two_looks_show_rates_within_80_columns() -> None:
    before = Look("10.201.123.234:9400", 10.0, state())
    now = Look("10.201.123.234:9400", 12.0, state(outcomes={"done": 30, "failed": 1, "aborted": 4}))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(tables([now], {before.address: before}))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["10.201.123.234:9400", "10.0", "0.0", "2.0", "0", "bytes"] in rows
    assert ["connector", "done/s", "failed/s", "aborted/s", "moved/s"] in rows


def test_unreachable_address_is_named_beside_the_others(pair) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{unused.getsockname()[1]}"
        result = top("--once", pair[0].admin, nobody)
    assert result.exit_code == 1
    assert f"{nobody}: Cannot connect" in result.output.replace("\n", "")
    assert "prefill 0" in result.output


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"\xff\xfe"])
def test_other_endpoint_is_named_as_none_of_ours(body) -> None:
    server = HttpServer("127.0.0.1")
    port = server.serve(0, {"/v1/state": Page("application/json", lambda: body)})
    try:
        result = top("--once", f"127.0.0.1:{port}")
    finally:
        server.close()
    assert result.exit_code == 1
    assert "not the admin endpoint of a connector" in result.output


def test_silent_address_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        result = top("--once", f"127.0.0.1:{silent.getsockname()[1]}")
    assert result.exit_code == 1
    assert "no answer within 3 s" in result.output
    assert time.monotonic() - begun < 30


def test_help_and_errors_say_how_to_connect() -> None:
    assert "kubectl port-forward -n NAMESPACE pod/POD 9400:9400" in top("--help").output
    result = top("--once", "127.0.0.1")
    assert result.exit_code == 2
    assert "give host:port" in result.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(("--interval", "nan"), "nan is no number of seconds"), ((), "and this is no terminal: give --once for one look")],
)
def test_useless_arguments_are_refused(arguments, why) -> None:
    result = top(*arguments, "127.0.0.1:1")
    assert result.exit_code == 2
    assert why in result.output


def test_terminal_shows_looks_until_interrupted(pair) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pdpool_connector.cli", "connector", "top", "--interval", "0.2", pair[1].admin]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        # What a shell starts in the background ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 60
    try:
        while seen.count(b"done/s") < 3:
            assert time.monotonic() < deadline, seen[-2000:]
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        reader = Thread(target=_drain, args=(ours,))
        reader.start()
        assert process.wait(60) == 0
        reader.join(10)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        os.close(ours)


def _drain(terminal: int) -> None:
    """Read until the other end is closed, so that the last words do not block it."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # how Linux says so
        return


def state(**changes: object) -> State:
    values = {
        "role": "decode",
        "rank": 0,
        "incarnation": "a" * 32,
        "uptime_s": 1.0,
        "loop_lag_s": 0.0,
        "engine_beat_age_s": None,
        "draining": False,
        "queues": {},
        "outcomes": {"done": 10, "failed": 1, "aborted": 0},
        "holds": 0,
        "held_bytes": 0,
        "held_oldest_s": None,
        "bytes_moved_total": 1000,
        "peers": (),
    }
    return State(**(values | changes))


def test_rates_need_two_looks_at_one_process() -> None:
    first = Look("a:1", 10.0, state())
    then = Look("a:1", 12.0, state(outcomes={"done": 30, "failed": 1, "aborted": 4}, bytes_moved_total=5000))
    assert rates(first, then) == {"done": 10.0, "failed": 0.0, "aborted": 2.0, "bytes": 2000.0}
    assert rates(None, then) == {}
    assert rates(first, Look("a:1", 12.0, None, "gone")) == {}
    assert rates(first, Look("a:1", 12.0, state(incarnation="b" * 32))) == {}


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0031, "3 ms"), (4.21, "4.2 s"), (700.0, "12 m"), (12600.0, "3.5 h")]
)
def test_durations_are_in_a_unit_of_their_size(value, text) -> None:
    assert seconds(value) == text

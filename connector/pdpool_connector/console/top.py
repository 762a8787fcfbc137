"""`pdpool connector top`: connectors as tables that a terminal shows."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdpool_connector.console.look import Look, State, look_at_all, rates
from pdpool_connector.protocol.frames import shown

STALE_S = 2.0
"""An engine that beats less often than this, or a loop that lags by a tenth of it, is shown in red."""


def tables(looks: Sequence[Look], before: Mapping[str, Look] | None) -> Group:
    """Connectors, their speed, what they have under way, and their peers: each within 80 columns.

    `before`: the last look at each address; None where there is no other to compare with.
    """
    shown = [_connectors(looks), *([] if before is None else [_speeds(looks, before)]), _attempts(looks)]
    if any(one.state is not None and (one.state.peers or one.state.links) for one in looks):
        shown.append(_peers(looks))
    return Group(*shown)


def show_once(addresses: Sequence[str], console: Console) -> int:
    """Print one look; 1 when an address could not be reached."""
    looks = asyncio.run(look_at_all(addresses))
    if any(one.state is not None for one in looks):
        console.print(tables(looks, None))
    return _complain(looks, console)


def show(addresses: Sequence[str], interval_s: float, console: Console) -> int:
    """Show looks until Ctrl-C; 1 at once when an address cannot be reached at the start."""
    looks = asyncio.run(look_at_all(addresses))
    if any(one.state is None for one in looks):
        return _complain(looks, console)
    try:
        asyncio.run(_go_on(addresses, interval_s, looks, console))
    except KeyboardInterrupt:
        return 0
    raise AssertionError("it goes on until it is interrupted")


async def _go_on(addresses: Sequence[str], interval_s: float, looks: Sequence[Look], console: Console) -> None:
    """One task for as long as it lasts: Ctrl-C at the end of a short one would be lost."""
    with Live(tables(looks, {}), console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.refresh()
            await asyncio.sleep(interval_s)
            before = {one.address: one for one in looks}
            looks = await look_at_all(addresses)
            live.update(tables(looks, before))


def _complain(looks: Iterable[Look], console: Console) -> int:
    failed = [one for one in looks if one.state is None]
    for one in failed:
        console.print(Text(shown(f"{one.address}: {one.error}"), style="red"), soft_wrap=True)
    return 1 if failed else 0


def _connectors(looks: Sequence[Look]) -> Table:
    table = _table("connectors", "connector", "role", "up", "beat", "lag", "holds")
    for one in looks:
        if (state := one.state) is None:
            _add(table, one.address, Text(one.error, style="red"))
            continue
        _add(
            table,
            one.address,
            f"{state.role} {state.rank}" + (" draining" if state.draining else ""),
            seconds(state.uptime_s),
            _red(seconds(state.engine_beat_age_s), (state.engine_beat_age_s or 0) > STALE_S),
            _red(seconds(state.loop_lag_s), state.loop_lag_s > STALE_S / 10),
            _red(_holds(state), state.holds > 0),
        )
    return table


def _speeds(looks: Sequence[Look], before: Mapping[str, Look]) -> Table:
    table = _table("hand-offs", "connector", "done/s", "failed/s", "aborted/s", "moved/s")
    for one in looks:
        if one.state is not None:
            speed = rates(before.get(one.address), one)
            moved = decimal(int(speed["bytes"])) if speed else "-"
            _add(table, one.address, *(_rate(speed, name) for name in ("done", "failed", "aborted")), moved)
    return table


def _holds(state: State) -> str:
    if not state.holds:
        return "0"
    return f"{state.holds}, {decimal(state.held_bytes)}, {seconds(state.held_oldest_s)}"


def _attempts(looks: Sequence[Look]) -> Table:
    table = _table("under way", "connector", "queue or state", "requests", "oldest", "went on")
    for one in looks:
        if (state := one.state) is None:
            continue
        for name, queue in {**state.queues, **state.attempts}.items():
            if queue.reqs or name in state.queues:
                _add(table, one.address, name, str(queue.reqs), seconds(queue.oldest_s), str(queue.moved_total))
        for name, count in _troubles(state).items():
            _add(table, one.address, Text(name, style="red"), str(count), "", "")
    return table


def _troubles(state: State) -> dict[str, int]:
    """What must stay 0 and has not, and failures by cause since the process began."""
    troubles = {f"failed: {cause}": count for cause, count in sorted(state.causes.items()) if count}
    if mismatched := state.checksums.get("mismatched"):
        troubles["checksums that differ"] = mismatched
    if state.faults:
        troubles["faults of the connector"] = state.faults
    return troubles


def _peers(looks: Sequence[Look]) -> Table:
    table = _table("peers", "connector", "peer", "control", "transport", "seen", "live", "waits")
    for one in looks:
        if (state := one.state) is None:
            continue
        for peer in state.peers:
            transport = f"{peer.backend} {peer.transport}".strip()
            counts = (seconds(peer.last_seen_s), str(peer.attempts), str(peer.waiting))
            _add(table, one.address, peer.incarnation[:8], peer.control, transport, *counts)
        for link in state.links:
            if link.failure:
                text = Text(f"{link.state} for {seconds(link.failing_s)}: {link.failure}", style="red")
                _add(table, one.address, link.address, text, "", "", "", "")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < 2 else "right", no_wrap=index == 0, overflow="fold")
    return table


def _add(table: Table, *cells: str | Text) -> None:
    """A row. Other processes wrote much of it, so no cell is markup or can control the terminal."""
    texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
    table.add_row(*(Text(shown(text.plain), style=text.style) for text in texts))


def _rate(speed: Mapping[str, float], name: str) -> str:
    return f"{speed.get(name, 0.0):.1f}" if speed else "-"


def _red(text: str, bad: bool) -> Text:
    return Text(text, style="red" if bad else "")


def seconds(value: float | None) -> str:
    """A duration in its own unit: `-`, `3 ms`, `4.2 s`, `12 m`, `3.5 h`."""
    if value is None:
        return "-"
    for limit, divisor, unit, digits in ((1.0, 0.001, "ms", 0), (120.0, 1.0, "s", 1), (7200.0, 60.0, "m", 0)):
        if value < limit:
            return f"{value / divisor:.{digits}f} {unit}"
    return f"{value / 3600:.1f} h"

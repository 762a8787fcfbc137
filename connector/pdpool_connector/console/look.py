"""One look at connectors through their admin endpoints, and what two looks say together."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import aiohttp
import msgspec

from pdpool_connector.runtime.stats import LinkStats, PeerStats, QueueStats

ANSWER_S: Final = 3.0
"""A connector answers from a thread of its own: one that is silent for this long cannot be reached."""
MAX_STATE_BYTES: Final = 8 << 20
"""A full table of 1024 peers is a tenth of it."""


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class State(msgspec.Struct, frozen=True):
    """The part of `GET /v1/state` that is shown. Fields of other versions are ignored."""

    role: str
    rank: int
    incarnation: str
    uptime_s: float
    loop_lag_s: float
    engine_beat_age_s: float | None
    draining: bool
    queues: dict[str, QueueStats]
    outcomes: dict[str, int]
    holds: Count
    held_bytes: Count
    held_oldest_s: float | None
    bytes_moved_total: Count
    peers: tuple[PeerStats, ...]
    links: tuple[LinkStats, ...] = ()
    attempts: dict[str, QueueStats] = {}
    causes: dict[str, int] = {}
    checksums: dict[str, int] = {}
    faults: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """The answer of one address at `at` (seconds, monotonic clock): its state, or why there is none."""

    address: str
    at: float
    state: State | None
    error: str = ""


async def look(session: aiohttp.ClientSession, address: str) -> Look:
    """Ask one connector; any failure is part of the look."""
    state, error = None, ""
    try:
        async with session.get(f"http://{address}/v1/state", timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as answer:
            if answer.status == 200:
                state = msgspec.json.decode(await _body_of(answer), type=State)
            else:
                error = f"HTTP {answer.status}: not the admin endpoint of a connector"
    except TimeoutError:
        error = f"no answer within {ANSWER_S:g} s"
    except (ValueError, RecursionError) as fault:
        error = f"not the admin endpoint of a connector: {fault}"
    except aiohttp.ClientError as fault:
        error = str(fault)
    return Look(address, time.monotonic(), state, error)


async def _body_of(answer: aiohttp.ClientResponse) -> bytearray:
    """Up to the bound; one `read` gives no more than has arrived by then."""
    body = bytearray()
    while len(body) < MAX_STATE_BYTES and (part := await answer.content.read(MAX_STATE_BYTES - len(body))):
        body += part
    return body


async def look_at_all(addresses: Sequence[str]) -> list[Look]:
    """Ask all at the same time; answers in the order of the addresses."""
    async with aiohttp.ClientSession() as session:
        return list(await asyncio.gather(*(look(session, address) for address in addresses)))


def rates(before: Look | None, now: Look) -> Mapping[str, float]:
    """Hand-offs by outcome, and bytes ("bytes"), a second between two looks at the same process; else nothing."""
    if before is None or before.state is None or now.state is None or now.at <= before.at:
        return {}
    old, new = before.state, now.state
    if old.incarnation != new.incarnation:
        return {}
    seconds = now.at - before.at
    found = {name: (count - old.outcomes.get(name, 0)) / seconds for name, count in new.outcomes.items()}
    return {**found, "bytes": (new.bytes_moved_total - old.bytes_moved_total) / seconds}

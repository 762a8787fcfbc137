"""What is said until somebody answers: at once, then at pauses that double from `retry_first_s` to `retry_max_s`."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import pytest
from pdpool_connector.protocol import frames as f
from pdpool_connector.protocol.events import Tick

from tests.unit.protocol.read import computed, said
from tests.unit.protocol.sides import (
    PREFILL,
    TIMING,
    Decode,
    DecodeRead,
    PrefillRead,
    Side,
    reads,
    sent,
)

WATCHED_S = 30.0
PATIENT = replace(TIMING, drain_s=10 * WATCHED_S, verdict_s=10 * WATCHED_S)
"""Nothing else ends the repetition while it is watched."""
DEADLINE_S = 10 * WATCHED_S


def offered(make: type[Decode]) -> Decode:
    """A decode whose `Open` nobody answers."""
    side = make(PATIENT)
    side.open(deadline_s=DEADLINE_S)
    return side


def failed() -> DecodeRead:
    """A decode that has given up in READ while it reads, which prefill is told."""
    side = DecodeRead(PATIENT)
    side.open(deadline_s=DEADLINE_S)
    assert reads(side.hear(computed()))
    side.wait(5.0)
    side.abort()
    return side


def drained() -> DecodeRead:
    """A decode that has ended in READ what it was offered, and nobody acknowledges that."""
    side = DecodeRead(PATIENT)
    side.open(deadline_s=DEADLINE_S)
    side.hear(said(f.Accepted, sender=PREFILL))
    side.abort()
    return side


def announced() -> PrefillRead:
    """A prefill in READ whose pages decode does not take note of."""
    side = PrefillRead(PATIENT)
    side.request(deadline_s=DEADLINE_S)
    side.opened()
    side.send()
    return side


def aborted() -> PrefillRead:
    """A prefill that has given up in READ what decode was told of."""
    side = announced()
    side.wait(5.0)
    side.abort()
    return side


SPOKEN = {
    "WRITE: Open": (lambda: offered(Decode), f.Open),
    "READ: Open": (lambda: offered(DecodeRead), f.Open),
    "READ: Failed": (failed, f.Failed),
    "READ: Drained": (drained, f.Drained),
    "READ: Computed": (announced, f.Computed),
    "READ: Abort": (aborted, f.Abort),
}


def frames_of(side: Side, kind: type[f.Frame]) -> Iterator[float]:
    """When frames of a kind are sent while it is watched, with the one that was sent just now."""
    begun, before = side.now, len(sent(side.effects, kind))
    assert before
    yield 0.0
    while (due := side.machine.next_deadline) is not None and due <= begun + WATCHED_S:
        side.now = max(side.now, due)
        yield from [side.now - begun] * len(sent(side.do(Tick()), kind))


def doubling() -> list[float]:
    """The times at which something is said that nobody ever answers."""
    pauses = [TIMING.retry_first_s]
    while sum(pauses) + pauses[-1] < WATCHED_S:
        pauses.append(min(2 * pauses[-1], TIMING.retry_max_s))
    return [at for at in accumulate(pauses, initial=0.0) if at <= WATCHED_S]


@pytest.mark.parametrize("what", SPOKEN)
def test_what_nobody_answers_is_said_again_at_pauses_that_grow(what: str) -> None:
    make, kind = SPOKEN[what]
    times = list(frames_of(make(), kind))
    assert times == pytest.approx(doubling())
    assert len(times) < 1 + WATCHED_S / TIMING.retry_first_s / 10

"""What the fuzzer calls, without the fuzzer: its seeds pass, its allowance and its checks have teeth."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.events import Report, Write
from pdpool_connector.protocol.frames import AttemptId
from pdpool_connector.protocol.status import Cause, Phase, TransferStatus

from proof.fuzz.__main__ import MAX_LEN, TARGETS
from proof.fuzz.allowance import EVERY, FIXED, Allowance
from proof.fuzz.machines import ME, TIMEOUTS, Watched
from proof.fuzz.targets import make


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_noise_break_nothing(name: str) -> None:
    fuzz, seeds = make(name)
    noise = random.Random(0)
    for data in [*seeds, *(noise.randbytes(noise.randrange(300)) for _ in range(200))]:
        fuzz(data)


@pytest.mark.parametrize("name", TARGETS)
def test_spoilt_seeds_break_nothing(name: str) -> None:
    """Bytes as they come are mostly refused at once, so half of the inputs are seeds of which a piece is another."""
    fuzz, seeds = make(name)
    spoilt = st.builds(
        lambda seed, at, cut, piece: seed[: at % (len(seed) + 1)] + piece + seed[at % (len(seed) + 1) + cut :],
        st.sampled_from(seeds),
        st.integers(0, MAX_LEN),
        st.integers(0, 8),
        st.binary(max_size=8),
    )

    @settings(max_examples=300)
    @given(st.one_of(st.binary(max_size=512), spoilt))
    def check(data: bytes) -> None:
        fuzz(data)

    check()


def test_input_that_costs_too_much_is_noticed() -> None:
    allowance = Allowance()
    for _ in range(EVERY - 1):
        with allowance.for_input(b"x"):
            pass
    with pytest.raises(MemoryError), allowance.for_input(b"x"):
        bytearray(2 * FIXED)


def test_a_write_outside_what_was_offered_is_noticed() -> None:
    watched = Watched(DecodeMachine(ME, TIMEOUTS))
    watched.offered[AttemptId(ME, 1)] = [b"\1\0\0\0"]
    watched.check_write(Write(AttemptId(ME, 1), 0, "p", b"\7\0\0\0", b"\1\0\0\0", None))
    with pytest.raises(AssertionError, match="never offered"):
        watched.check_write(Write(AttemptId(ME, 1), 0, "p", b"\7\0\0\0", b"\2\0\0\0", None))


def test_release_while_a_write_uses_memory_is_noticed() -> None:
    watched = Watched(DecodeMachine(ME, TIMEOUTS))
    attempt = AttemptId(ME, 1)
    watched.writes.append(Write(attempt, 0, "p", b"\7\0\0\0", b"\1\0\0\0", None))
    over = TransferStatus(phase=Phase.FAILED, cause=Cause.ABORTED, message="", releasable=True)
    with pytest.raises(AssertionError, match="gives back what"):
        watched.check_untouched(Report(1, over, (attempt,)))


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_as_short_as_the_fuzzers_inputs(name: str) -> None:
    """A longer one would be cut, and then be of no use to it."""
    assert max(map(len, make(name)[1])) <= MAX_LEN

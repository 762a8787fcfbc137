"""Deadlines, intervals and bounds of the protocol, in seconds and rows."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """One set for a connector; the defaults suit pods in one cluster.

    `meet_s`: how long an attempt waits at prefill for the engine's request: the router posts both at once, so one that
    has not come by then was lost, with a process for example. `drain_s`: how long a failed hand-off waits for proof of
    quiet before it is counted as a hold. `retry_first_s`, `retry_max_s`: back-off of frames that want an answer,
    doubling. `query_s`: how often decode asks after an attempt that it hears nothing of. `expect_s`: how often it
    repeats that its engine has a request that is not opened yet. `expected_within_s`: how long a request waits at
    prefill without a word of any decode that its engine has it; None: until its deadline, for engines of decode that
    call no `expect`. `verdict_s`: how long the end
    of an attempt that decode has not acknowledged is remembered and repeated; `acked_s`: how long one that it has.
    `max_attempts`: live hand-offs. `max_tombstones`: remembered ends. `max_offered_bytes`: ids of pages and state in
    the offers of live hand-offs, at prefill, 4 bytes each. At prefill one peer may have half of any of these.

    Raises ValueError, naming field and value, for what is no number, and for a number that is not above 0: a timer of
    no length would come due for ever.
    """

    meet_s: float = 60.0
    drain_s: float = 10.0
    retry_first_s: float = 0.1
    retry_max_s: float = 2.0
    query_s: float = 5.0
    expect_s: float = 5.0
    expected_within_s: float | None = None
    verdict_s: float = 120.0
    acked_s: float = 15.0
    max_attempts: int = 16_384
    max_tombstones: int = 262_144
    max_offered_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is None and name == "expected_within_s":
                continue
            kind, what = ((int,), "an int") if name.startswith("max_") else ((int, float), "a number")
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r} is of type {type(value).__name__}: give {what}")  # noqa: TRY004
            if not value > 0:
                raise ValueError(f"{name} is {value}, must be above 0")

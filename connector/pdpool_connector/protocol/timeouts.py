"""Every timeout of the connector, in seconds, and the bounds of the protocol's tables, in rows or bytes."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """One set for a connector. The defaults suit pods in one cluster.

    Raises ValueError, naming field and value, for a value that is no number or not above 0. A timer of length 0 would
    be due for ever.
    """

    match_s: float = 15.0
    """How long prefill keeps one half of a hand-off without the other. A router sends both halves at once."""
    quiesce_s: float = 10.0
    """How long a failed hand-off waits for its writes to end before it is counted as held."""
    retry_first_s: float = 0.1
    """First interval between repetitions of a frame without an answer; far above one round trip in a cluster."""
    retry_max_s: float = 2.0
    """Longest interval between such repetitions; each interval is twice the one before."""
    query_s: float = 5.0
    """How often decode asks for an attempt that prefill has accepted, so that a lost `Ended` delays nothing longer."""
    result_s: float = 120.0
    """How long the end of an attempt is remembered and repeated while decode has not acknowledged it."""
    acked_s: float = 15.0
    """How long an acknowledged end is remembered: late frames of that attempt are still on their way."""
    max_attempts: int = 16_384
    """Live hand-offs of one side; at prefill one peer may have half of them."""
    max_tombstones: int = 262_144
    """Ends that prefill remembers; one peer may have half of them."""
    max_offered_bytes: int = 256 << 20
    """Bytes of page and state ids in live offers at prefill, 4 for each id; one peer may have half of them."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            kind, what = ((int,), "an int") if name.startswith("max_") else ((int, float), "a number")
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r} is of type {type(value).__name__}: give {what}")  # noqa: TRY004
            if not value > 0:
                raise ValueError(f"{name} is {value}, must be above 0")

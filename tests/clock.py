"""A clock that tests turn by hand."""


class Clock:
    """A call returns `now`, in seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

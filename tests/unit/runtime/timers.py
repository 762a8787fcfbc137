"""A reactor whose time is the test's."""

from collections.abc import Callable, Hashable


class Timers:
    """The timers of `Reactor`, which come due when the test lets time pass. Starts at 1000 s."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.timers: dict[Hashable, tuple[float, Callable[[], None]]] = {}

    def now(self) -> float:
        return self.time

    def at(self, key: Hashable, when: float, call: Callable[[], None]) -> None:
        self.timers[key] = (when, call)

    def cancel(self, key: Hashable) -> None:
        self.timers.pop(key, None)

    def post(self, call: Callable[[], None]) -> None:
        call()

    def wait(self, seconds: float) -> None:
        """Let time pass; timers come due in order."""
        end = self.time + seconds
        while due := [(when, key) for key, (when, _) in self.timers.items() if when <= end]:
            when, key = min(due, key=lambda pair: pair[0])
            self.time = max(self.time, when)
            self.timers.pop(key)[1]()
        self.time = end

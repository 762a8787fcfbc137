"""The rule for every change: it begins only while this process leads, and ends before another one may lead."""

from collections.abc import Callable


class NotLeaderError(Exception):
    """This process may not write now."""


def within_budget(write_budget: Callable[[], float], what: str) -> float:
    """Return the seconds within which a change that begins now must end.

    Raises:
        NotLeaderError: the change may not begin.
    """
    budget = write_budget()
    if budget <= 0:
        raise NotLeaderError(f"{what} was not sent: another operator may be the leader")
    return budget

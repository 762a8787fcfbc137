"""How long to wait between two looks at a transfer."""

from __future__ import annotations

import ctypes
from typing import Final

_SLEEP_SHARE: Final = 1 / 8
_SLEEP_MAX_S: Final = 2e-3
_PR_SET_TIMERSLACK: Final = 29
_SLACK_NS: Final = 1000

_prctl = ctypes.CDLL(None).prctl


def pause(quiet_s: float, shortest_s: float) -> float:
    """Seconds to sleep before a transfer is polled again, when its peer has made no progress for `quiet_s`.

    A share of the time waited, so that a long wait costs little CPU and a short one is noticed soon.
    """
    return min(max(quiet_s * _SLEEP_SHARE, shortest_s), _SLEEP_MAX_S)


def sharpen_sleeps() -> None:
    """Let sleeps of the calling thread end on time: by default Linux may delay each by 50 µs.

    prctl(2) PR_SET_TIMERSLACK; it cannot fail for a slack above 0.
    """
    _prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)

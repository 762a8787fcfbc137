"""Which version of the protocol two processes use with each other."""

from typing import Literal

from pdpool_connector.protocol import frames as f


class VersionMismatchError(Exception):
    """The two sides have no version in common; the message names the versions of both."""


def negotiate(oldest: int, newest: int, *, we_are: Literal["prefill", "decode"]) -> int:
    """Return the highest version that both sides know.

    Args:
        oldest: lowest version that the peer knows.
        newest: highest version that the peer knows.
        we_are: our own side, for the message.

    Raises:
        VersionMismatchError: no version is known to both.
    """
    version = min(newest, f.VERSION_MAX)
    if version < max(oldest, f.VERSION_MIN):
        theirs, ours = f"{oldest}..{newest}", f"{f.VERSION_MIN}..{f.VERSION_MAX}"
        prefill, decode = (ours, theirs) if we_are == "prefill" else (theirs, ours)
        raise VersionMismatchError(f"protocol version is {prefill} at prefill and {decode} at decode")
    return version


def readable(oldest: int, newest: int) -> int:
    """Return the version nearest to ours that the peer reads, also where we do not speak it.

    Only for `HelloRefused`, `Abort`, `Ended` and `Ack`, whose fields never change. They end hand-offs between sides
    without a common version.

    Args:
        oldest: lowest version that the peer knows.
        newest: highest version that the peer knows.
    """
    return min(max(oldest, f.VERSION_MAX), newest)

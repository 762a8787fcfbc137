"""Which version of the protocol two processes use with each other."""

from pdpool_connector.protocol.frames import VERSION_MAX, VERSION_MIN


class VersionMismatchError(Exception):
    """The two sides have no version in common; the message names the versions of both."""


def negotiate(oldest: int, newest: int) -> int:
    """Return the highest version that both sides know.

    Args:
        oldest: lowest version that the peer knows.
        newest: highest version that the peer knows.

    Raises:
        VersionMismatchError: no version is known to both.
    """
    version = min(newest, VERSION_MAX)
    if version < max(oldest, VERSION_MIN):
        theirs, ours = f"{oldest}..{newest}", f"{VERSION_MIN}..{VERSION_MAX}"
        raise VersionMismatchError(f"protocol version is {theirs} at the peer and {ours} here")
    return version

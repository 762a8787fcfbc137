"""Which version of the protocol two processes speak, and whether it can carry what they want of each other."""

from typing import Final

from pdpool_connector.protocol.frames import VERSION_MAX, VERSION_MIN

READ_SINCE: Final = 2
PARTS_SINCE: Final = 2
STATE_SINCE: Final = 2
SHARES_SINCE: Final = 4


class VersionMismatchError(Exception):
    """No version that both speak will do; the message names what is missing and what each side speaks."""


def negotiate(
    oldest: int, newest: int, *, direction: str = "write", parts: int = 1, state: bool = False, shares: bool = False
) -> int:
    """The version to speak with a peer that speaks `oldest` to `newest`: the highest that both know.

    `direction` ("write" or "read"), `parts` (decode ranks that one prefill rank serves), `state` (there is a pool of
    per-request state) and `shares` (it is cut over tensor ranks) are what has to be carried. Raises
    VersionMismatchError.
    """
    version = min(newest, VERSION_MAX)
    theirs, ours = f"{oldest}..{newest}", f"{VERSION_MIN}..{VERSION_MAX}"
    if version < max(oldest, VERSION_MIN):
        raise VersionMismatchError(f"protocol version is {theirs} at the peer and {ours} here")
    wanted = {
        f"direction {direction!r}": READ_SINCE if direction != "write" else VERSION_MIN,
        f"{parts} decode ranks on one prefill rank": PARTS_SINCE if parts > 1 else VERSION_MIN,
        "a pool of per-request state": STATE_SINCE if state else VERSION_MIN,
        "state that is cut over tensor ranks": SHARES_SINCE if shares else VERSION_MIN,
    }
    lacking = [f"{what} needs version {since}" for what, since in wanted.items() if since > version]
    if lacking:
        raise VersionMismatchError(f"protocol version is {theirs} at the peer: {', '.join(lacking)}")
    return version

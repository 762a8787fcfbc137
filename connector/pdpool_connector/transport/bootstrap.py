"""The bootstrap registry: prefill tells over HTTP who it is and where its ranks listen; decode asks.

`GET /pdpool/v1/bootstrap` answers with a `BootstrapInfo` as JSON.
"""

import http.client
import time
from collections.abc import Sequence

import msgspec

from pdpool_connector.protocol.frames import Incarnation
from pdpool_connector.transport.address import Address, AddressError, parse_address, resolve_allowed

BOOTSTRAP_PATH = "/pdpool/v1/bootstrap"
MAX_INFO_BYTES = 64 * 1024
"""Room for some hundred ranks; more is not read."""


class RankInfo(msgspec.Struct, frozen=True):
    """One rank of a prefill instance: its number and its control channel's "host:port"."""

    rank: int
    control: str


class BootstrapInfo(msgspec.Struct, frozen=True):
    """A prefill process: versions [oldest, newest], incarnation, ranks, and its geometry for people to read."""

    protocol: tuple[int, int]
    incarnation: Incarnation
    ranks: tuple[RankInfo, ...]
    geometry: dict[str, int | str]


class BootstrapError(Exception):
    """The registry gave no usable answer. `final` is True when asking again is pointless."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


_decoder = msgspec.json.Decoder(BootstrapInfo)


def ask_bootstrap(prefill: str, networks: Sequence[str], timeout_s: float) -> BootstrapInfo:
    """Ask the registry at `prefill` ("host:port"), and check that it and its control channels may be contacted.

    The control addresses in the answer are IP addresses: those that were checked.

    Blocks for about `timeout_s` at most (name lookup apart): for worker threads. Raises BootstrapError.
    """
    deadline = time.monotonic() + timeout_s
    try:
        target = resolve_allowed(parse_address(prefill), networks)
        info = _decoder.decode(_get(target, deadline))
        ranks = tuple(
            RankInfo(rank.rank, str(resolve_allowed(parse_address(rank.control), networks))) for rank in info.ranks
        )
    except AddressError as error:
        raise BootstrapError(f"bootstrap {prefill}: {error}", final=True) from None
    except msgspec.DecodeError as error:
        raise BootstrapError(f"bootstrap {prefill} answered with something else: {error}") from None
    except (OSError, http.client.HTTPException) as error:
        raise BootstrapError(f"bootstrap {prefill} cannot be reached: {error or type(error).__name__}") from None
    return msgspec.structs.replace(info, ranks=ranks)


def _get(target: Address, deadline: float) -> bytes:
    connection = http.client.HTTPConnection(target.host, target.port, timeout=_left(deadline))
    try:
        connection.request("GET", BOOTSTRAP_PATH)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"HTTP status {response.status}")
        body = b""
        # Piece by piece, because a socket's timeout starts anew with every byte of a slow answer.
        while (piece := response.read1(MAX_INFO_BYTES)) and len(body) <= MAX_INFO_BYTES:
            body += piece
            _left(deadline)
    finally:
        connection.close()
    if len(body) > MAX_INFO_BYTES:
        raise http.client.HTTPException(f"more than {MAX_INFO_BYTES} bytes")
    return body


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left

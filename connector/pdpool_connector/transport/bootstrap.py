"""The messages and the client of the bootstrap registry: the ranks of a prefill instance, over HTTP, in JSON.

`GET /pdpool/v1/bootstrap` answers with a `BootstrapInfo`, or with status 503 and a `Refusal` while ranks are missing.
`PUT /pdpool/v1/bootstrap/ranks` takes a `Registration` and answers with a `Lease`.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar
from uuid import uuid4

import aiohttp
import msgspec

from pdpool_connector.layout.pairing import ModelShard
from pdpool_connector.layout.state_pool import MAX_RANKS
from pdpool_connector.protocol.frames import Incarnation, shown
from pdpool_connector.transport.address import AddressError, parse_address
from pdpool_connector.transport.curve import CurveKey
from pdpool_connector.transport.resolve import Resolver
from pdpool_connector.transport.tokens import sign_registration

BOOTSTRAP_PATH: Final = "/pdpool/v1/bootstrap"
RANKS_PATH: Final = BOOTSTRAP_PATH + "/ranks"
MAX_INFO_BYTES: Final = 512 * 1024
"""Room for `MAX_RANKS` ranks; more is not read."""

OTHER_BACKEND: Final = (
    f"does not serve {BOOTSTRAP_PATH} (HTTP status 404): it is no registry of pdpool's connector, so its engine uses "
    "another transfer backend than this one"
)
"""An engine's own registry answers 404, and will not become another one."""

MAX_FACTS: Final = 32
MAX_FACT: Final = 256
"""Most entries of the facts of an instance, and most characters of a key or a value."""
Fact = Annotated[str, msgspec.Meta(max_length=MAX_FACT)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a prefill instance.

    incarnation: of its process. control: "host:port" of its control channel. shard: its shard of the model.
    protocol: versions [oldest, newest].
    """

    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    incarnation: Incarnation
    control: Annotated[str, msgspec.Meta(max_length=300)]
    shard: ModelShard
    protocol: tuple[Version, Version]


class BootstrapInfo(msgspec.Struct, frozen=True):
    """A prefill instance: all its ranks, in order, and what its engine says of itself (`ConnectorConfig.facts`)."""

    ranks: Annotated[tuple[RankInfo, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    facts: Annotated[dict[Fact, Fact], msgspec.Meta(max_length=MAX_FACTS)] = {}

    def __post_init__(self) -> None:
        numbers = [info.rank for info in self.ranks]
        if numbers != list(range(len(numbers))):
            raise ValueError(f"ranks are numbered {numbers[:16]}, must be 0 to {len(numbers) - 1} in order")


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A rank registers at the registry of its instance, which has `ranks` ranks."""

    info: RankInfo
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class Lease(msgspec.Struct, frozen=True):
    """The registry's answer to a registration: it holds for `lease_s` seconds unless it is renewed."""

    lease_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class Refusal(msgspec.Struct, frozen=True):
    """Why the registry refuses; `missing`: ranks that the instance lacks."""

    error: Annotated[str, msgspec.Meta(max_length=4096)]
    missing: tuple[int, ...] = ()


class BootstrapError(Exception):
    """The registry gave no usable answer. `final` is True when asking again is pointless.

    `refused`: the host refuses connections to that port.
    """

    def __init__(self, message: str, *, final: bool = False, refused: bool = False) -> None:
        super().__init__(shown(message))
        self.final = final
        self.refused = refused


_infos = msgspec.json.Decoder(BootstrapInfo)
_leases = msgspec.json.Decoder(Lease)
_refusals = msgspec.json.Decoder(Refusal)
Answer = TypeVar("Answer")


def decode_json(decoder: msgspec.json.Decoder[Answer], body: bytes) -> Answer:
    """Decode bytes of any origin. Raises msgspec.DecodeError, and nothing else."""
    try:
        return decoder.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these through
        raise msgspec.DecodeError(str(error)) from None


class BootstrapClient:
    """Client of registries. Its coroutines run on one loop, each for its own address: a silent one delays no other.

    networks: CIDR blocks in which a registry and the control channels that it names must lie. keys: of the control
    channel; the first signs registrations.
    """

    def __init__(self, networks: Sequence[str], keys: Sequence[CurveKey] = ()) -> None:
        self._resolver = Resolver(networks)
        self._keys = keys

    async def ask(self, prefill: str, timeout_s: float) -> BootstrapInfo:
        """Ask the registry at `prefill` ("host:port") for its ranks, within `timeout_s`.

        The control addresses in the answer are IP addresses: those that were checked. Raises BootstrapError.
        """
        info = await self._call(prefill, "GET", BOOTSTRAP_PATH, b"", _infos, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                ranks = [
                    msgspec.structs.replace(rank, control=await self._checked(rank.control)) for rank in info.ranks
                ]
        except AddressError as error:
            raise BootstrapError(f"bootstrap {prefill}: {error}", final=True) from None
        except OSError as error:
            raise BootstrapError(f"bootstrap {prefill} names a control channel that cannot be found: {error}") from None
        return BootstrapInfo(tuple(ranks), info.facts)

    async def register(self, registry: str, registration: Registration, timeout_s: float) -> float:
        """Register with, or renew at, `registry` ("host:port"); return the lease in seconds. Raises BootstrapError."""
        body = msgspec.json.encode(registration)
        signature = sign_registration(self._keys[0], body, uuid4().hex, time.time()) if self._keys else ""
        lease = await self._call(registry, "PUT", RANKS_PATH, body, _leases, timeout_s, signature)
        return lease.lease_s

    async def _checked(self, control: str) -> str:
        return str(await self._resolver.resolve(parse_address(control)))

    async def _call(
        self,
        where: str,
        method: str,
        path: str,
        body: bytes,
        answers: msgspec.json.Decoder[Answer],
        timeout_s: float,
        signature: str = "",
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                target = await self._resolver.resolve(parse_address(where))
                status, answer = await _exchange(method, f"http://{target}{path}", body, signature)
            if status == 404:
                raise BootstrapError(f"bootstrap {where} {OTHER_BACKEND}", final=True)
            if status != 200:
                raise BootstrapError(f"bootstrap {where} {_why(status, answer)}")
            return decode_json(answers, answer)
        except AddressError as error:
            raise BootstrapError(f"bootstrap {where}: {error}", final=True) from None
        except msgspec.DecodeError as error:
            raise BootstrapError(f"bootstrap {where} answered with something else: {error}") from None
        except TimeoutError:
            raise BootstrapError(f"bootstrap {where} cannot be reached: no answer within {timeout_s} s") from None
        except (OSError, aiohttp.ClientError) as error:
            reason = getattr(error, "os_error", error)  # aiohttp wraps it in words of its own
            message = f"bootstrap {where} cannot be reached: {reason or type(reason).__name__}"
            raise BootstrapError(message, refused=isinstance(reason, ConnectionRefusedError)) from None


async def _exchange(method: str, url: str, body: bytes, signature: str) -> tuple[int, bytes]:
    """One request on a connection of its own; no redirect is followed, for it could lead anywhere."""
    connector = aiohttp.TCPConnector(force_close=True)
    headers = {"Authorization": signature} if signature else None
    async with (
        aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        ) as session,
        session.request(method, url, data=body, headers=headers, allow_redirects=False) as response,
    ):
        answer = b""
        while piece := await response.content.read(MAX_INFO_BYTES):
            answer += piece
            if len(answer) > MAX_INFO_BYTES:
                raise aiohttp.ClientPayloadError(f"more than {MAX_INFO_BYTES} bytes")
        return response.status, answer


def _why(status: int, answer: bytes) -> str:
    try:
        return f"answered: {decode_json(_refusals, answer).error}"
    except msgspec.DecodeError:
        return f"answered with HTTP status {status}"

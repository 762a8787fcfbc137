"""The bootstrap registry of one prefill instance: which ranks there are, by leases that they renew.

Rank 0 holds it and serves it; the other ranks register over HTTP. Decode is told of an instance only when it is whole.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from pdpool_connector.layout.pairing import ModelShard, check_instance
from pdpool_connector.protocol.frames import shown
from pdpool_connector.transport.address import is_allowed
from pdpool_connector.transport.bootstrap import (
    BOOTSTRAP_PATH,
    RANKS_PATH,
    BootstrapInfo,
    Lease,
    RankInfo,
    Refusal,
    Registration,
    decode_json,
)
from pdpool_connector.transport.curve import CurveKey
from pdpool_connector.transport.http import Asked, Handler, Reply
from pdpool_connector.transport.tokens import TokenError, check_registration

log = logging.getLogger(__name__)

LEASE_S: Final = 5.0
"""A rank that has not renewed for so long is missing; a rank renews three times in this time."""
REMEMBERED: Final = 8
"""Former processes of each rank that are known for what they are when they wake and register again."""

_registrations = msgspec.json.Decoder(Registration)


class RegistrationError(Exception):
    """A registration that is refused; `status` is the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _Slot:
    """The place of one rank: who holds it, until when (it is empty after that), and who held it before."""

    until: float
    info: RankInfo | None = None
    former: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


class Registry:
    """Who the ranks of an instance are. `instance`: the part of each rank; `own`: rank 0, which needs no lease.

    `register` is for one thread alone, the rest for any. Raises LayoutError for an instance that is not whole.
    """

    def __init__(
        self, instance: Sequence[ModelShard], own: RankInfo, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_instance("prefill", instance)
        self._instance = tuple(instance)
        self._clock = clock
        self._own = own
        self._seats = [_Slot(until=clock()) for _ in self._instance]
        self._seats[0].info, self._seats[0].until = own, float("inf")

    def register(self, registration: Registration) -> Lease:
        """Give a rank its seat, or renew it; another process of the same rank takes its place at once.

        Raises RegistrationError for a rank that is none of this instance, and for a process that was replaced, as long
        as the lease of the one in its place holds.
        """
        info = registration.info
        if registration.ranks != len(self._instance):
            raise RegistrationError(409, f"ranks is {registration.ranks}, this instance has {len(self._instance)}")
        if not 0 < info.rank < len(self._instance):
            raise RegistrationError(
                409, f"rank is {info.rank}, must be 1..{len(self._instance) - 1}: 0 is the registry"
            )
        if info.part != self._instance[info.rank]:
            raise RegistrationError(
                409, f"part of rank {info.rank} is {info.part}, this instance has {self._instance[info.rank]} there"
            )
        if info.direction != self._own.direction:
            raise RegistrationError(409, f"direction is {info.direction!r}, rank 0 has {self._own.direction!r}")
        self._seat(info)
        return Lease(LEASE_S)

    def _seat(self, info: RankInfo) -> None:
        seat, now = self._seats[info.rank], self._clock()
        if info.incarnation in seat.former:
            if now < seat.until:
                raise RegistrationError(409, f"rank {info.rank} was taken over by another process; end this one")
            # Who lives may have come first: a registry that was restarted, too, does not know the order.
            seat.former.remove(info.incarnation)
        if seat.info is None or seat.info.incarnation != info.incarnation:
            log.info("rank %d registered: process %s at %s", info.rank, info.incarnation[:8], shown(info.control))
            if seat.info is not None:
                seat.former.append(seat.info.incarnation)
        seat.info, seat.until = info, now + LEASE_S

    def ranks(self) -> BootstrapInfo | Refusal:
        """All ranks, or which are missing and since when."""
        now = self._clock()
        missing = [rank for rank, seat in enumerate(self._seats) if seat.until <= now]
        if missing:
            named = ", ".join(f"{rank} ({self._absence(rank, now)})" for rank in missing[:16])
            more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
            error = f"of {len(self._seats)} ranks, these are missing: {named}{more}"
            return Refusal(error, tuple(missing))
        return BootstrapInfo(tuple(seat.info for seat in self._seats if seat.info is not None))

    def incomplete_s(self) -> float | None:
        """For how many seconds some rank has been missing; None when none is."""
        now = self._clock()
        since = [seat.until for seat in self._seats if seat.until <= now]
        return now - min(since) if since else None

    def _absence(self, rank: int, now: float) -> str:
        seat = self._seats[rank]
        return "never registered" if seat.info is None else f"not renewed for {now - seat.until + LEASE_S:.1f} s"


class RegistryEndpoint:
    """The registry over HTTP; registrations are taken from `networks` (CIDR blocks) alone.

    `refused` is called, in the server's thread, with why a registration was refused. `keys`: of the control channel;
    with any, one of them must have signed a registration.
    """

    def __init__(
        self, registry: Registry, networks: Sequence[str], refused: Callable[[str], None], keys: Sequence[CurveKey] = ()
    ) -> None:
        self._registry, self._networks, self._refused, self._keys = registry, networks, refused, keys

    def handlers(self) -> Mapping[tuple[str, str], Handler]:
        """For `HttpServer.serve`."""
        return {("GET", BOOTSTRAP_PATH): self._get, ("PUT", RANKS_PATH): self._put}

    def _get(self, _: Asked) -> Reply:
        answer = self._registry.ranks()
        return Reply(503 if isinstance(answer, Refusal) else 200, msgspec.json.encode(answer))

    def _put(self, asked: Asked) -> Reply:
        try:
            self._admit(asked)
            registration = decode_json(_registrations, asked.body)
            return Reply(200, msgspec.json.encode(self._registry.register(registration)))
        except RegistrationError as error:
            return self._refuse(error.status, str(error))
        except msgspec.DecodeError as error:
            return self._refuse(400, f"not a registration: {error}")

    def _admit(self, asked: Asked) -> None:
        """The one place that decides whose registrations are looked at."""
        if not is_allowed(asked.remote, self._networks):
            raise RegistrationError(403, f"{asked.remote} is in none of the allowed networks")
        if self._keys:
            try:
                check_registration(self._keys, asked.authorization, asked.body, time.time())
            except TokenError as error:
                raise RegistrationError(401, str(error)) from None

    def _refuse(self, status: int, message: str) -> Reply:
        self._refused(message)
        return Reply(status, msgspec.json.encode(Refusal(message[:4096])))

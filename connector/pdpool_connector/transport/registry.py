"""The bootstrap registry of one prefill instance: its ranks, by leases that they renew.

Rank 0 holds it and serves it; the other ranks register over HTTP. Decode gets the ranks only when none is missing.
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
from pdpool_connector.transport.address import AddressError, is_allowed, is_ip, parse_address
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
from pdpool_connector.transport.tokens import RegistrationVerifier, TokenError

log = logging.getLogger(__name__)

REMEMBERED: Final = 8
"""Former processes of each rank that are recognized when they wake and register again."""

_registrations = msgspec.json.Decoder(Registration)


class RegistrationError(Exception):
    """A registration that is refused; `status` is the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _Slot:
    """The place of one rank: the process that holds it, until when, and the processes that held it before."""

    until: float
    info: RankInfo | None = None
    former: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


class Registry:
    """The ranks of an instance. `register` is for one thread alone, the rest for any.

    Args:
        instance: The shard of each rank.
        own: Rank 0, which needs no lease.
        facts: Served beside the ranks.
        lease_s: A rank that has not renewed for this long is missing.
        clock: Monotonic seconds.

    Raises:
        LayoutError: The instance does not hold the whole model.
    """

    def __init__(
        self,
        instance: Sequence[ModelShard],
        own: RankInfo,
        facts: Mapping[str, str],
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_instance("prefill", instance)
        self._instance = tuple(instance)
        self._clock = clock
        self._facts = dict(facts)
        self._lease_s = lease_s
        self._slots = [_Slot(until=clock()) for _ in self._instance]
        self._slots[0].info, self._slots[0].until = own, float("inf")

    def register(self, registration: Registration) -> Lease:
        """Give a rank its slot, or renew it. A new process of the same rank replaces the former one at once.

        Raises:
            RegistrationError: The rank does not belong to this instance. Or another process has replaced this one, and
                its lease has not expired.
        """
        info = registration.info
        if registration.ranks != len(self._instance):
            raise RegistrationError(409, f"ranks is {registration.ranks}, this instance has {len(self._instance)}")
        if not 0 < info.rank < len(self._instance):
            raise RegistrationError(
                409, f"rank is {info.rank}, must be 1..{len(self._instance) - 1}: 0 is the registry"
            )
        if info.shard != self._instance[info.rank]:
            raise RegistrationError(
                409, f"shard of rank {info.rank} is {info.shard}, this instance has {self._instance[info.rank]} there"
            )
        self._enter(info)
        return Lease(self._lease_s)

    def _enter(self, info: RankInfo) -> None:
        slot, now = self._slots[info.rank], self._clock()
        if info.incarnation in slot.former:
            if now < slot.until:
                raise RegistrationError(409, f"rank {info.rank} was taken over by another process; end this one")
            # The living process may have come first: a registry that was restarted does not know the order.
            slot.former.remove(info.incarnation)
        if slot.info is None or slot.info.incarnation != info.incarnation:
            log.info("rank %d registered: process %s at %s", info.rank, info.incarnation[:8], shown(info.control))
            if slot.info is not None:
                slot.former.append(slot.info.incarnation)
        slot.info, slot.until = info, now + self._lease_s

    def ranks(self) -> BootstrapInfo | Refusal:
        """All ranks, or which are missing and since when."""
        now = self._clock()
        missing = [rank for rank, slot in enumerate(self._slots) if slot.until <= now]
        if missing:
            named = ", ".join(f"{rank} ({self._absence(rank, now)})" for rank in missing[:16])
            more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
            error = f"of {len(self._slots)} ranks, these are missing: {named}{more}"
            return Refusal(error, tuple(missing))
        return BootstrapInfo(tuple(slot.info for slot in self._slots if slot.info is not None), self._facts)

    def incomplete_s(self) -> float | None:
        """For how many seconds some rank has been missing; None when none is."""
        now = self._clock()
        since = [slot.until for slot in self._slots if slot.until <= now]
        return now - min(since) if since else None

    def _absence(self, rank: int, now: float) -> str:
        slot = self._slots[rank]
        return "never registered" if slot.info is None else f"not renewed for {now - slot.until + self._lease_s:.1f} s"


class RegistryEndpoint:
    """The registry over HTTP.

    Args:
        registry: Holds the ranks.
        networks: CIDR blocks; a registration must come from one of them, and name a control address in one of them.
        refused: Called, in the server's thread, with the reason for which a registration was refused.
        keys: Of the control channel; with any, one of them must have signed a registration.
    """

    def __init__(
        self, registry: Registry, networks: Sequence[str], refused: Callable[[str], None], keys: Sequence[CurveKey] = ()
    ) -> None:
        self._registry, self._networks, self._refused = registry, networks, refused
        self._verifier = RegistrationVerifier(keys) if keys else None

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
            self._check_control(registration.info.control)
            return Reply(200, msgspec.json.encode(self._registry.register(registration)))
        except RegistrationError as error:
            return self._refuse(error.status, str(error), asked)
        except msgspec.DecodeError as error:
            return self._refuse(400, f"not a registration: {error}", asked)

    def _admit(self, asked: Asked) -> None:
        """The one place that decides which registrations are read."""
        if not is_allowed(asked.remote, self._networks):
            raise RegistrationError(403, f"{asked.remote} is in none of the allowed networks")
        if self._verifier is not None:
            try:
                self._verifier.check(asked.authorization, asked.body)
            except TokenError as error:
                raise RegistrationError(401, str(error)) from None

    def _check_control(self, control: str) -> None:
        """Refuse an IP address outside the allowed networks. A name is checked by decode, when it looks it up."""
        try:
            host = parse_address(control).host
        except AddressError as error:
            raise RegistrationError(400, f"control: {error}") from None
        if is_ip(host) and not is_allowed(host, self._networks):
            raise RegistrationError(403, f"control={shown(control)!r} is in none of the allowed networks")

    def _refuse(self, status: int, message: str, asked: Asked) -> Reply:
        self._refused(f"registration from {asked.remote}: {message}")
        return Reply(status, msgspec.json.encode(Refusal(message[:4096])))

"""Configuration of a connector: plain values, checked when they are given."""

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pdpool_connector.backends import BACKENDS
from pdpool_connector.layout.pairing import ModelShard, check_instance
from pdpool_connector.layout.staging import SLOT_BYTES
from pdpool_connector.protocol.frames import Frame
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.transport.address import AddressError, is_host, parse_address
from pdpool_connector.transport.bootstrap import Direction
from pdpool_connector.transport.curve import CurveKey
from pdpool_connector.transport.tokens import TokenVerifier

PRIVATE_NETWORKS = (
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "169.254.0.0/16",
    "::1/128",
    "fc00::/7",
    "fe80::/10",
)
"""Loopback, RFC 1918, carrier-grade NAT (RFC 6598), link-local, and IPv6 unique local: where pods live."""

MAX_STAGING_BYTES = 64 << 30

_NONE: Final = type(None)
_KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "advertise_host": ((str,), "a str"),
    "bind_host": ((str, _NONE), "a str or None"),
    "registry": ((str, _NONE), "a str or None"),
    "control_port": ((int,), "an int"),
    "bootstrap_port": ((int,), "an int"),
    "admin_port": ((int, _NONE), "an int or None"),
    "staging_bytes": ((int,), "an int"),
    "request_deadline_s": ((int, float), "a number"),
    "connect_deadline_s": ((int, float), "a number"),
    "checksum_rate": ((int, float), "a number"),
    "allowed_networks": ((tuple, list), "a tuple of CIDR blocks"),
    "rank": ((int,), "an int"),
    "instance": ((tuple, list), "a tuple of ModelShard"),
    "curve": ((tuple, list), "a tuple of CurveKey"),
    "curve_required": ((bool,), "True or False"),
    "pod_uid": ((str,), "a str"),
    "admin_gate": ((TokenVerifier, _NONE), "a TokenVerifier or None"),
    "timing": ((Timeouts,), "a Timeouts"),
    "flight_dir": ((str, Path, _NONE), "a Path, a str or None"),
}
"""What given as something else would work otherwise than meant, or fail far from here."""
_ITEMS: Final[Mapping[str, type]] = {"instance": ModelShard, "curve": CurveKey, "allowed_networks": str}

FrameFilter = Callable[[Frame], float | None]
"""Fault injection: seconds to hold an outgoing frame back (0 = send at once), or None to drop it."""


@dataclass(frozen=True)
class ConnectorConfig:
    """How one connector (one engine rank) presents itself and whom it talks to.

    `advertise_host`: address at which peers reach this process. `control_port`, `bootstrap_port` (prefill only) and
    `admin_port` (None = no admin endpoint): 0 takes any free port; peers know a successor of ours by the control port
    (docs/fences.md). `bind_host`: address to listen on; None is the
    wildcard of the advertised address's family. `request_deadline_s`: life of an attempt that names no deadline of its
    own. `connect_deadline_s`: how long decode tries to reach a prefill before it fails what waits for it; less where
    connections are refused all the time (`link.REFUSED_S`).
    `allowed_networks`: CIDR blocks in which a bootstrap host may lie, and from which ranks may register.
    `frame_filter`: fault injection for tests and for the reference engine's fault knobs. `timing`: intervals and bounds
    of the protocol. `flight_dir`: where the stories of failed hand-offs are written (bounds: see `flight.files`); None
    records nothing. `checksum_rate`: share of the attempts that prefill takes a checksum of, and decode then checks; 0
    is none. `staging_bytes`: host memory through which prefill sends pages whose heads decode holds on several ranks
    (0: none); a slot of `SLOT_BYTES` is taken for each chunk under way.

    `instance`: the part of the model that each rank of this instance holds, in the order of ranks (`shard_model` makes
    it); () means that this rank is all there is. `rank`: which of them this is. `registry`: "host:port" of the
    bootstrap registry that rank 0 of a prefill instance serves; its other ranks need it. `direction`: who moves the
    bytes, prefill ("write") or decode ("read"); both sides must have the same.

    `curve`: keys of the control channel, the same for all processes of a service, the one to listen with first (see
    `transport.curve`); without any, whoever reaches the port is let in. `curve_required`: False lets decode connect to
    prefills that listen without keys, too, which is for the time of an upgrade only. `pod_uid`: of the Kubernetes pod,
    told to peers, so that the operator knows whose end to look for.
    `admin_gate`: who may change something through the admin endpoint; without one nobody may, and it is read only.

    Raises ValueError, naming field and value, for what cannot work.
    """

    advertise_host: str
    control_port: int = 0
    admin_port: int | None = None
    bootstrap_port: int = 0
    backend: str = "local"
    request_deadline_s: float = 300.0
    connect_deadline_s: float = 30.0
    allowed_networks: tuple[str, ...] = PRIVATE_NETWORKS
    rank: int = 0
    instance: tuple[ModelShard, ...] = ()
    registry: str | None = None
    direction: Direction = "write"
    bind_host: str | None = None
    frame_filter: FrameFilter | None = None
    curve: tuple[CurveKey, ...] = ()
    curve_required: bool = True
    pod_uid: str = ""
    admin_gate: TokenVerifier | None = None
    timing: Timeouts = field(default_factory=Timeouts)
    flight_dir: Path | str | None = None
    checksum_rate: float = 1 / 64
    staging_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Check every field."""
        self._check_kinds()
        self._check_hosts()
        self._check_numbers()
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is unknown: give one of {', '.join(BACKENDS)}")
        if not 0 <= self.rank < max(len(self.instance), 1):
            raise ValueError(f"rank={self.rank} is out of range: instance has the parts of {len(self.instance)} ranks")
        if self.instance:
            check_instance("instance", self.instance)
        if self.registry is not None:
            try:
                parse_address(self.registry)
            except AddressError as error:
                raise ValueError(f"registry: {error}") from None
        if self.direction not in ("write", "read"):
            raise ValueError(f"direction={self.direction!r} is unknown: give 'write' or 'read'")
        for network in self.allowed_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"allowed_networks holds {network!r}: {error}") from None

    def _check_kinds(self) -> None:
        for name, (kinds, what) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ValueError(f"{name}={value!r} is of type {type(value).__name__}: give {what}")
        for name, kind in _ITEMS.items():
            for item in getattr(self, name):
                if not isinstance(item, kind):
                    raise ValueError(f"{name} holds {item!r}: give a tuple of {kind.__name__}")  # noqa: TRY004
        if not all(key.fits() for key in self.curve):
            raise ValueError(
                "curve holds a pair that is none: give keys as `read_keys` or `zmq.curve_keypair` makes them"
            )
        if self.frame_filter is not None and not callable(self.frame_filter):
            raise ValueError(f"frame_filter={self.frame_filter!r} cannot be called")

    def _check_hosts(self) -> None:
        if not self.advertise_host:
            raise ValueError("advertise_host is empty: give the address at which peers reach this process")
        for name in ("advertise_host", "bind_host"):
            host = getattr(self, name)
            if host is not None and not is_host(host):
                raise ValueError(f"{name}={host!r} is no host: give a name or an IP address, without brackets and port")

    def _check_numbers(self) -> None:
        for name in ("control_port", "admin_port", "bootstrap_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ValueError(f"{name}={port} is no TCP port: give 0 (any free port) to 65535")
        for name in ("request_deadline_s", "connect_deadline_s"):
            seconds = getattr(self, name)
            if not 0 < seconds <= 86400:
                raise ValueError(f"{name}={seconds} is out of range: give more than 0 and at most 86400 seconds")
        if not 0 <= self.checksum_rate <= 1:
            raise ValueError(f"checksum_rate={self.checksum_rate} is out of range: give 0 to 1")
        if self.staging_bytes and not SLOT_BYTES <= self.staging_bytes <= MAX_STAGING_BYTES:
            bounds = f"{SLOT_BYTES} to {MAX_STAGING_BYTES}"
            raise ValueError(f"staging_bytes={self.staging_bytes} is out of range: give 0 (none) or {bounds} bytes")

    @property
    def listen_host(self) -> str:
        """Address to bind: `bind_host`, or the wildcard of the advertised address's family."""
        if self.bind_host is not None:
            return self.bind_host
        return "::" if ":" in self.advertise_host else "0.0.0.0"  # noqa: S104 - engine pods serve other pods

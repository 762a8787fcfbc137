"""Configuration of a connector: plain values, checked when they are given."""

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from pdpool_connector.backends import BACKENDS
from pdpool_connector.layout.pairing import ModelShard, check_instance
from pdpool_connector.layout.staging import SLOT_BYTES
from pdpool_connector.layout.state_pool import MAX_RANKS
from pdpool_connector.protocol.frames import MAX_SECONDS, Frame
from pdpool_connector.protocol.timeouts import Timeouts
from pdpool_connector.runtime.environment import read_environment
from pdpool_connector.transport.address import AddressError, is_host, parse_address
from pdpool_connector.transport.bootstrap import MAX_FACT, MAX_FACTS
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
_ENGINE: Final = re.compile(r"[A-Za-z0-9 ._+-]{0,64}")

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
    "checksum_rate": ((int, float), "a number"),
    "allowed_networks": ((tuple, list), "a tuple of CIDR blocks"),
    "facts": ((Mapping,), "a mapping of str to str"),
    "rank": ((int,), "an int"),
    "pod_rank": ((int, _NONE), "an int or None"),
    "pod_ranks": ((int, _NONE), "an int or None"),
    "instance": ((tuple, list), "a tuple of ModelShard"),
    "curve": ((tuple, list), "a tuple of CurveKey"),
    "curve_required": ((bool,), "True or False"),
    "pod_uid": ((str,), "a str"),
    "engine": ((str,), "a str"),
    "admin_gate": ((TokenVerifier, _NONE), "a TokenVerifier or None"),
    "admin_socket": ((str, Path, _NONE), "a Path, a str or None"),
    "timeouts": ((Timeouts,), "a Timeouts"),
    "flight_dir": ((str, Path, _NONE), "a Path, a str or None"),
}
"""Values of other types would work in unexpected ways, or fail far from here."""
_ITEMS: Final[Mapping[str, type]] = {"instance": ModelShard, "curve": CurveKey, "allowed_networks": str, "facts": str}

FrameFilter = Callable[[Frame], float | None]
"""Fault injection: seconds to hold an outgoing frame back (0 = send at once), or None to drop it."""


@dataclass(frozen=True)
class ConnectorConfig:
    """How one connector (one engine rank) presents itself, and which processes it connects to.

    Args:
        advertise_host: Address at which peers reach this process.
        control_port: TCP port of the control channel. Peers know our successor by it (docs/holds.md). 0: any free one.
        admin_port: TCP port of the admin endpoint. 0: any free one; None: no admin endpoint.
        bootstrap_port: Prefill: TCP port of the bootstrap registry. 0: any free one.
        backend: Name of the transfer backend. Both sides must use the same.
        request_deadline_s: Life of a hand-off that names no deadline of its own, in seconds.
        allowed_networks: CIDR blocks in which bootstrap hosts and control channels must lie, and from which ranks may
            register.
        rank: Number of this rank in its instance.
        instance: Shard of the model that each rank of this instance holds, in order of rank (`shard_model` makes it).
            (): this rank is the whole instance.
        registry: "host:port" of the bootstrap registry that rank 0 of a prefill instance serves; its other ranks need
            it.
        bind_host: Address to listen on. None: the wildcard of the advertised address's family.
        frame_filter: Fault injection for tests and for the reference engine's fault knobs.
        curve: Keys of the control channel, the same for all processes of a service, the one to listen with first (see
            `transport.curve`). (): every process that reaches the port is let in.
        curve_required: False lets decode also connect to prefills that listen without keys: for upgrades only.
        pod_uid: UID of the Kubernetes pod. Peers receive it, and the operator finds the pod by it.
        engine: Name and version of the engine for people, such as "sglang 0.5.23": at most 64 letters, digits, spaces
            and ._+-.
        pod_rank: Number of this connector among those of its pod. None: `rank`.
        pod_ranks: Connectors of the pod. None: as many as the instance has ranks.
        admin_gate: Verifies the tokens of changes through the admin endpoint. None: the endpoint is read only.
        admin_socket: Path of the Unix socket for `/drain`. None: no such socket.
        facts: What prefill's registry serves beside its ranks: at most 32 entries, each key and value at most 256
            characters. Decode reads them with `DecodeConnector.facts`.
        timeouts: All timeouts, intervals and bounds.
        flight_dir: Directory for records of failed hand-offs (bounds: see `flight.files`). None: nothing is recorded.
        checksum_rate: Share of the attempts, 0 to 1, whose pages prefill and decode compare by checksum.
        staging_bytes: Host memory in bytes through which prefill sends pages whose heads decode holds on several ranks.
            0: none. Each chunk under way takes a slot of `SLOT_BYTES`.

    Raises:
        ValueError: A value cannot work; the message names the field, its value and what would be right.
    """

    advertise_host: str
    control_port: int = 0
    admin_port: int | None = None
    bootstrap_port: int = 0
    backend: str = "local"
    request_deadline_s: float = 300.0
    allowed_networks: tuple[str, ...] = PRIVATE_NETWORKS
    rank: int = 0
    instance: tuple[ModelShard, ...] = ()
    registry: str | None = None
    bind_host: str | None = None
    frame_filter: FrameFilter | None = None
    curve: tuple[CurveKey, ...] = ()
    curve_required: bool = True
    pod_uid: str = ""
    engine: str = ""
    pod_rank: int | None = None
    pod_ranks: int | None = None
    admin_gate: TokenVerifier | None = None
    admin_socket: Path | str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    timeouts: Timeouts = field(default_factory=Timeouts)
    flight_dir: Path | str | None = None
    checksum_rate: float = 1 / 64
    staging_bytes: int = 64 << 20

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **overrides: Any) -> Self:  # noqa: ANN401 - any field
        """Make a configuration from the variables that pdpool's pods set (see `environment.VARIABLES`).

        Args:
            environ: The variables.
            overrides: Fields of the configuration; they win over variables.

        Raises:
            ValueError: A variable or a field has no usable value; the message names it, its value and what would be
                right.
        """
        return cls(**{**read_environment(environ, overrides), **overrides})

    def __post_init__(self) -> None:
        """Check every field."""
        self._check_kinds()
        self._check_hosts()
        self._check_numbers()
        self._check_ranks()
        self._check_facts()
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is unknown: give one of {', '.join(BACKENDS)}")
        if self.instance:
            check_instance("instance", self.instance)
        if self.registry is not None:
            try:
                parse_address(self.registry)
            except AddressError as error:
                raise ValueError(f"registry: {error}") from None
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
                "curve holds a pair of keys that do not belong together: give keys as `read_keys` makes them"
            )
        if self.frame_filter is not None and not callable(self.frame_filter):
            raise ValueError(f"frame_filter={self.frame_filter!r} cannot be called: give a function of one frame")

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
        if not 0 < self.request_deadline_s <= MAX_SECONDS:
            raise ValueError(
                f"request_deadline_s={self.request_deadline_s} is out of range: "
                f"give more than 0 and at most {MAX_SECONDS} seconds"
            )
        if not 0 <= self.checksum_rate <= 1:
            raise ValueError(f"checksum_rate={self.checksum_rate} is out of range: give 0 to 1")
        if self.staging_bytes and not SLOT_BYTES <= self.staging_bytes <= MAX_STAGING_BYTES:
            bounds = f"{SLOT_BYTES} to {MAX_STAGING_BYTES}"
            raise ValueError(f"staging_bytes={self.staging_bytes} is out of range: give 0 (none) or {bounds} bytes")

    def _check_ranks(self) -> None:
        if not 0 <= self.rank < max(len(self.instance), 1):
            raise ValueError(f"rank={self.rank} is out of range: instance has the shards of {len(self.instance)} ranks")
        if not 1 <= self.connectors_of_pod <= MAX_RANKS:
            raise ValueError(f"pod_ranks={self.pod_ranks} is out of range: give 1 to {MAX_RANKS}")
        if not 0 <= self.number_in_pod < self.connectors_of_pod:
            raise ValueError(
                f"pod_rank={self.pod_rank} is out of range: the pod has {self.connectors_of_pod} connectors, "
                f"give 0 to {self.connectors_of_pod - 1}"
            )

    def _check_facts(self) -> None:
        if not _ENGINE.fullmatch(self.engine):
            raise ValueError(
                f"engine={self.engine!r:.100} cannot be shown: "
                f"give at most 64 letters, digits, spaces and ._+-, such as 'sglang 0.5.23'"
            )
        if len(self.facts) > MAX_FACTS:
            raise ValueError(f"facts has {len(self.facts)} entries: give at most {MAX_FACTS}")
        for name, value in self.facts.items():
            if not isinstance(value, str) or len(name) > MAX_FACT or len(value) > MAX_FACT:
                raise ValueError(
                    f"facts[{name!r:.300}]={value!r:.300}: give a str, key and value at most {MAX_FACT} long"
                )

    @property
    def number_in_pod(self) -> int:
        """`pod_rank`, or `rank` where that is not given."""
        return self.rank if self.pod_rank is None else self.pod_rank

    @property
    def connectors_of_pod(self) -> int:
        """`pod_ranks`, or the number of ranks of the instance where that is not given."""
        return max(len(self.instance), 1) if self.pod_ranks is None else self.pod_ranks

    @property
    def listen_host(self) -> str:
        """Address to bind: `bind_host`, or the wildcard of the advertised address's family."""
        if self.bind_host is not None:
            return self.bind_host
        return "::" if ":" in self.advertise_host else "0.0.0.0"  # noqa: S104 - engine pods serve other pods

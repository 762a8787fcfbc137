"""The interface of an engine type: how its pods are rendered, and where its queues are read.

Everything here is data or a pure function of the pool. `build/engine.py` renders it and merges the user's template.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..api.engine import EngineType
from ..api.key_epochs import KeyEpochs
from ..api.names import Role
from ..api.pools import Pool
from .answers import EngineSample
from .metric_names import MetricNames

Object = dict[str, Any]

STARTUP_PERIOD_S = 2

PROXIES_NOTICE_S = 3
"""Seconds for which proxies still send requests to a pod that ends. They act on its EndpointSlice, not on the drain."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One engine instance to render."""

    pool: Pool
    index: int
    keys: KeyEpochs | None
    """Epochs of its keys. None without a connector."""


@dataclass(frozen=True, slots=True)
class Probe:
    """An HTTP probe on the port `http`.

    `grace_s` is the termination grace period of a container that failed it; None means the pod's.
    """

    path: str
    period_s: int
    timeout_s: int
    failures: int
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class Probes:
    """The three probes of the engine's container."""

    startup: Probe
    readiness: Probe
    liveness: Probe


@dataclass(frozen=True, slots=True)
class Directory:
    """A writable directory of the engine's container, on an emptyDir. `in_memory`: on a tmpfs."""

    name: str
    path: str
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A value of the user's template that contradicts a typed field. `field` is relative to the container."""

    field: str
    value: object
    expected: str


class Engine(ABC):
    """All that the operator knows about an engine type."""

    type: ClassVar[EngineType]
    command: ClassVar[Sequence[str]]
    owned_flags: ClassVar[frozenset[str]]
    """Flags that follow from typed fields or from fixed ports. A template must not set them."""
    default_image: ClassVar[bool]
    """The operator has an image for it. Otherwise the template must name one."""
    startup_s: ClassVar[int]
    """Time to load a model before the kubelet restarts the container, unless the pool says otherwise."""
    loads_path: ClassVar[str]
    """Path and query of the scheduler's own report, on the engine's HTTP port."""
    metric_names: ClassVar[MetricNames]
    """Metrics of its `/metrics`, on the engine's HTTP port."""

    @abstractmethod
    def args(self, instance: Instance) -> list[str]:
        """Return the arguments of the command."""

    @abstractmethod
    def environment(self, instance: Instance) -> list[Object]:
        """Return the environment, without the identity of the pod."""

    @abstractmethod
    def ports(self, pool: Pool) -> Mapping[str, int]:
        """Return the ports of the container by name. The headless Service has the same."""

    @abstractmethod
    def probes(self, pool: Pool) -> Probes:
        """Return the probes of the container."""

    @abstractmethod
    def drain_command(self, pool: Pool) -> Sequence[str] | None:
        """Return the command that drains the engine before SIGTERM. None: the engine drains at SIGTERM by itself."""

    @abstractmethod
    def parse_loads(self, body: bytes, role: Role) -> Mapping[int, EngineSample]:
        """Parse the scheduler's report, by rank.

        Raises:
            ValidationError: the answer does not fit.
        """

    def directories(self) -> Sequence[Directory]:
        """Return writable directories beside /tmp and pdpool's own."""
        return ()

    def has_connector(self, pool: Pool) -> bool:  # noqa: ARG002 -- for types that can run without it
        """Whether every rank of the engine has pdpool's connector with its admin endpoint."""
        return True

    def refusals(self, pool: Pool, container: Mapping[str, Any]) -> Iterator[Refusal]:  # noqa: ARG002
        """Return what in the merged container contradicts a typed field, beside owned flags."""
        return iter(())

    def shared_flags(self, pool: Pool) -> Mapping[str, str]:  # noqa: ARG002 -- for types that have such flags
        """Return the template's flags that both pools of a service must set to the same value, if both set them."""
        return {}

    def startup_probe(self, pool: Pool, path: str) -> Probe:
        """Return a startup probe that allows the pool's start-up time."""
        seconds = pool.spec.engine.startup_timeout_seconds or self.startup_s
        return Probe(path, STARTUP_PERIOD_S, timeout_s=3, failures=-(-seconds // STARTUP_PERIOD_S))


def agent_drain(python: str, pool: Pool, *sockets: str) -> list[str]:
    """Return the command that drains through the sockets of connectors."""
    drain = [python, "-m", "pdpool_connector.agent", "drain"]
    drain += [word for socket in sockets for word in ("--socket", socket)]
    return [*drain, "--after", str(PROXIES_NOTICE_S), "--deadline", str(pool.spec.drain_timeout_seconds)]

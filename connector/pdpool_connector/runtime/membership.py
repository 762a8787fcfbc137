"""A prefill rank's place in its instance: rank 0 serves the bootstrap registry, the others keep a lease there."""

from collections.abc import Callable, Sequence

from pdpool_connector.layout.pairing import ModelShard
from pdpool_connector.runtime.config import ConnectorConfig
from pdpool_connector.runtime.stats import LinkStats
from pdpool_connector.transport.address import Address
from pdpool_connector.transport.bootstrap import BootstrapClient, RankInfo, Refusal, Registration
from pdpool_connector.transport.http import HttpServer, Page
from pdpool_connector.transport.lease import LeaseKeeper
from pdpool_connector.transport.registry import Registry, RegistryEndpoint


class Membership:
    """Ends with `http`. `refused` is called, in the thread of `http`, with why a registration was refused."""

    def __init__(
        self,
        config: ConnectorConfig,
        instance: Sequence[ModelShard],
        own: RankInfo,
        http: HttpServer,
        refused: Callable[[str], None],
    ) -> None:
        """Raises OSError when the bootstrap port cannot be bound."""
        self._lease: LeaseKeeper | None = None
        self._registry: Registry | None = None
        if config.registry is not None and config.rank > 0:
            self.registry_address = config.registry
            client = BootstrapClient(config.allowed_networks, config.curve)
            registration = Registration(info=own, ranks=len(instance))
            self._lease = LeaseKeeper(client, config.registry, registration, config.timeouts)
            http.submit(self._lease.run())
            return
        self._registry = Registry(tuple(instance), own, config.facts, config.timeouts.lease_s)
        endpoint = RegistryEndpoint(self._registry, config.allowed_networks, refused, config.curve)
        pages = {"/health": Page("text/plain", lambda: b"ok\n")}
        port = http.serve(config.bootstrap_port, pages, endpoint.handlers())
        self.registry_address = str(Address(config.advertise_host, port))
        """Where decode asks for the instance, "host:port"."""

    def stats(self, now: float) -> tuple[LinkStats, ...]:
        """The state of the instance as this rank sees it."""
        if self._lease is not None:
            failure = self._lease.failure
            state = "registering" if failure else "registered"
            since = now - self._lease.since if failure else None
            return (LinkStats(self._lease.registry, state, (), failure, since),)
        assert self._registry is not None
        answer = self._registry.ranks()
        if isinstance(answer, Refusal):
            since = self._registry.incomplete_s()
            return (LinkStats(self.registry_address, "incomplete", answer.missing, answer.error, since),)
        return (LinkStats(self.registry_address, "whole", (), "", None),)

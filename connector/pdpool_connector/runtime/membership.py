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
    """Begins with its making, and ends with `http`. `refused` is told, in the thread of `http`, why another was not let
    in.
    """

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
        self._ranks: Registry | None = None
        if config.registry is not None and config.rank > 0:
            self.registry_address = config.registry
            client = BootstrapClient(config.allowed_networks, config.curve)
            self._lease = LeaseKeeper(client, config.registry, Registration(info=own, ranks=len(instance)))
            http.submit(self._lease.run())
            return
        self._ranks = Registry(tuple(instance), own)
        endpoint = RegistryEndpoint(self._ranks, config.allowed_networks, refused, config.curve)
        pages = {"/health": Page("text/plain", lambda: b"ok\n")}
        port = http.serve(config.bootstrap_port, pages, endpoint.handlers())
        self.registry_address = str(Address(config.advertise_host, port))
        """Where decode asks for the instance, "host:port"."""

    def stats(self, now: float) -> tuple[LinkStats, ...]:
        """How it stands with the instance, seen from here."""
        if self._lease is not None:
            failure = self._lease.failure
            state = "registering" if failure else "registered"
            since = now - self._lease.since if failure else None
            return (LinkStats(self._lease.registry, state, (), failure, since),)
        assert self._ranks is not None
        answer = self._ranks.ranks()
        if isinstance(answer, Refusal):
            since = self._ranks.incomplete_s()
            return (LinkStats(self.registry_address, "incomplete", answer.missing, answer.error, since),)
        return (LinkStats(self.registry_address, "whole", (), "", None),)

"""From SGLang's arguments to the connector's configuration. Pure: plain values in, plain values out.

Each attention data-parallel rank of prefill is an instance of its own. Rank d serves its registry at the bootstrap port
plus d.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdpool_connector import Address, ConnectorConfig, engine_variables

from .memory import Placement


@dataclass(frozen=True)
class Engine:
    """What the plugin reads from SGLang's arguments.

    Args:
        role: "prefill" or "decode".
        version: Version of SGLang.
        host: Address of this process for peers, unless the environment names one.
        leader_host: Address of the instance's rank 0.
        http_port: Port of the server.
        bootstrap_port: Port of prefill's first registry.
        place: This rank in its instance.
        dp_rank, dp_size: Which of how many data-parallel ranks, plain or attention.
        replicas: Data-parallel replicas of plain DP; 1 with DP attention.
        world_rank, world_size: This process among those of its replica.
        nodes: Nodes over which a replica is spread.
        deadline_s: Life of a hand-off in seconds.
        refusals: What is set and cannot work: the setting, and what to do.
    """

    role: str
    version: str
    host: str
    leader_host: str
    http_port: int
    bootstrap_port: int
    place: Placement
    dp_rank: int = 0
    dp_size: int = 1
    replicas: int = 1
    world_rank: int = 0
    world_size: int = 1
    nodes: int = 1
    deadline_s: float = 300.0
    refusals: Mapping[str, str] = field(default_factory=dict)

    @property
    def pod_ranks(self) -> int:
        """Connectors in this pod."""
        return self.replicas * (self.world_size // self.nodes)

    @property
    def pod_rank(self) -> int:
        """Number of this connector in its pod."""
        local = self.world_size // self.nodes
        replica = self.dp_rank if self.replicas > 1 else 0
        return replica * local + self.world_rank % local

    def refuse(self) -> None:
        """Raise ValueError if SGLang was started with something that the plugin cannot do."""
        if self.refusals:
            named = "; ".join(f"{setting} cannot be used: {remedy}" for setting, remedy in self.refusals.items())
            raise ValueError(f"transfer backend pdpool: {named}")

    def facts(self) -> Mapping[str, str]:
        """What prefill publishes for decode."""
        return {
            "engine": "sglang",
            "engine_version": self.version,
            "dp_size": str(self.dp_size),
            "http_port": str(self.http_port),
        }

    def config(self, instance: tuple[Any, ...], environ: Mapping[str, str] = os.environ) -> ConnectorConfig:
        """Make the connector's configuration: PDPOOL_* variables, and what SGLang knows better.

        Args:
            instance: The shards of this rank's instance.
            environ: The variables.

        Raises:
            ValueError: A variable has no usable value.
        """
        variables = engine_variables(environ, host=self.host, pod_rank=self.pod_rank)
        own: dict[str, Any] = {
            "engine": f"sglang {self.version}",
            "rank": self.place.rank,
            "instance": instance,
            "pod_rank": self.pod_rank,
            "pod_ranks": self.pod_ranks,
            "request_deadline_s": self.deadline_s,
        }
        if self.role == "prefill":
            port = self.bootstrap_port + self.dp_rank
            own |= {"bootstrap_port": port, "facts": self.facts()}
            if self.place.rank:
                own["registry"] = str(Address(self.leader_host, port))
        return ConnectorConfig.from_env(variables, **own)


def data_parallel_rank(replica: int | None, replicas: int, attention_rank: int) -> int:
    """Which of an engine's data-parallel ranks a process is.

    With one replica it is the attention's rank: `SGLANG_DP_RANK` then numbers separate servers, each with a registry
    of its own, and decode looks for the first rank of each.
    """
    return (replica or 0) if replicas > 1 else attention_rank


def registry_of(bootstrap: str, dp_rank: int) -> str:
    """The registry of one data-parallel rank, from the bootstrap address that the router names.

    Raises ValueError for what is no address.
    """
    host, _, port = bootstrap.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise ValueError(f"bootstrap address is {bootstrap!r}, must be host:port")
    return f"{host}:{int(port) + dp_rank}"

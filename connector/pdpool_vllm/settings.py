"""From vLLM's configuration to the connector's. Pure: plain values in, plain values out."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pdpool_connector import Address, ConnectorConfig, ModelShard, engine_variables

from .memory import Place

BOOTSTRAP_PORT: Final = 8998
"""Default of PDPOOL_BOOTSTRAP_PORT."""
ROLES: Final = {"kv_producer": "prefill", "kv_consumer": "decode"}


@dataclass(frozen=True)
class Engine:
    """What the connector reads from vLLM's configuration.

    Args:
        kv_role: Of `--kv-transfer-config`.
        version: Version of vLLM.
        host: Address of this process for peers, unless the environment names one.
        tp_size: Tensor parallelism.
        total_heads: KV heads of the model; 1 for MLA.
        latent: The model has MLA.
        model: Name under which the model is served, the same on both sides.
        refusals: What is set and cannot work: the setting, and what to do.
    """

    kv_role: str
    version: str
    host: str
    tp_size: int = 1
    total_heads: int = 1
    latent: bool = False
    model: str = ""
    refusals: Mapping[str, str] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """`prefill` or `decode`."""
        return ROLES[self.kv_role]

    def refuse(self) -> None:
        """Raise ValueError if vLLM was started with something that the connector cannot do."""
        refusals = dict(self.refusals)
        if self.kv_role not in ROLES:
            refusals[f"kv_role {self.kv_role!r}"] = "set kv_producer for prefill, kv_consumer for decode"
        if refusals:
            named = "; ".join(f"{setting} cannot be used: {remedy}" for setting, remedy in refusals.items())
            raise ValueError(f"PdpoolConnector: {named}")

    def place(self, tp_rank: int) -> Place:
        """One worker in this instance."""
        return Place(tp_rank, self.tp_size, self.total_heads, self.latent)

    def config(
        self, tp_rank: int, instance: tuple[ModelShard, ...] = (), environ: Mapping[str, str] = os.environ
    ) -> ConnectorConfig:
        """Make the configuration of one worker's connector: PDPOOL_* variables, and what vLLM knows better.

        Args:
            tp_rank: Of the worker.
            instance: What each worker of the instance holds; () for worker 0 where only the addresses are wanted.
            environ: The variables.

        Raises:
            ValueError: A variable has no usable value.
        """
        config = ConnectorConfig.from_env(
            engine_variables(environ, host=self.host, pod_rank=tp_rank),
            engine=f"vllm {self.version}",
            rank=tp_rank,
            instance=instance,
            pod_rank=tp_rank,
            pod_ranks=self.tp_size,
        )
        if self.role == "decode":
            return config
        config = replace(
            config,
            bootstrap_port=config.bootstrap_port or BOOTSTRAP_PORT,
            facts={"engine": "vllm", "engine_version": self.version},
        )
        return replace(config, registry=registry_of(config) if tp_rank else None)


def registry_of(config: ConnectorConfig) -> str:
    """Return the address of the registry that worker 0 of this prefill serves, "host:port"."""
    return str(Address(config.advertise_host, config.bootstrap_port))

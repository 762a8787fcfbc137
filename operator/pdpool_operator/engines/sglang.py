"""SGLang: flags for the engine, variables for the connector, because SGLang takes no foreign flags.

Written against SGLang 0.5.23. With `transfer.connector: Native` nothing of pdpool runs in the pod.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..api import names
from ..api.engine import EngineType, TransferConnector
from ..api.names import Role
from ..api.pools import Pool
from .base import Directory, Instance, Object, Refusal
from .foreign import (
    CONTROL_PORT,
    DIRECTORIES,
    HOME,
    connector_variables,
    drain_command,
    numbered,
    shared_flags,
    template_args,
    too_few_gpus,
)
from .sglang_http import SGLangHttp

PLUGIN = "pdpool"

REFUSED_FLAGS = {
    "--config": "a file of flags could contradict the pool's fields; write the flags as args",
    "--nnodes": "an instance is one pod; remove it",
    "--node-rank": "an instance is one pod; remove it",
    "--dist-init-addr": "an instance is one pod; remove it",
}
BALANCE, BY_ROOM = "--load-balance-method", "follow_bootstrap_room"
"""Decode finds the data-parallel rank of prefill by the room."""
DP_ATTENTION = "--enable-dp-attention"
SHARED_FLAGS = ("--page-size", "--kv-cache-dtype")
"""The connector refuses a hand-off between sides that differ in one of these."""


class SGLang(SGLangHttp):
    """SGLang, with pdpool's plugin or its own connector."""

    type = EngineType.SGLANG
    command = ("python3", "-m", "sglang.launch_server")
    owned_flags = frozenset(
        {
            "--model-path",
            "--model",
            "--served-model-name",
            "--host",
            "--port",
            "--disaggregation-mode",
            "--disaggregation-transfer-backend",
            "--disaggregation-bootstrap-port",
            "--tensor-parallel-size",
            "--tp-size",
            "--tp",
            "--pipeline-parallel-size",
            "--pp-size",
            "--pp",
            "--data-parallel-size",
            "--dp-size",
            "--dp",
            "--enable-metrics",
        }
    )
    default_image = False
    startup_s = 1800

    def args(self, instance: Instance) -> list[str]:
        """See `Engine`."""
        spec, role = instance.pool.spec, instance.pool.role
        native = spec.transfer.connector is TransferConnector.NATIVE
        flags = {
            "--model-path": spec.model.path,
            "--served-model-name": spec.model.effective_name,
            "--host": "0.0.0.0",  # noqa: S104 -- the pod's own network
            "--port": str(names.ENGINE_HTTP_PORT),
            "--disaggregation-mode": str(role),
            "--disaggregation-transfer-backend": spec.transfer.backend.lower() if native else PLUGIN,
            "--disaggregation-bootstrap-port": str(names.BOOTSTRAP_PORT),
            "--tp-size": str(spec.parallelism.tensor),
            "--pp-size": str(spec.parallelism.pipeline),
            "--dp-size": str(spec.parallelism.data),
        }
        if self._balances(instance.pool):
            flags[BALANCE] = BY_ROOM
        # An idle scheduler otherwise spins on a core.
        return [*(f"{flag}={value}" for flag, value in flags.items()), "--enable-metrics", "--sleep-on-idle"]

    def environment(self, instance: Instance) -> list[Object]:
        """See `Engine`."""
        variables = {
            "SGLANG_HOST_IP": "$(PDPOOL_POD_IP)",
            # /health otherwise generates a token at each call, which takes a second.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            # After a crash of its scheduler, SGLang otherwise goes on answering for 60 s.
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
            # Triton, FlashInfer, torch and the hub write caches below it.
            "HOME": HOME,
            # torch names a cache directory after the user, and the user id has no name in the image.
            "USER": PLUGIN,
        }
        if self.has_connector(instance.pool):
            variables |= _pinned() | connector_variables(instance)
        return [{"name": name, "value": value} for name, value in variables.items()]

    def ports(self, pool: Pool) -> Mapping[str, int]:
        """See `Engine`."""
        data = pool.spec.parallelism.data if self.has_connector(pool) else 1
        ranks = rank_count(pool) if self.has_connector(pool) else 0
        return {
            "http": names.ENGINE_HTTP_PORT,
            **(numbered("bootstrap", names.BOOTSTRAP_PORT, data) if pool.role is Role.PREFILL else {}),
            **numbered("control", CONTROL_PORT, ranks),
            **numbered("admin", names.ADMIN_PORT, ranks),
        }

    def drain_command(self, pool: Pool) -> Sequence[str] | None:
        """See `Engine`. Without our connector, SGLang ends its requests after SIGTERM.

        Every rank has a socket, the further ones with their number behind the name.
        """
        if not self.has_connector(pool):
            return None
        return drain_command(pool, rank_count(pool))

    def directories(self) -> Sequence[Directory]:
        """See `Engine`."""
        return DIRECTORIES

    def has_connector(self, pool: Pool) -> bool:
        """See `Engine`."""
        return pool.spec.transfer.connector is TransferConnector.PDPOOL

    def refusals(self, pool: Pool, container: Mapping[str, Any]) -> Iterator[Refusal]:
        """See `Engine`."""
        for arg, after in pairwise([*container["args"], ""]):
            flag, separator, value = arg.partition("=")
            if flag in REFUSED_FLAGS:
                yield Refusal("args", arg, REFUSED_FLAGS[flag])
            if flag == BALANCE and self._balances(pool) and (value if separator else after) != BY_ROOM:
                yield Refusal("args", arg, f"must be {BY_ROOM} for prefill with pdpool's connector; remove it")
        yield from self._refused_environment(pool, container)
        yield from too_few_gpus(container, rank_count(pool))

    def shared_flags(self, pool: Pool) -> Mapping[str, str]:
        """See `Engine`. The value of a flag that is absent or `auto` is known to SGLang only."""
        if not self.has_connector(pool):
            return {}
        return shared_flags(pool, SHARED_FLAGS)

    def _balances(self, pool: Pool) -> bool:
        return self.has_connector(pool) and pool.role is Role.PREFILL and pool.spec.parallelism.data > 1

    def _refused_environment(self, pool: Pool, container: Mapping[str, Any]) -> Iterator[Refusal]:
        pinned = _pinned() if self.has_connector(pool) else {}
        for entry in container["env"]:
            name, value = entry["name"], entry.get("value")
            if name == "SGLANG_PLUGINS" and name in pinned:
                if PLUGIN not in str(value).split(","):
                    yield Refusal(f"env[{name}]", value, f"the list of plugins must hold {PLUGIN}")
            elif name in pinned and value != pinned[name]:
                yield Refusal(f"env[{name}]", value, f"must be {pinned[name]} with pdpool's connector; remove it")


def rank_count(pool: Pool) -> int:
    """Return the number of scheduler processes of an instance. Each has a connector.

    DP attention takes its ranks out of the tensor ranks.
    """
    parallelism = pool.spec.parallelism
    ranks = parallelism.tensor * parallelism.pipeline
    return ranks if DP_ATTENTION in template_args(pool) else ranks * parallelism.data


def _pinned() -> dict[str, str]:
    """Variables without which a hand-off is not safe."""
    return {
        "SGLANG_PLUGINS": PLUGIN,
        # SGLang otherwise frees pages after 30 s although a peer may still write into them.
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "86400",
    }

"""vLLM: flags for the engine, variables for the connector. Written against vLLM 0.32.0.

pdpool's middleware gives vLLM's server what sglang-router sends and what the operator reads of SGLang: requests with
`bootstrap_room`, and `/v1/loads`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..api import names
from ..api.engine import EngineType
from ..api.names import Role
from ..api.pools import Pool
from .base import Directory, Instance, Object, Probe, Probes, Refusal
from .foreign import (
    CONTROL_PORT,
    DIRECTORIES,
    HOME,
    connector_variables,
    drain_command,
    numbered,
    shared_flags,
    too_few_gpus,
)
from .sglang_http import SGLangHttp

USER = "pdpool"
KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
REFUSED_FLAGS = {
    "--config": "a file of flags could contradict the pool's fields; write the flags as args",
    "--nnodes": "an instance is one pod; remove it",
    "--node-rank": "an instance is one pod; remove it",
    "--headless": "an instance is one pod; remove it",
    "--api-server-count": "/v1/loads counts the requests of one HTTP server; remove it",
    "-asc": "/v1/loads counts the requests of one HTTP server; remove it",
    "--disable-log-stats": "/v1/loads are made of these statistics; remove it",
    "--root-path": "routers and probes ask for /; remove it",
    "--ssl-certfile": "routers and probes speak plain HTTP; remove it",
}
SHARED_FLAGS = ("--block-size", "--kv-cache-dtype")
"""The connector refuses a hand-off between sides that differ in one of these."""


class VLLM(SGLangHttp):
    """vLLM with pdpool's connector."""

    type = EngineType.VLLM
    command = ("python3", "-m", "vllm.entrypoints.openai.api_server")
    owned_flags = frozenset(
        {
            "--model",
            "--served-model-name",
            "--host",
            "--port",
            "--kv-transfer-config",
            "--tensor-parallel-size",
            "-tp",
            "--pipeline-parallel-size",
            "-pp",
            "--data-parallel-size",
            "-dp",
            "--middleware",
        }
    )
    default_image = False
    startup_s = 1800

    def args(self, instance: Instance) -> list[str]:
        """See `Engine`."""
        spec, role = instance.pool.spec, instance.pool.role
        transfer = {
            "kv_connector": "PdpoolConnector",
            "kv_connector_module_path": "pdpool_vllm.connector",
            "kv_role": KV_ROLES[role],
        }
        flags = {
            "--model": spec.model.path,
            "--served-model-name": spec.model.effective_name,
            "--host": "0.0.0.0",  # noqa: S104 -- the pod's own network
            "--port": str(names.ENGINE_HTTP_PORT),
            "--tensor-parallel-size": str(spec.parallelism.tensor),
            "--kv-transfer-config": json.dumps(transfer, separators=(",", ":")),
            "--middleware": "pdpool_vllm.middleware.SGLangHttp",
        }
        return [f"{flag}={value}" for flag, value in flags.items()]

    def environment(self, instance: Instance) -> list[Object]:
        """See `Engine`."""
        variables = {
            "VLLM_HOST_IP": "$(PDPOOL_POD_IP)",
            "VLLM_NO_USAGE_STATS": "1",
            # Triton, FlashInfer, torch and the hub write caches below it.
            "HOME": HOME,
            # torch names a cache directory after the user, and the user id has no name in the image.
            "USER": USER,
            **connector_variables(instance),
        }
        return [{"name": name, "value": value} for name, value in variables.items()]

    def ports(self, pool: Pool) -> Mapping[str, int]:
        """See `Engine`."""
        ranks = pool.spec.parallelism.tensor
        return {
            "http": names.ENGINE_HTTP_PORT,
            **(numbered("bootstrap", names.BOOTSTRAP_PORT, 1) if pool.role is Role.PREFILL else {}),
            **numbered("control", CONTROL_PORT, ranks),
            **numbered("admin", names.ADMIN_PORT, ranks),
        }

    def probes(self, pool: Pool) -> Probes:
        """See `Engine`. vLLM has no `/model_info`; `/version` too is answered by its HTTP side alone."""
        found = super().probes(pool)
        return Probes(
            found.startup, found.readiness, Probe("/version", period_s=10, timeout_s=5, failures=12, grace_s=5)
        )

    def drain_command(self, pool: Pool) -> Sequence[str] | None:
        """See `Engine`. Every rank has a socket, the further ones with their number behind the name."""
        return drain_command(pool, pool.spec.parallelism.tensor)

    def directories(self) -> Sequence[Directory]:
        """See `Engine`."""
        return DIRECTORIES

    def refusals(self, pool: Pool, container: Mapping[str, Any]) -> Iterator[Refusal]:
        """See `Engine`."""
        for arg in container["args"]:
            given = str(arg).partition("=")[0]
            # vLLM takes underscores too, and parts of a JSON value: --kv_transfer_config.kv_role
            flag = given.replace("_", "-").partition(".")[0] if given.startswith("-") else given
            if flag in REFUSED_FLAGS:
                yield Refusal("args", arg, REFUSED_FLAGS[flag])
            elif flag != given and flag in self.owned_flags:
                yield Refusal("args", arg, f"pdpool sets {flag} from the pool's own fields; remove it")
        yield from too_few_gpus(container, pool.spec.parallelism.tensor)

    def shared_flags(self, pool: Pool) -> Mapping[str, str]:
        """See `Engine`. The value of a flag that is absent or `auto` is known to vLLM only."""
        return shared_flags(pool, SHARED_FLAGS)

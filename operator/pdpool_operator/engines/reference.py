"""pdpool's own small CPU engine: everything by flags, one set of ports."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..api import names
from ..api.engine import EngineType
from ..api.key_epochs import KeyEpochs
from ..api.names import Role
from ..api.pools import Pool
from .base import Instance, Object, agent_drain
from .metric_names import SGLANG
from .sglang_http import SGLangHttp


class Reference(SGLangHttp):
    """The reference engine. It has SGLang's HTTP contract."""

    type = EngineType.REFERENCE
    command = ("python", "-m", "pdpool_reference")
    owned_flags = frozenset(
        {
            "--mode",
            "--tp-size",
            "--pp-size",
            "--model-path",
            "--served-model-name",
            "--host",
            "--port",
            "--bootstrap-port",
            "--control-port",
            "--admin-port",
            "--admin-socket",
            "--advertise-host",
            "--transfer-backend",
            "--curve-keys",
            "--curve-optional",
            "--operator-key",
            "--pod-uid",
        }
    )
    default_image = True
    startup_s = 600
    metric_names = replace(SGLANG, finished=())  # its `num_requests_total` counts requests that it has taken

    def args(self, instance: Instance) -> list[str]:
        """See `Engine`."""
        pool = instance.pool
        flags = {
            "--mode": str(pool.role),
            "--model-path": pool.spec.model.path,
            "--served-model-name": pool.spec.model.effective_name,
            "--transfer-backend": pool.spec.transfer.backend.lower(),
            "--advertise-host": "$(PDPOOL_POD_IP)",
            "--host": "0.0.0.0",  # noqa: S104 -- the pod's own network
            "--port": str(names.ENGINE_HTTP_PORT),
            "--control-port": str(names.CONTROL_PORT),
            "--admin-port": str(names.ADMIN_PORT),
            "--admin-socket": names.ADMIN_SOCKET,
            # Not an owned flag: a template may name another directory, on a volume that outlives the pod.
            "--flight-dir": names.FLIGHT_DIRECTORY,
            # The preStop hook has already waited. The engine fails the remaining requests and notifies peers before
            # the kubelet kills it. If the hook used the whole grace period, 2 s are left for that.
            "--shutdown-grace": "0",
        }
        if pool.spec.parallelism.tensor > 1:
            flags["--tp-size"] = str(pool.spec.parallelism.tensor)
        if pool.spec.parallelism.pipeline > 1:
            flags["--pp-size"] = str(pool.spec.parallelism.pipeline)
        if pool.role is Role.PREFILL:
            flags["--bootstrap-port"] = str(names.BOOTSTRAP_PORT)
        return [*(f"{flag}={value}" for flag, value in flags.items()), *_key_args(instance.keys)]

    def environment(self, instance: Instance) -> list[Object]:  # noqa: ARG002 -- it takes flags
        """See `Engine`."""
        return []

    def ports(self, pool: Pool) -> Mapping[str, int]:
        """See `Engine`."""
        bootstrap = {"bootstrap": names.BOOTSTRAP_PORT} if pool.role is Role.PREFILL else {}
        return {
            "http": names.ENGINE_HTTP_PORT,
            **bootstrap,
            "control": names.CONTROL_PORT,
            "admin": names.ADMIN_PORT,
        }

    def drain_command(self, pool: Pool) -> Sequence[str] | None:
        """See `Engine`."""
        return agent_drain("python", pool, names.ADMIN_SOCKET)


def _key_args(keys: KeyEpochs | None) -> list[str]:
    if keys is None:
        return []
    return [
        f"--operator-key={names.KEYS_DIRECTORY}/{names.operator_file(keys.newest)}",
        f"--curve-keys={names.KEYS_DIRECTORY}/{names.curve_file(keys)}",
    ]

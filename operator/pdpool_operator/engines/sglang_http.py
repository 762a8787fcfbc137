"""SGLang's HTTP contract, which the reference engine has too: probes, and the scheduler's own report of queues."""

from collections.abc import Mapping

from ..api.names import Role
from ..api.pools import Pool
from .answers import EngineSample, parse_sglang_loads
from .base import Engine, Probe, Probes
from .metric_names import SGLANG


class SGLangHttp(Engine):
    """Base of the engine types with this contract."""

    loads_path = "/v1/loads?include=all"
    metric_names = SGLANG

    def probes(self, pool: Pool) -> Probes:
        """See `Engine`."""
        return Probes(
            startup=self.startup_probe(pool, "/health"),
            readiness=Probe("/health", period_s=2, timeout_s=3, failures=3),
            # This probe checks only the HTTP side, because the router waits without limit for a process that never
            # answers. A hanging scheduler loop is judged by the operator: it may recover, and readiness takes it out
            # of service.
            liveness=Probe("/model_info", period_s=10, timeout_s=5, failures=12, grace_s=5),
        )

    def parse_loads(self, body: bytes, role: Role) -> Mapping[int, EngineSample]:
        """See `Engine`. Right also where the gauges of /metrics are stale, which change only with a batch."""
        return parse_sglang_loads(body, role)

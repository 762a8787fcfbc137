"""What a server is started with: command line and environment variables. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from proof.engines.environment import Environment

Role = Literal["unified", "prefill", "decode"]
Backend = Literal["none", "pdpool", "nixl", "nixl-shipped"]
"""`nixl`: SGLang's own at its best settings. `nixl-shipped`: the same as it is shipped."""

PORTS: Final = 16
"""Successive ports of one server."""
PAGE_TOKENS: Final = 16
POOL_TOKENS: Final = 16_384
CHUNK_TOKENS: Final = 128
FOREVER_S: Final = 86_400

_FLAGS: Final = (
    *("--host", "127.0.0.1", "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "16", "--page-size", str(PAGE_TOKENS)),
    *("--enable-metrics", "--skip-server-warmup", "--sleep-on-idle"),
)
_VARIABLES: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "UCX_NET_DEVICES": "lo",
    # After a crash the main process would live on for a minute.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Launch:
    """One server.

    Args:
        role, backend: What it is.
        model: `tiny` or `smollm2`.
        tensor, data: Ranks of tensor parallelism, and of data parallelism.
        core: The core that all its processes share once it serves; None: any.
        flags, env: In addition to those that every server has.
    """

    role: Role
    backend: Backend = "none"
    model: str = "tiny"
    tensor: int = 1
    data: int = 1
    core: int | None = None
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Name in logs and messages."""
        return self.role if self.backend == "none" else f"{self.role}-{self.backend}"

    @property
    def ranks(self) -> int:
        """Scheduler processes."""
        return self.tensor * self.data


@dataclass(frozen=True)
class Ports:
    """Ports of one server, `PORTS` of them from `first` on. Ranks take successive ones."""

    first: int

    @property
    def http(self) -> int:
        return self.first

    @property
    def bootstrap(self) -> int:
        return self.first + 2

    @property
    def control(self) -> int:
        return self.first + 6

    @property
    def admin(self) -> int:
        return self.first + 11


def command(launch: Launch, ports: Ports, environment: Environment) -> list[str]:
    """Return the command line. The server ends when its starter dies."""
    words = ["setpriv", "--pdeathsig", "TERM", str(environment.python), "-m", "sglang.launch_server"]
    words += ["--model-path", str(environment.model(launch.model)), "--port", str(ports.http), *_FLAGS]
    if launch.role != "unified":
        words += ["--disaggregation-mode", launch.role, "--disaggregation-bootstrap-port", str(ports.bootstrap)]
        words += ["--disaggregation-transfer-backend", launch.backend.partition("-")[0]]
    if launch.role == "prefill":
        # Without it SGLang uses CUDA events on the second chunk.
        words += ["--disable-overlap-schedule", "--chunked-prefill-size", str(CHUNK_TOKENS)]
    if launch.role == "decode":
        words += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    if launch.tensor > 1:
        words += ["--tp-size", str(launch.tensor), "--disable-custom-all-reduce"]
    if launch.data > 1:
        words += ["--dp-size", str(launch.data)]
    return [*words, *launch.flags]


def variables(launch: Launch, ports: Ports, pythonpath: Path | None) -> Mapping[str, str]:
    """Return the environment variables that are set for a server.

    Args:
        launch: The server.
        ports: Its ports.
        pythonpath: Folder of its plugin, pdpool or `stock_nixl`.
    """
    found = dict(_VARIABLES)
    if pythonpath is not None:
        found["PYTHONPATH"] = str(pythonpath)
    if launch.ranks > 1:
        # Without it SGLang wants as many NUMA nodes as ranks.
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(launch.ranks))
        found["SGLANG_NCCL_SO_PATH"] = "/nonexistent"
    if launch.backend == "pdpool":
        found |= {
            "PDPOOL_ADVERTISE_HOST": "127.0.0.1",
            "PDPOOL_CONTROL_PORT": str(ports.control),
            "PDPOOL_ADMIN_PORT": str(ports.admin),
            "PDPOOL_TRANSFER_BACKEND": "nixl",
            # Decode gives pages back on proof only, never after a time.
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": str(FOREVER_S),
        }
    elif launch.backend == "nixl":
        found["PDPOOL_STOCK_NIXL"] = "best"
    return found | dict(launch.env)

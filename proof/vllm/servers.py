"""Starts vLLM servers, watches them, sends them signals, and ends them. Touches only its own processes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from dev.processes import end_group, kill_group, members, send
from dev.progress import Progress, ticking
from proof.engines.environment import EnginesError, install_pdpool
from proof.engines.servers import free_ports, get
from proof.vllm.environment import Environment

Side = Literal["prefill", "decode"]

START_S: Final = 300.0
"""A pair takes 30 to 60 s on two idle cores."""
END_S: Final = 30.0
ROUTER_S: Final = 30.0
BLOCK_TOKENS: Final = 32
"""The CPU's attention needs a multiple of 32."""
BLOCKS: Final = 512
TAIL: Final = 3000
ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}
WAITING: Final = "vllm:num_requests_waiting"
USED: Final = "vllm:kv_cache_usage_perc"
GAUGES: Final = ("vllm:num_requests_running", WAITING, USED)
VARIABLES: Final = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,self",  # a writer that is stopped then leaves bytes under way
    "PYTHONUNBUFFERED": "1",
}


class Server:
    """One server, the leader of a process group of its own. It ends when its starter dies.

    Args:
        side: What it is.
        tensor: Ranks of tensor parallelism.
        environment: Its packages and its model.
        folder: For its log, with pdpool in `plugin`.
        first_port: The first of its successive ports.
    """

    def __init__(self, side: Side, tensor: int, environment: Environment, folder: Path, first_port: int) -> None:
        self.side, self.tensor = side, tensor
        self._environment, self._folder, self.first_port = environment, folder, first_port
        self._started = 0
        self.start()

    def start(self) -> None:
        """Start it, also after its end, at the same ports."""
        self._started += 1
        self.log = self._folder / f"{self.side}-tp{self.tensor}-{self.first_port}-{self._started}.log"
        transfer = {
            "kv_connector": "PdpoolConnector",
            "kv_connector_module_path": "pdpool_vllm.connector",
            "kv_role": ROLES[self.side],
        }
        words = ["setpriv", "--pdeathsig", "TERM", str(self._environment.python), "-m"]
        words += ["vllm.entrypoints.openai.api_server", "--model", str(self._environment.model)]
        words += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.first_port)]
        words += ["--middleware", "pdpool_vllm.middleware.SGLangHttp"]
        words += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
        words += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)]
        words += ["--tensor-parallel-size", str(self.tensor), "--kv-transfer-config", json.dumps(transfer)]
        inherited = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        own = {
            "PYTHONPATH": str(self._folder / "plugin"),
            "PDPOOL_BOOTSTRAP_PORT": str(self.bootstrap_port),
            "PDPOOL_CONTROL_PORT": str(self.first_port + 2),
            "PDPOOL_ADMIN_PORT": str(self.first_port + 8),
        }
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                words,
                env=inherited | VARIABLES | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.first_port}"

    @property
    def bootstrap_port(self) -> int:
        """Of prefill's registry."""
        return self.first_port + 1

    def ready(self) -> bool:
        """Whether it serves; raises EnginesError if it has died."""
        if self._process.poll() is not None:
            tail = self.log.read_text(errors="replace")[-TAIL:]
            raise EnginesError(f"{self.side} ended with {self._process.returncode}; the end of {self.log}:\n{tail}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False

    def gauges(self) -> dict[str, float]:
        """Return requests that run and wait, and the share of the KV cache that is in use."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        return {name: sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))) for name in GAUGES}

    def connectors(self) -> list[dict[str, Any]]:
        """Return the state of each rank's connector."""
        return [get(f"http://127.0.0.1:{self.first_port + 8 + rank}/v1/state") for rank in range(self.tensor)]

    def left(self) -> dict[str, float]:
        """Return what is not zero: requests, blocks, attempts, holds."""
        found = self.gauges()
        for rank, state in enumerate(self.connectors()):
            found[f"connector {rank} attempts"] = sum(queue["reqs"] for queue in state["attempts"].values())
            found |= {f"connector {rank} {name}": state[name] for name in ("holds", "faults")}
        return {f"{self.side} {name}": value for name, value in found.items() if value}

    def signal_engine(self, number: signal.Signals) -> None:
        """Send a signal to the processes of the engine, not to the HTTP server. A stop has taken effect by then."""
        for pid in members(self._process.pid):
            if pid != self._process.pid:
                with contextlib.suppress(ProcessLookupError):
                    send(pid, number)

    def kill(self) -> None:
        """Kill all its processes at once, as the loss of a pod does."""
        kill_group(self._process, END_S)

    def end(self) -> None:
        """End it by SIGTERM, and what is left after `END_S` by SIGKILL."""
        end_group(self._process, END_S)


class Pair:
    """Prefill and decode. Ends both at its end."""

    def __init__(self, environment: Environment, folder: Path, prefill_tensor: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        install_pdpool(folder / "plugin")
        first = free_ports([])
        self.prefill = Server("prefill", prefill_tensor, environment, folder, first)
        self.decode = Server("decode", 1, environment, folder, free_ports([first]))

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    def __enter__(self) -> Self:
        try:
            await_ready(self.servers)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        for server in self.servers:
            server.end()


@contextlib.contextmanager
def router(pair: Pair, folder: Path) -> Iterator[str]:
    """Run sglang-router before a pair; yields its URL.

    Raises:
        EnginesError: it does not list both servers within `ROUTER_S`.
    """
    port = free_ports([server.first_port for server in pair.servers])
    words = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
    words += ["--prefill", pair.prefill.url, str(pair.prefill.bootstrap_port), "--decode", pair.decode.url]
    words += ["--port", str(port), "--prometheus-port", str(port + 1)]
    with (folder / "router.log").open("wb") as output:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline, url = time.monotonic() + ROUTER_S, f"http://127.0.0.1:{port}"
        while True:
            with contextlib.suppress(OSError):
                if len(get(f"{url}/workers")["workers"]) == len(pair.servers):
                    break
            if time.monotonic() > deadline:
                raise EnginesError(f"sglang-router does not list both servers; its log is {folder / 'router.log'}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(END_S)


def await_ready(servers: Sequence[Server]) -> None:
    """Wait until all serve.

    Raises:
        EnginesError: one died, or does not serve within `START_S`.
    """
    deadline, names = time.monotonic() + START_S, ", ".join(server.side for server in servers)
    with ticking(Progress(), lambda: f"  starting {names}"):
        for server in servers:
            while not server.ready():
                if time.monotonic() > deadline:
                    raise EnginesError(f"{server.side} does not serve after {START_S:.0f} s; its log is {server.log}")
                time.sleep(0.5)

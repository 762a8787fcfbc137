"""What differs between the demos with the reference engine, SGLang and vLLM."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dev.demo.screen import Screen
from dev.demo.target import Target

HTTP_PORT: Final = 30000


@dataclass(frozen=True)
class DemoEngine(ABC):
    """An engine that the demo can run, freeze and compare with itself.

    Attributes:
        image: Name in `dev.images`. The image is `pdpool-<image>`.
        example: File name below examples/.
        ready_s: Time within which a service of these engines becomes Ready.
        alert: Alert that fires while a decode scheduler is frozen.
        unhealthy: Status of QueuesHealthy at that time. A stopped process takes its connector along: nothing is known.
        decode_args: Arguments that the demo adds in the decode pool, so that an engine can be frozen.
        sizes: What a first run takes, printed before it.
    """

    image: str
    example: str
    ready_s: float
    alert: str
    unhealthy: str
    decode_args: Sequence[str] = ()
    sizes: str = ""

    @abstractmethod
    def unified(self, model_path: str, model: str) -> tuple[Sequence[str], Sequence[str], Mapping[str, str]]:
        """Return command, arguments and variables of an engine that does both phases in one process."""

    @abstractmethod
    def freeze(self, screen: Screen, target: Target, namespace: str, pod: str, *, frozen: bool) -> str:
        """Stop or resume a pod's scheduler. Return the state in words."""


class Reference(DemoEngine):
    """The reference engine. It freezes its scheduler on request."""

    def unified(self, model_path: str, model: str) -> tuple[Sequence[str], Sequence[str], Mapping[str, str]]:
        """See `DemoEngine`."""
        flags = ("--mode=unified", f"--model-path={model_path}", f"--served-model-name={model}", "--host=0.0.0.0")
        return ("python", "-m", "pdpool_reference"), (*flags, f"--port={HTTP_PORT}"), {}

    def freeze(self, screen: Screen, target: Target, namespace: str, pod: str, *, frozen: bool) -> str:
        """See `DemoEngine`."""
        body = json.dumps({"freeze_scheduler": frozen})
        screen.command(f"kubectl port-forward -n {namespace} {pod} {HTTP_PORT} &")
        screen.command(f"curl localhost:{HTTP_PORT}/faults -d '{body}'")
        target.ask_pod(namespace, pod, HTTP_PORT, "/faults", body.encode())
        return "is frozen; its connector still runs" if frozen else "runs again"


SIGNAL_PROCESSES: Final = """
import os, pathlib, signal, sys
sent = 0
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(sys.argv[2].encode()):
        os.kill(int(entry.name), getattr(signal, sys.argv[1]))
        sent += 1
sys.exit(0 if sent else f"no process is called {sys.argv[2]}")
"""
CPU_FLAGS: Final = (
    *("--device=cpu", "--attention-backend=torch_native", "--dtype=float32", "--page-size=16"),
    *("--max-total-tokens=8192", "--max-running-requests=16", "--skip-server-warmup", "--sleep-on-idle"),
)
"""As in examples/sglang-cpu.yaml; the operator adds the last one."""
CPU_VARIABLES: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HOME": "/tmp",
    "USER": "pdpool",
}


class SGLang(DemoEngine):
    """Real SGLang on CPU. Its scheduler, which the connector is part of, is stopped by a signal."""

    def unified(self, model_path: str, model: str) -> tuple[Sequence[str], Sequence[str], Mapping[str, str]]:
        """See `DemoEngine`."""
        flags = (f"--model-path={model_path}", f"--served-model-name={model}", "--host=0.0.0.0", *CPU_FLAGS)
        return ("python3", "-m", "sglang.launch_server"), (*flags, f"--port={HTTP_PORT}"), CPU_VARIABLES

    def freeze(self, screen: Screen, target: Target, namespace: str, pod: str, *, frozen: bool) -> str:
        """See `DemoEngine`."""
        return signal_processes(screen, target, namespace, pod, "sglang::scheduler", frozen=frozen)


VLLM_FLAGS: Final = ("--dtype=float32", "--enforce-eager", "--block-size=32", "--max-model-len=2048")
VLLM_BLOCKS: Final = "--num-gpu-blocks-override=256"
VLLM_VARIABLES: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HOME": "/tmp",
    "USER": "pdpool",
}


class VLLM(DemoEngine):
    """Real vLLM on CPU. The processes of its engine are stopped by a signal."""

    def unified(self, model_path: str, model: str) -> tuple[Sequence[str], Sequence[str], Mapping[str, str]]:
        """See `DemoEngine`."""
        flags = (f"--model={model_path}", f"--served-model-name={model}", "--host=0.0.0.0", *VLLM_FLAGS, VLLM_BLOCKS)
        return ("python3", "-m", "vllm.entrypoints.openai.api_server"), (*flags, f"--port={HTTP_PORT}"), VLLM_VARIABLES

    def freeze(self, screen: Screen, target: Target, namespace: str, pod: str, *, frozen: bool) -> str:
        """See `DemoEngine`."""
        return signal_processes(screen, target, namespace, pod, "VLLM::", frozen=frozen)


def signal_processes(screen: Screen, target: Target, namespace: str, pod: str, title: str, *, frozen: bool) -> str:
    """Stop or resume the processes of a pod whose titles begin so. Return the state in words."""
    name = "SIGSTOP" if frozen else "SIGCONT"
    screen.command(f"kubectl exec -n {namespace} {pod} -- python3 -c '… {name} to {title}'")
    words = ("exec", "-n", namespace, pod, "-c", "engine", "--", "python3", "-c", SIGNAL_PROCESSES, name, title)
    target.kubectl(*words)
    return "is stopped, and its connector with it; its HTTP server answers" if frozen else "runs again"


ENGINES: Final[Mapping[str, DemoEngine]] = {
    "reference": Reference(
        "engine",
        "chat.yaml",
        ready_s=240,
        alert="PdpoolPrefillBootstrapQueueStuck",
        unhealthy="False",
        decode_args=("--enable-faults",),
    ),
    "sglang": SGLang(
        "sglang",
        "sglang-cpu.yaml",
        ready_s=1200,
        alert="PdpoolInstanceUnknown",
        unhealthy="Unknown",
        sizes="SGLang on CPU: an image of 7 GB from a download of 3 GB, 25 GB of disk and 12 GB of memory in all. "
        "A first run takes about 25 minutes on two cores",
    ),
    "vllm": VLLM(
        "vllm",
        "vllm-cpu.yaml",
        ready_s=1200,
        alert="PdpoolInstanceUnknown",
        unhealthy="Unknown",
        sizes="vLLM on CPU: an image of 9 GB from a download of 4 GB, 28 GB of disk and 12 GB of memory in all. "
        "A first run takes about 25 minutes on two cores",
    ),
}

"""Answers of one engine that does prefill and decode in one process. The hand-off must give the same answers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import yaml

from dev.demo.install import POOLS
from dev.demo.screen import Screen
from dev.demo.target import Target

NAME = "unified"
PORT = 30000
READY_S = 120.0


def pod(image: str, model_path: str, model: str) -> dict[str, Any]:
    """Return the pod of a unified engine."""
    args = ["--mode=unified", f"--model-path={model_path}", f"--served-model-name={model}", "--host=0.0.0.0"]
    container = {
        "name": "engine",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "pdpool_reference"],
        "args": [*args, f"--port={PORT}"],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 3},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": NAME, "namespace": POOLS},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 5,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "fsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }


@contextlib.contextmanager
def unified_engine(screen: Screen, target: Target, image: str, model_path: str, model: str) -> Iterator[str]:
    """Run a unified engine while the block runs, and yield its URL.

    Raises:
        CommandError: it cannot start or did not become Ready in time.
    """
    screen.say("starting one engine that does both phases in one process: its answers are the expected ones")
    try:
        with screen.ticking(lambda: f"pod {NAME} is not Ready yet"):
            target.kubectl("delete", "pod", NAME, "-n", POOLS, "--ignore-not-found", "--timeout=30s")
            target.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(pod(image, model_path, model)))
            target.kubectl(
                *("wait", "-n", POOLS, "--for=condition=Ready", f"pod/{NAME}", f"--timeout={READY_S:.0f}s"),
                timeout_s=READY_S + 10,
            )
        with target.reach(POOLS, "pod", NAME, PORT) as url:
            yield url
    finally:
        target.kubectl("delete", "pod", NAME, "-n", POOLS, "--ignore-not-found", "--wait=false")

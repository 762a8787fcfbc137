"""Answers of one engine that does prefill and decode in one process. The hand-off must give the same answers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import yaml

from dev.demo.engine import HTTP_PORT, DemoEngine
from dev.demo.install import POOLS
from dev.demo.screen import Screen
from dev.demo.target import Target

NAME = "unified"


def pod(engine: DemoEngine, image: str, model_path: str, model: str) -> dict[str, Any]:
    """Return the pod of a unified engine."""
    command, args, variables = engine.unified(model_path, model)
    container = {
        "name": "engine",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "args": list(args),
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 3},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}],
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
            "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
        },
    }


@contextlib.contextmanager
def unified_engine(
    screen: Screen, target: Target, engine: DemoEngine, image: str, model_path: str, model: str
) -> Iterator[str]:
    """Run a unified engine while the block runs, and yield its URL.

    Raises:
        CommandError: it cannot start or did not become Ready in time.
    """
    screen.say("starting one engine that does both phases in one process: its answers are the expected ones")
    try:
        with screen.ticking(lambda: f"pod {NAME} is not Ready yet"):
            target.kubectl("delete", "pod", NAME, "-n", POOLS, "--ignore-not-found", "--timeout=30s")
            target.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(pod(engine, image, model_path, model)))
            target.kubectl(
                *("wait", "-n", POOLS, "--for=condition=Ready", f"pod/{NAME}", f"--timeout={engine.ready_s:.0f}s"),
                timeout_s=engine.ready_s + 10,
            )
        with target.reach(POOLS, "pod", NAME, HTTP_PORT) as url:
            yield url
    finally:
        target.kubectl("delete", "pod", NAME, "-n", POOLS, "--ignore-not-found", "--wait=false")

"""The pod template of an engine instance: flags, environment, ports, probes and drain of each engine type."""

from typing import Any

from ..api import names
from ..api.key_epochs import FIRST_KEYS, KeyEpochs
from ..api.models import EngineType, Pool
from ..api.names import Role
from .common import TERMINATION_MARGIN_S, http_probe, keys_volume
from .settings import BuildSettings
from .template import MergeRules, TemplateInvalid, merge_template

REFERENCE_COMMAND = ("python", "-m", "pdpool_reference")
AGENT_COMMAND = ("python", "-m", "pdpool_connector.agent")

STARTUP_PERIOD_S = 2
STARTUP_FAILURES = 300
"""Together ten minutes for an engine to load its model. After that, the kubelet restarts it."""

OWNED_FLAGS = frozenset(
    {
        "--mode",
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
"""Flags that follow from typed fields or from fixed ports. A template must not set them."""

RULES = MergeRules(
    root="spec.template",
    container=names.ENGINE_CONTAINER,
    owned_flags=OWNED_FLAGS,
    flags_from="the pool's own fields",
    grace_period="it is derived from spec.drainTimeoutSeconds; set that instead",
    pre_stop="pdpool drains the engine there; remove it",
)


def engine_template(pool: Pool, index: int, settings: BuildSettings, keys: KeyEpochs = FIRST_KEYS) -> dict[str, Any]:
    """Pod template of one instance, with the user's template merged in.

    Raises:
        TemplateInvalid: the user's template contradicts what pdpool sets, or is malformed.
    """
    template = merge_template(_template(pool, index, settings, keys), pool.spec.template, RULES)
    engine = template["spec"]["containers"][0]
    if not engine.get("image"):
        engine["image"] = _default_image(pool, settings)
        engine.setdefault("imagePullPolicy", settings.pods.image_pull_policy)
    return template


def _default_image(pool: Pool, settings: BuildSettings) -> str:
    if pool.spec.engine.type is not EngineType.REFERENCE or not settings.engine_image:
        raise TemplateInvalid(
            f"spec.template.spec.containers[{names.ENGINE_CONTAINER}].image", None, "name the image of the engine here"
        )
    return settings.engine_image


def _template(pool: Pool, index: int, settings: BuildSettings, keys: KeyEpochs) -> dict[str, Any]:
    files = (names.curve_file(keys), names.operator_file(keys.newest))
    return {
        "metadata": {
            "labels": names.instance_labels(pool.metadata.name, pool.role, index),
            "annotations": {names.ANNOTATION_KEY_EPOCH: str(keys)},
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **settings.pods.pull_secrets(),
            "securityContext": dict(settings.pods.pod_security_context),
            "terminationGracePeriodSeconds": pool.spec.drain_timeout_seconds + TERMINATION_MARGIN_S,
            "containers": [_engine_container(pool, index, settings, keys)],
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {"name": "run-pdpool", "emptyDir": {}},
                keys_volume({file: file for file in files}),
            ],
        },
    }


def _engine_container(pool: Pool, index: int, settings: BuildSettings, keys: KeyEpochs) -> dict[str, Any]:
    return {
        "name": names.ENGINE_CONTAINER,
        # The pool's status then shows why an engine does not start. Engines write no prompts or keys there.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": list(REFERENCE_COMMAND),
        "args": [*_args(pool), *_key_args(keys)],
        "env": _environment(pool, index),
        "ports": container_ports(pool.role),
        "startupProbe": http_probe(
            "/health", "http", period_s=STARTUP_PERIOD_S, timeout_s=3, failures=STARTUP_FAILURES
        ),
        "readinessProbe": http_probe("/health", "http", period_s=2, timeout_s=3, failures=3),
        # This probe checks only the HTTP side, because the router waits without limit for a process that never answers.
        # A hanging scheduler loop is judged by the operator: it may recover, and readiness takes it out of service.
        "livenessProbe": {
            **http_probe("/model_info", "http", period_s=10, timeout_s=5, failures=12),
            "terminationGracePeriodSeconds": 5,
        },
        "lifecycle": {
            "preStop": {
                "exec": {
                    "command": [
                        *AGENT_COMMAND,
                        "drain",
                        "--socket",
                        names.ADMIN_SOCKET,
                        "--deadline",
                        str(pool.spec.drain_timeout_seconds),
                    ]
                }
            }
        },
        "securityContext": dict(settings.pods.container_security_context),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 -- an emptyDir of the pod
            {"name": "run-pdpool", "mountPath": names.RUN_DIRECTORY},
            {"name": "pdpool-keys", "mountPath": names.KEYS_DIRECTORY, "readOnly": True},
        ],
    }


def _args(pool: Pool) -> list[str]:
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
        # The preStop hook has already waited. The engine fails the remaining requests and notifies peers before the
        # kubelet kills it. If the hook used the whole grace period, 2 s are left for that.
        "--shutdown-grace": "0",
    }
    if pool.role is Role.PREFILL:
        flags["--bootstrap-port"] = str(names.BOOTSTRAP_PORT)
    return [f"{flag}={value}" for flag, value in flags.items()]


def _key_args(keys: KeyEpochs) -> list[str]:
    return [
        f"--operator-key={names.KEYS_DIRECTORY}/{names.operator_file(keys.newest)}",
        f"--curve-keys={names.KEYS_DIRECTORY}/{names.curve_file(keys)}",
    ]


def _environment(pool: Pool, index: int) -> list[dict[str, Any]]:
    return [
        {"name": "PDPOOL_ROLE", "value": str(pool.role)},
        {"name": "PDPOOL_POOL", "value": pool.metadata.name},
        {"name": "PDPOOL_INSTANCE", "value": str(index)},
        {"name": "PDPOOL_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "PDPOOL_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        # UCX's InfiniBand module crashes at exit where the kernel has no InfiniBand.
        {"name": "UCX_MODULES", "value": "^ib"},
    ]


def container_ports(role: Role) -> list[dict[str, Any]]:
    """Ports of the container `engine`. The headless Service uses the same names."""
    ports = {"http": names.ENGINE_HTTP_PORT}
    if role is Role.PREFILL:
        ports["bootstrap"] = names.BOOTSTRAP_PORT
    ports |= {"control": names.CONTROL_PORT, "admin": names.ADMIN_PORT}
    return [{"name": name, "containerPort": port} for name, port in ports.items()]

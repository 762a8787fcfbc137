"""The pod template of an engine instance: the parts that all engine types share, and those of its type."""

from typing import Any

from ..api import names
from ..api.key_epochs import FIRST_KEYS, KeyEpochs
from ..api.pools import Pool
from ..engines import engine_of
from ..engines.base import Directory, Engine, Instance, Probe
from .common import TERMINATION_MARGIN_S, http_probe, keys_volume, spread_over_nodes
from .rdma import rdma_environment, with_rdma
from .settings import BuildSettings
from .template import ENGINE_PATH, ROOT, MergeRules, TemplateInvalid, merge_template

KEYS_MOUNT = {"name": "pdpool-keys", "mountPath": names.KEYS_DIRECTORY, "readOnly": True}

OWN_DIRECTORIES = (Directory("tmp", "/tmp"), Directory("run-pdpool", names.RUN_DIRECTORY))  # noqa: S108 -- an emptyDir


def engine_template(pool: Pool, index: int, settings: BuildSettings, keys: KeyEpochs = FIRST_KEYS) -> dict[str, Any]:
    """Pod template of one instance, with the user's template merged in.

    Raises:
        TemplateInvalid: the user's template contradicts what pdpool sets, or is malformed.
    """
    kind = engine_of(pool.spec.engine.type)
    ours = _template(kind, Instance(pool, index, keys if kind.has_connector(pool) else None), settings)
    template = merge_template(ours, pool.spec.template, _rules(kind))
    engine = template["spec"]["containers"][0]
    if not engine.get("image"):
        engine["image"] = _default_image(kind, settings)
        engine.setdefault("imagePullPolicy", settings.pods.image_pull_policy)
    for refusal in kind.refusals(pool, engine):
        raise TemplateInvalid(f"{ENGINE_PATH}.{refusal.field}", refusal.value, refusal.expected)
    return with_rdma(template, pool.spec.template, pool.spec.rdma)


def _rules(kind: Engine) -> MergeRules:
    return MergeRules(
        root=ROOT,
        container=names.ENGINE_CONTAINER,
        owned_flags=kind.owned_flags,
        flags_from="the pool's own fields",
        grace_period="it is derived from spec.drainTimeoutSeconds; set that instead",
        pre_stop="pdpool drains the engine there; remove it",
    )


def _default_image(kind: Engine, settings: BuildSettings) -> str:
    if not kind.default_image or not settings.engine_image:
        # Often the user has named an image, but called the container otherwise.
        expected = f"name the image here, in the container named {names.ENGINE_CONTAINER}"
        raise TemplateInvalid(f"{ENGINE_PATH}.image", None, expected)
    return settings.engine_image


def _template(kind: Engine, instance: Instance, settings: BuildSettings) -> dict[str, Any]:
    pool, keys = instance.pool, instance.keys
    directories = [*OWN_DIRECTORIES, *kind.directories()]
    files = () if keys is None else (names.curve_file(keys), names.operator_file(keys.newest))
    return {
        "metadata": {
            "labels": names.instance_labels(pool.metadata.name, pool.role, instance.index),
            "annotations": {} if keys is None else {names.ANNOTATION_KEY_EPOCH: str(keys)},
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **settings.pods.pull_secrets(),
            "securityContext": dict(settings.pods.pod_security_context),
            "terminationGracePeriodSeconds": pool.spec.drain_timeout_seconds + TERMINATION_MARGIN_S,
            "topologySpreadConstraints": spread_over_nodes(names.pool_selector(pool.metadata.name, pool.role)),
            "containers": [_engine_container(kind, instance, settings, directories)],
            "volumes": [
                *({"name": d.name, "emptyDir": {"medium": "Memory"} if d.in_memory else {}} for d in directories),
                *([keys_volume({file: file for file in files})] if files else []),
            ],
        },
    }


def _engine_container(
    kind: Engine, instance: Instance, settings: BuildSettings, directories: list[Directory]
) -> dict[str, Any]:
    probes = kind.probes(instance.pool)
    drain = kind.drain_command(instance.pool)
    return {
        "name": names.ENGINE_CONTAINER,
        # The pool's status then shows why an engine does not start. Engines write no prompts or keys there.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "command": list(kind.command),
        "args": kind.args(instance),
        "env": [*_identity(instance), *kind.environment(instance), *rdma_environment(instance.pool.spec.rdma)],
        "ports": container_ports(instance.pool),
        "startupProbe": _probe(probes.startup),
        "readinessProbe": _probe(probes.readiness),
        "livenessProbe": _probe(probes.liveness),
        "lifecycle": {"preStop": {"exec": {"command": list(drain)}}} if drain else {},
        "securityContext": dict(settings.pods.container_security_context),
        "volumeMounts": [
            *({"name": d.name, "mountPath": d.path} for d in directories),
            *([KEYS_MOUNT] if kind.has_connector(instance.pool) else []),
        ],
    }


def _probe(probe: Probe) -> dict[str, Any]:
    rendered = http_probe(
        probe.path, "http", period_s=probe.period_s, timeout_s=probe.timeout_s, failures=probe.failures
    )
    return rendered if probe.grace_s is None else {**rendered, "terminationGracePeriodSeconds": probe.grace_s}


def _identity(instance: Instance) -> list[dict[str, Any]]:
    return [
        {"name": "PDPOOL_ROLE", "value": str(instance.pool.role)},
        {"name": "PDPOOL_POOL", "value": instance.pool.metadata.name},
        {"name": "PDPOOL_INSTANCE", "value": str(instance.index)},
        {"name": "PDPOOL_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "PDPOOL_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]


def container_ports(pool: Pool) -> list[dict[str, Any]]:
    """Ports of the container `engine`. The headless Service uses the same names."""
    ports = engine_of(pool.spec.engine.type).ports(pool)
    return [{"name": name, "containerPort": port} for name, port in ports.items()]

"""Objects of a service's router: Deployment, Service, PodDisruptionBudget, worker list and key."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..api import names
from ..api.key_epochs import FIRST_KEYS, KeyEpochs
from ..api.router import Policy
from ..api.services import DisaggregatedService
from .common import (
    content_hash,
    disruption_budget,
    http_probe,
    keys_hash,
    keys_volume,
    metadata,
    spec_hash,
    spread_over_nodes,
    with_build_hash,
)
from .settings import BuildSettings
from .template import MergeRules, TemplateInvalid, merge_template, refuse_owned_flags

PRE_STOP_SLEEP_S = 5
"""After a pod begins to terminate, proxies send it new connections for this long, until their configuration is updated.
"""

STREAMS_MAY_FINISH_S = 180
"""Time that the router gives running streams to finish after SIGTERM: its `--shutdown-grace-period-secs`."""

GRACE_PERIOD_S = PRE_STOP_SLEEP_S + STREAMS_MAY_FINISH_S + 5

KEY_FILE = "router.key"

DEFAULT_RESOURCES = {"requests": {"cpu": "50m", "memory": "160Mi"}, "limits": {"memory": "512Mi"}}
"""Measured: 100 MiB with round robin. Policy CacheAware keeps a tree of prompts, which `--max-tree-size` bounds."""

POLICY_NAMES = {
    Policy.ROUND_ROBIN: "round_robin",
    Policy.RANDOM: "random",
    Policy.CACHE_AWARE: "cache_aware",
}
"""Names of the policies in sglang-router. Its other ones do not serve if the router starts with an empty list."""

OWNED_FLAGS = frozenset(
    {
        "--host",
        "--port",
        "--prometheus-host",
        "--prometheus-port",
        "--pd-disaggregation",
        "--prefill",
        "--decode",
        "--worker-urls",
        "--policy",
        "--prefill-policy",
        "--decode-policy",
        "--control-plane-api-keys",
        "--shutdown-grace-period-secs",
        "--service-discovery",
        "--mini-lb",
    }
)
"""Flags that follow from typed fields, from fixed ports, or from the operator's list of engines."""

RULES = MergeRules(
    root="spec.router.template",
    container=names.ROUTER_CONTAINER,
    owned_flags=OWNED_FLAGS,
    flags_from="the fields of spec.router or its own list of engines",
    grace_period="running streams have 180 s to finish; remove it",
    pre_stop="the router waits there until it gets no new connections; remove it",
)


def workers_json(prefill_ips: Iterable[str], decode_ips: Iterable[str]) -> str:
    """Worker list from which a router starts. It is sorted, so equal lists give equal texts."""
    workers = {
        "prefill": [
            {"url": names.engine_url(ip), "bootstrap_port": names.BOOTSTRAP_PORT} for ip in sorted(set(prefill_ips))
        ],
        "decode": [{"url": names.engine_url(ip)} for ip in sorted(set(decode_ips))],
    }
    return json.dumps(workers, indent=1)


def router_spec_hash(service: DisaggregatedService, keys: KeyEpochs = FIRST_KEYS) -> str:
    """Hash that the router pods carry if they were built from the current spec, with these keys."""
    without = frozenset({"replicas", "enabled", "port", "service"})
    return spec_hash(service, service.spec.router, without=without, keys=keys)


def router_deployment(service: DisaggregatedService, settings: BuildSettings) -> dict[str, Any]:
    """Deployment of the router. The router reads its first worker list from the ConfigMap and needs no Kubernetes
    access.

    Raises:
        TemplateInvalid: the user's template or arguments contradict what pdpool sets, or are malformed.
    """
    spec = service.spec.router
    refuse_owned_flags(spec.args, RULES, "spec.router.args")
    template = merge_template(_template(service, settings), spec.template, RULES)
    hashes = {
        names.ANNOTATION_SPEC_HASH: router_spec_hash(service, KeyEpochs(settings.key_epoch)),
        names.ANNOTATION_BUILD_HASH: content_hash(template),
    }
    template["metadata"]["annotations"] = {**template["metadata"]["annotations"], **hashes}
    name = service.metadata.name
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, names.router(name), names.router_labels(name), hashes),
        "spec": {
            "replicas": service.spec.router.replicas,
            "revisionHistoryLimit": 2,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": names.router_selector(name)},
            "template": template,
        },
    }


def _template(service: DisaggregatedService, settings: BuildSettings) -> dict[str, Any]:
    name = service.metadata.name
    return {
        "metadata": {
            "labels": {**names.router_labels(name), **names.router_endpoints(name)},
            "annotations": {names.ANNOTATION_KEY_EPOCH: str(settings.key_epoch)},
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **_pull_secrets(service, settings),
            "securityContext": dict(settings.pods.pod_security_context),
            "terminationGracePeriodSeconds": GRACE_PERIOD_S,
            "topologySpreadConstraints": spread_over_nodes(names.router_selector(name)),
            "containers": [_container(service, settings)],
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {"name": "workers", "configMap": {"name": names.router(name), "optional": True}},
                keys_volume({names.router_file(settings.key_epoch): KEY_FILE}),
            ],
        },
    }


def _pull_secrets(service: DisaggregatedService, settings: BuildSettings) -> dict[str, Any]:
    own = service.spec.router.image_pull_secrets
    return {"imagePullSecrets": [{"name": secret.name} for secret in own]} if own else settings.pods.pull_secrets()


def _image(service: DisaggregatedService, settings: BuildSettings) -> dict[str, Any]:
    """Image of the router. Kubernetes chooses the pull policy of an image that the user names."""
    if own := service.spec.router.image:
        return {"image": own}
    return {"image": settings.router_image, "imagePullPolicy": settings.pods.image_pull_policy}


def _args(service: DisaggregatedService) -> list[str]:
    spec = service.spec.router
    flags = []
    if spec.policy.prefill is not Policy.ROUND_ROBIN:
        flags.append(f"--policy={POLICY_NAMES[spec.policy.prefill]}")
    if spec.policy.decode is not Policy.RANDOM:
        flags.append(f"--decode-policy={POLICY_NAMES[spec.policy.decode]}")
    return [*flags, *spec.args]


def _container(service: DisaggregatedService, settings: BuildSettings) -> dict[str, Any]:
    return {
        "name": names.ROUTER_CONTAINER,
        **_image(service, settings),
        "args": _args(service),
        "env": [{"name": "PDPOOL_ROUTER_KEY_FILE", "value": f"{names.ROUTER_KEYS_DIRECTORY}/{KEY_FILE}"}],
        "ports": [
            {"name": "http", "containerPort": names.ROUTER_HTTP_PORT},
            {"name": "metrics", "containerPort": names.ROUTER_METRICS_PORT},
        ],
        "startupProbe": http_probe("/liveness", "http", period_s=1, timeout_s=2, failures=120),
        "livenessProbe": http_probe("/liveness", "http", period_s=10, timeout_s=5, failures=6),
        # The router returns 503 until it knows a healthy engine of each role. Only then can it serve.
        "readinessProbe": http_probe("/readiness", "http", period_s=2, timeout_s=2, failures=2),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SLEEP_S}}},
        "resources": service.spec.router.resources or DEFAULT_RESOURCES,
        "securityContext": dict(settings.pods.container_security_context),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 -- an emptyDir of the pod
            {"name": "workers", "mountPath": names.ROUTER_CONFIG_DIRECTORY, "readOnly": True},
            {"name": "pdpool-keys", "mountPath": names.ROUTER_KEYS_DIRECTORY, "readOnly": True},
        ],
    }


def router_service(service: DisaggregatedService, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Service that clients use. An annotation holds the hash of `keys`, the Secret that was applied before it.

    Raises:
        TemplateInvalid: `spec.router.service.annotations` has a key of pdpool's.
    """
    name, spec = service.metadata.name, service.spec.router
    for key, value in spec.service.annotations.items():
        if key.startswith(f"{names.GROUP}/"):
            path = f"spec.router.service.annotations[{key}]"
            raise TemplateInvalid(path, value, "pdpool sets this itself; remove it")
    annotations = {**spec.service.annotations, **keys_hash(keys)}
    return with_build_hash(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(service, names.router(name), names.router_labels(name), annotations),
            "spec": {
                "type": str(spec.service.type),
                "selector": names.router_endpoints(name),
                "ports": [{"name": "http", "port": spec.port, "targetPort": "http"}],
            },
        }
    )


def router_disruption_budget(service: DisaggregatedService) -> dict[str, Any]:
    """PodDisruptionBudget of the router."""
    name = service.metadata.name
    return disruption_budget(service, names.router(name), names.router_labels(name), names.router_selector(name))


def worker_list_config_map(service: DisaggregatedService, workers: str) -> dict[str, Any]:
    """ConfigMap with the worker list of a starting router. `workers` is the result of `workers_json`."""
    name = service.metadata.name
    return with_build_hash(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(service, names.router(name), names.router_labels(name)),
            "data": {names.WORKERS_KEY: workers},
        }
    )

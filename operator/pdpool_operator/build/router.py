"""Objects of a service's router: Deployment, Service, PodDisruptionBudget, worker list and key."""

import base64
import json
from collections.abc import Iterable
from typing import Any

from ..api import names
from ..api.models import DisaggregatedService
from .common import (
    container_security_context,
    content_hash,
    disruption_budget,
    http_probe,
    metadata,
    pod_security_context,
    spec_hash,
    with_build_hash,
)
from .settings import BuildSettings

PRE_STOP_SLEEP_S = 5
"""After a pod begins to terminate, proxies send it new connections for this long, until their configuration is updated.
"""

STREAMS_MAY_FINISH_S = 180
"""Time that the router gives running streams to finish after SIGTERM: its `--shutdown-grace-period-secs`."""

GRACE_PERIOD_S = PRE_STOP_SLEEP_S + STREAMS_MAY_FINISH_S + 5


def workers_json(prefill_ips: Iterable[str], decode_ips: Iterable[str]) -> str:
    """Worker list from which a router starts. It is sorted, so equal lists give equal texts."""
    workers = {
        "prefill": [
            {"url": names.engine_url(ip), "bootstrap_port": names.BOOTSTRAP_PORT} for ip in sorted(set(prefill_ips))
        ],
        "decode": [{"url": names.engine_url(ip)} for ip in sorted(set(decode_ips))],
    }
    return json.dumps(workers, indent=1)


def router_spec_hash(service: DisaggregatedService) -> str:
    """Hash that the router pods carry if they were built from the current spec."""
    return spec_hash(service, service.spec.router, without=frozenset({"replicas", "enabled", "port"}))


def router_deployment(service: DisaggregatedService, settings: BuildSettings) -> dict[str, Any]:
    """Deployment of the router. The router reads its first worker list from the ConfigMap and needs no Kubernetes
    access.
    """
    template = _template(service, settings)
    hashes = {
        names.ANNOTATION_SPEC_HASH: router_spec_hash(service),
        names.ANNOTATION_BUILD_HASH: content_hash(template),
    }
    template["metadata"]["annotations"] = hashes
    name = service.metadata.name
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, service.kind, names.router(name), names.router_labels(name), hashes),
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
        "metadata": {"labels": names.router_labels(name)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security_context(),
            "terminationGracePeriodSeconds": GRACE_PERIOD_S,
            "containers": [_container(name, settings.router_image)],
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {"name": "workers", "configMap": {"name": names.router(name), "optional": True}},
            ],
        },
    }


def _container(service: str, image: str) -> dict[str, Any]:
    return {
        "name": names.ROUTER_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "env": [
            {
                "name": "PDPOOL_ROUTER_KEY",
                "valueFrom": {"secretKeyRef": {"name": names.router_secret(service), "key": names.ROUTER_KEY_KEY}},
            }
        ],
        "ports": [
            {"name": "http", "containerPort": names.ROUTER_HTTP_PORT},
            {"name": "metrics", "containerPort": names.ROUTER_METRICS_PORT},
        ],
        "startupProbe": http_probe("/liveness", "http", period_s=1, timeout_s=2, failures=120),
        "livenessProbe": http_probe("/liveness", "http", period_s=10, timeout_s=5, failures=6),
        # The router returns 503 until it knows a healthy engine of each role. Only then can it serve.
        "readinessProbe": http_probe("/readiness", "http", period_s=2, timeout_s=2, failures=2),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SLEEP_S}}},
        "resources": {"requests": {"cpu": "50m", "memory": "160Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": container_security_context(),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 -- an emptyDir of the pod
            {"name": "workers", "mountPath": names.ROUTER_CONFIG_DIRECTORY, "readOnly": True},
        ],
    }


def router_service(service: DisaggregatedService) -> dict[str, Any]:
    """Service that clients use."""
    name = service.metadata.name
    return with_build_hash(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(service, service.kind, names.router(name), names.router_labels(name)),
            "spec": {
                "type": "ClusterIP",
                "selector": names.router_selector(name),
                "ports": [{"name": "http", "port": service.spec.router.port, "targetPort": "http"}],
            },
        }
    )


def router_disruption_budget(service: DisaggregatedService) -> dict[str, Any]:
    """PodDisruptionBudget of the router."""
    name = service.metadata.name
    return disruption_budget(
        service, service.kind, names.router(name), names.router_labels(name), names.router_selector(name)
    )


def router_key_secret(service: DisaggregatedService, key: str) -> dict[str, Any]:
    """Secret with the key of the router's control endpoints."""
    name = service.metadata.name
    return with_build_hash(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata(service, service.kind, names.router_secret(name), names.router_labels(name)),
            "type": "Opaque",
            "data": {names.ROUTER_KEY_KEY: base64.b64encode(key.encode()).decode()},
        }
    )


def worker_list_config_map(service: DisaggregatedService, workers: str) -> dict[str, Any]:
    """ConfigMap with the worker list of a starting router. `workers` is the result of `workers_json`."""
    name = service.metadata.name
    return with_build_hash(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(service, service.kind, names.router(name), names.router_labels(name)),
            "data": {names.WORKERS_KEY: workers},
        }
    )

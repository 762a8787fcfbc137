"""Every object that the builders make, in full, against committed YAML.

Rewrite the files with `--update-golden`, and read the diff.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from pdpool_operator.api.names import Role
from pdpool_operator.build import pool as pool_objects
from pdpool_operator.build import router
from pdpool_operator.build.common import keys_secret
from pdpool_operator.build.network_policy import NetworkPeers, router_network_policy

from tests.unit.operator.plan.makers import SETTINGS, make_pool, make_service

RICH_TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "chat"}, "annotations": {"example.com/note": "kept"}},
    "spec": {
        "nodeSelector": {"gpu": "a100"},
        "securityContext": {"fsGroup": 1000},
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        ],
        "initContainers": [{"name": "fetch", "image": "registry.example/fetch:1"}],
        "containers": [
            {"name": "logger", "image": "registry.example/logger:1"},
            {
                "name": "engine",
                "image": "registry.example/engine:2",
                "args": ["--kv-pages=512"],
                "env": [{"name": "MALLOC_ARENA_MAX", "value": "2"}, {"name": "OMP_NUM_THREADS", "value": "1"}],
                "ports": [{"name": "debug", "containerPort": 5678}],
                "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
                "resources": {"limits": {"memory": "2Gi"}},
                "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}},
                "lifecycle": {"postStart": {"exec": {"command": ["true"]}}},
            },
        ],
    },
}

RICH = make_pool(
    Role.DECODE,
    "big",
    replicas=3,
    model={"path": "/models/qwen3", "servedName": "qwen"},
    transfer={"backend": "Local"},
    drainTimeoutSeconds=600,
    template=RICH_TEMPLATE,
)

KEYS = keys_secret("llm", SETTINGS.keys)
CUSTOM_ROUTER = make_service(
    router={
        "image": "registry.example/router:2",
        "imagePullSecrets": [{"name": "registry"}],
        "policy": {"prefill": "CacheAware", "decode": "RoundRobin"},
        "args": ["--cache-threshold=0.3"],
        "resources": {"limits": {"memory": "2Gi"}},
        "template": {
            "metadata": {"labels": {"team": "chat"}},
            "spec": {
                "nodeSelector": {"pool": "front"},
                "containers": [{"name": "router", "env": [{"name": "RUST_LOG", "value": "info"}]}],
            },
        },
        "service": {"type": "LoadBalancer", "annotations": {"cloud.example/internal": "true"}},
    }
)

CASES: dict[str, list[dict[str, Any]]] = {
    "prefill_defaults": [
        pool_objects.instance_stateful_set(make_pool(), 0, SETTINGS),
        *pool_objects.pool_objects(make_pool(), SETTINGS),
    ],
    "decode_with_template": [
        pool_objects.instance_stateful_set(RICH, 2, SETTINGS),
        *pool_objects.pool_objects(RICH, SETTINGS),
    ],
    "router": [
        router.worker_list_config_map(make_service(), router.workers_json({"10.0.1.1"}, {"10.0.2.2", "fd00::1"})),
        router.router_deployment(make_service(), SETTINGS),
        router.router_service(make_service(router={"port": 9000}), KEYS),
        router.router_disruption_budget(make_service()),
        router_network_policy(make_service(), NetworkPeers(watchers=({"podSelector": {}},))),
    ],
    "router_with_template": [
        router.router_deployment(CUSTOM_ROUTER, SETTINGS),
        router.router_service(CUSTOM_ROUTER, KEYS),
    ],
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_built_objects_are_as_committed(case: str, same_as_golden: Callable[[str, Iterable[Any]], None]) -> None:
    same_as_golden(case, CASES[case])

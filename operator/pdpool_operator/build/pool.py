"""Objects of a pool: one StatefulSet per instance, the headless Service and the PodDisruptionBudget."""

from typing import Any

from ..api import names
from ..api.key_epochs import FIRST_KEYS, KeyEpochs
from ..api.pools import Pool, PoolSpec
from ..api.rdma import RdmaMode
from ..engines import engine_of
from .affinity import avoiding
from .canonical import canonical_template
from .common import content_hash, disruption_budget, keys_hash, keys_secret, metadata, spec_hash, with_build_hash
from .engine import container_ports, engine_template
from .network_policy import engine_network_policy
from .settings import BuildSettings

PODS_PER_INSTANCE = 1


def pool_spec_hash(pool: Pool, keys: KeyEpochs = FIRST_KEYS) -> str:
    """Hash that the pool's pods carry if they were built from its current spec, with these keys.

    Engines without a connector have no keys, so a rotation does not replace them.
    """
    if not engine_of(pool.spec.engine.type).has_connector(pool):
        keys = FIRST_KEYS
    return spec_hash(pool, _shaping(pool.spec), without=frozenset({"replicas", "rollout"}), keys=keys)


def _shaping(spec: PoolSpec) -> PoolSpec:
    """Return the one form of all specs that build the same pods.

    Templates that mean the same have one form: see `canonical`. A `servedName` that is the default is left out, and so
    is the difference of two RDMA modes.
    """
    model, rdma = spec.model, spec.rdma
    if model.served_name == model.model_copy(update={"served_name": None}).effective_name:
        model = model.model_copy(update={"served_name": None})
    if rdma is not None and rdma.mode is RdmaMode.REQUIRED:
        rdma = rdma.model_copy(update={"mode": RdmaMode.PREFERRED})
    return spec.model_copy(update={"template": canonical_template(spec.template), "model": model, "rdma": rdma})


def instance_stateful_set(
    pool: Pool, index: int, settings: BuildSettings, keys: KeyEpochs = FIRST_KEYS, avoid_node: str = ""
) -> dict[str, Any]:
    """StatefulSet of one instance, whose pod gets these keys and avoids a node if there is one to avoid.

    Its update strategy is `OnDelete`: the operator decides which instance is replaced, and when. The hashes do not
    cover the avoided node, so that it makes no pod outdated.

    Raises:
        TemplateInvalid: the user's template cannot be merged.
    """
    template = engine_template(pool, index, settings, keys)
    if restarted_at := pool.metadata.annotations.get(names.ANNOTATION_RESTARTED_AT):
        template["metadata"]["annotations"][names.ANNOTATION_RESTARTED_AT] = restarted_at
    hashes = {
        names.ANNOTATION_SPEC_HASH: pool_spec_hash(pool, keys),
        names.ANNOTATION_BUILD_HASH: content_hash(canonical_template(template)),
    }
    template["metadata"]["annotations"] = {**template["metadata"].get("annotations", {}), **hashes}
    notes = dict(hashes)
    if avoid_node:
        template["spec"] = avoiding(template["spec"], avoid_node)
        notes[names.ANNOTATION_AVOID_NODE] = avoid_node
    name = names.instance(pool.metadata.name, pool.role, index)
    labels = names.instance_labels(pool.metadata.name, pool.role, index)
    selector = names.instance_selector(pool.metadata.name, pool.role, index)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(pool, name, labels, notes),
        "spec": {
            "replicas": PODS_PER_INSTANCE,
            "serviceName": names.pool_workload(pool.metadata.name, pool.role),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": selector},
            "template": template,
        },
    }


def headless_service(pool: Pool, keys: dict[str, Any]) -> dict[str, Any]:
    """Service that gives the pods their DNS names.

    Its EndpointSlices are for gateways: an address is ready only while its pod is Ready and does not terminate. An
    annotation holds the hash of `keys`, the Secret that was applied before this Service.
    """
    name = names.pool_workload(pool.metadata.name, pool.role)
    return with_build_hash(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(pool, name, names.pool_labels(pool.metadata.name, pool.role), keys_hash(keys)),
            "spec": {
                "clusterIP": "None",
                "selector": names.pool_selector(pool.metadata.name, pool.role),
                "ports": [
                    {"name": port["name"], "port": port["containerPort"], "targetPort": port["name"]}
                    for port in container_ports(pool)
                ],
            },
        }
    )


def pool_disruption_budget(pool: Pool) -> dict[str, Any]:
    """PodDisruptionBudget of the pool."""
    return disruption_budget(
        pool,
        names.pool_workload(pool.metadata.name, pool.role),
        names.pool_labels(pool.metadata.name, pool.role),
        names.pool_selector(pool.metadata.name, pool.role),
    )


def pool_objects(pool: Pool, settings: BuildSettings) -> tuple[dict[str, Any], ...]:
    """Return the pool's objects except its instances."""
    keys = keys_secret(pool.metadata.namespace, settings.keys)
    policies = () if settings.peers is None else (engine_network_policy(pool, settings.peers),)
    return keys, headless_service(pool, keys), pool_disruption_budget(pool), *policies

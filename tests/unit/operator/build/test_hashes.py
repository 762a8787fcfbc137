from typing import Any

import pytest
from pdpool_operator.api import names
from pdpool_operator.api.base import Model
from pdpool_operator.api.pools import Pool, PoolSpec, PrefillPool
from pdpool_operator.build.common import spec_hash
from pdpool_operator.build.pool import instance_stateful_set, pool_spec_hash
from pdpool_operator.build.router import router_spec_hash, workers_json
from pdpool_operator.build.settings import BuildSettings
from pydantic import Field

from tests.unit.operator.plan.makers import SETTINGS, hashes, make_pool, make_service


def restarted(pool: Pool, at: str) -> Pool:
    meta = pool.metadata.model_copy(update={"annotations": {names.ANNOTATION_RESTARTED_AT: at}})
    return pool.model_copy(update={"metadata": meta})


def test_the_spec_hash_ignores_replicas_and_defaults_written_out() -> None:
    written_out = {"replicas": 7, "engine": {"type": "Reference"}, "model": {"path": "/models/smollm2"}, "template": {}}
    assert pool_spec_hash(make_pool(**written_out)) == pool_spec_hash(make_pool())


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"path": "/models/other"}},
        {"model": {"servedName": "other"}},
        {"transfer": {"backend": "Local"}},
        {"drainTimeoutSeconds": 61},
        {"template": {"metadata": {"annotations": {"a": "b"}}}},
        {"template": {"spec": {"volumes": [{"name": "x", "emptyDir": {}}]}}},
    ],
)
def test_the_spec_hash_changes_with_whatever_changes_pods(change: dict[str, Any]) -> None:
    assert pool_spec_hash(make_pool(**change)) != pool_spec_hash(make_pool())


def test_a_field_that_a_newer_version_adds_changes_no_spec_hash() -> None:
    class Nested(Model):
        mode: str = "Off"

    class NewerSpec(PoolSpec):
        added: int = 5
        nested: Nested = Field(default_factory=Nested)

    old = make_pool(model={"path": "/m"}, template={"spec": {"volumes": [{"name": "x", "emptyDir": {}}]}})
    newer = NewerSpec.model_validate({**old.spec.to_dict(), "added": 5, "nested": {"mode": "Off"}})
    assert spec_hash(old, newer, without=frozenset({"replicas"})) == pool_spec_hash(old)


def test_asking_for_a_restart_changes_the_spec_hash_each_time() -> None:
    pool = make_pool()
    asked = {pool_spec_hash(restarted(pool, at)) for at in ("2026-01-01", "2026-01-02")}
    assert len(asked | {pool_spec_hash(pool)}) == 3


def test_another_default_image_changes_the_build_hash_and_not_the_spec_hash() -> None:
    newer = BuildSettings(engine_image="localhost/pdpool-engine:next", router_image="x")
    spec_before, build_before = hashes(make_pool())
    spec_after, build_after = hashes(make_pool(), settings=newer)
    assert spec_after == spec_before
    assert build_after != build_before


def test_pods_carry_the_hashes_of_their_stateful_set() -> None:
    built = instance_stateful_set(make_pool(), 0, SETTINGS)
    on_object, on_pod = built["metadata"]["annotations"], built["spec"]["template"]["metadata"]["annotations"]
    assert {key: on_pod[key] for key in on_object} == on_object


def test_the_hash_does_not_depend_on_the_order_of_keys() -> None:
    one = make_pool(template={"metadata": {"labels": {"a": "1", "b": "2"}}})
    other = make_pool(template={"metadata": {"labels": {"b": "2", "a": "1"}}})
    assert pool_spec_hash(one) == pool_spec_hash(other)


def test_neither_replicas_nor_port_nor_pools_restart_routers() -> None:
    plain = router_spec_hash(make_service())
    assert router_spec_hash(make_service(router={"replicas": 3, "port": 9000})) == plain
    assert router_spec_hash(make_service(router={"service": {"type": "NodePort"}})) == plain
    assert router_spec_hash(make_service(stuckAfterSeconds=60)) == plain


def test_equal_worker_lists_are_equal_texts() -> None:
    assert workers_json(["10.0.0.2", "10.0.0.1"], []) == workers_json(["10.0.0.1", "10.0.0.2", "10.0.0.1"], [])


def test_every_derived_name_of_the_longest_allowed_pool_fits() -> None:
    pool = make_pool(name="a" * names.MAX_NAME_LENGTH, replicas=256)
    built = instance_stateful_set(pool, 255, SETTINGS)
    revision_label = built["metadata"]["name"] + "-" + "x" * 10
    longest = [
        revision_label,
        f"{names.instance(pool.metadata.name, PrefillPool.role, 255)}-0",
        names.router("a" * 40),
    ]
    assert max(map(len, longest)) <= 63

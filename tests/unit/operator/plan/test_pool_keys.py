"""A raised key epoch replaces engines like any other change of the spec: the Secret first, then one at a time."""

from dataclasses import replace

import pytest
from pdpool_operator.api import names
from pdpool_operator.api.key_epochs import KeyEpochs
from pdpool_operator.api.names import Role
from pdpool_operator.plan.pool import plan_pool

from tests.unit.operator.plan.makers import SETTINGS, T0, make_instance, make_observed, make_pool


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_new_keys_replace_engines_after_their_secret(role: Role) -> None:
    pool = make_pool(role, replicas=2)
    observed = make_observed(pool, make_instance(pool), make_instance(pool, 1), keys=KeyEpochs(2, 1))
    settings = replace(SETTINGS, keys={**SETTINGS.keys, "curve-2-1.json": "[]"}, key_epoch=2)
    plan = plan_pool(observed, settings, T0)
    assert [obj["kind"] for obj in plan.apply][:2] == ["Secret", "Service"]
    assert len(plan.patch) == 1, "one instance begins to drain"


def test_pod_mounts_only_the_keys_of_its_epochs() -> None:
    pool = make_pool(Role.DECODE)
    observed = make_observed(pool, keys=KeyEpochs(3, 2))
    (workload,) = (obj for obj in plan_pool(observed, SETTINGS, T0).apply if obj["kind"] == "StatefulSet")
    template = workload["spec"]["template"]
    assert template["metadata"]["annotations"][names.ANNOTATION_KEY_EPOCH] == "3-2"
    (volume,) = (one for one in template["spec"]["volumes"] if one["name"] == "pdpool-keys")
    files = {item["key"] for item in volume["secret"]["items"]}
    assert files == {"curve-3-2.json", "operator-3.pem"}
    args = template["spec"]["containers"][0]["args"]
    assert {f"{names.KEYS_DIRECTORY}/{file}" for file in files} <= {arg.partition("=")[2] for arg in args}


def test_waiting_side_of_a_rotation_does_nothing() -> None:
    pool = make_pool()
    observed = make_observed(pool, make_instance(pool), keys=KeyEpochs(1))
    assert not plan_pool(observed, replace(SETTINGS, key_epoch=2), T0).acts

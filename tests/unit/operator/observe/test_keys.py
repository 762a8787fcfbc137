"""Which objects are reconciled when one changes."""

import pytest
from pdpool_operator.api import names
from pdpool_operator.api.names import Role
from pdpool_operator.observe.keys import Bindings, Key, keys_of

SERVICE = Key("DisaggregatedService", "llm", "svc")
PREFILL = Key("PrefillPool", "llm", "p")
DECODE = Key("DecodePool", "llm", "d")


@pytest.fixture
def bindings() -> Bindings:
    one = Bindings()
    one.bind(SERVICE, "p", "d")
    one.bind(Key("DisaggregatedService", "other", "svc"), "p", "d")
    return one


def body(kind: str, name: str, labels: dict[str, str] | None = None, namespace: str = "llm") -> dict:
    return {"kind": kind, "metadata": {"name": name, "namespace": namespace, "labels": labels}}


def test_a_pool_concerns_itself_and_the_services_that_bind_it(bindings):
    assert set(keys_of(body("PrefillPool", "p"), bindings)) == {PREFILL, SERVICE}
    assert set(keys_of(body("DecodePool", "p"), bindings)) == {Key("DecodePool", "llm", "p")}


def test_a_service_concerns_itself_and_its_pools(bindings):
    assert set(keys_of(body("DisaggregatedService", "svc"), bindings)) == {SERVICE, PREFILL, DECODE}


def test_what_belongs_to_an_instance_concerns_its_pool_and_the_services(bindings):
    labels = names.instance_labels("d", Role.DECODE, 3)
    for kind in ("Pod", "StatefulSet"):
        assert set(keys_of(body(kind, "d-decode-3", labels), bindings)) == {DECODE, SERVICE}


def test_what_belongs_to_a_router_concerns_its_service(bindings):
    labels = names.router_labels("svc")
    for kind in ("Pod", "Deployment", "ConfigMap"):
        assert set(keys_of(body(kind, "svc-router", labels), bindings)) == {SERVICE}


def test_operation_on_a_node_is_itself_reconciled(bindings):
    fence = body("PoolOperation", "x") | {"spec": {"type": "Fence", "node": "gpu-17"}}
    assert set(keys_of(fence, bindings)) == {Key("PoolOperation", "llm", "x")}


def test_what_is_not_ours_concerns_nobody(bindings):
    for labels in (None, {}, {"pdpool.dev/role": "prefill"}, {"pdpool.dev/role": "king", "pdpool.dev/pool": "p"}):
        assert not list(keys_of(body("Pod", "x", labels), bindings))


def test_a_binding_is_news_once_and_is_gone_with_its_service(bindings):
    assert not bindings.bind(SERVICE, "p", "d")
    assert bindings.bind(SERVICE, "p", "d2")
    assert bindings.services(DECODE) == []
    bindings.drop(SERVICE)
    assert bindings.services(PREFILL) == []
    assert bindings.pools(SERVICE) == frozenset()


@pytest.mark.parametrize(
    ("owner", "wakes"),
    [
        ("DecodePool/d", {DECODE, SERVICE}),
        ("DisaggregatedService/svc", {SERVICE}),
        ("ReplicaSet/d", set()),
        ("", set()),
    ],
)
@pytest.mark.parametrize("labels", [{}, {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_POOL: "d"}])
def test_child_without_its_labels_wakes_its_owner(bindings, owner, wakes, labels):
    kind, _, name = owner.partition("/")
    child = body("StatefulSet", "d-decode-3", labels)
    if owner:
        child["metadata"]["ownerReferences"] = [{"kind": kind, "name": name, "uid": "u", "controller": True}]
    assert set(keys_of(child, bindings)) == wakes

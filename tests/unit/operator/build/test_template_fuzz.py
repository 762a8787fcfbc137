"""Users may write anything into a field without a schema. It is merged or refused by name, and never causes a crash."""

import copy
import json
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from pdpool_operator.api import names
from pdpool_operator.build.pool import instance_stateful_set
from pdpool_operator.build.template import TemplateInvalid

from tests.unit.operator.plan.makers import SETTINGS, make_pool

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["", "engine", "x", "--port=1", "http"])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(["name", "mountPath", "value", "preStop", "x"]), inner, max_size=2),
    ),
    max_leaves=5,
)


def mostly(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 15).flatmap(lambda dice: strategy if dice else ANYTHING)


def likely(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with some of these fields. Any field, or the whole object, may be of any type."""
    return mostly(st.fixed_dictionaries({}, optional={name: mostly(field) for name, field in fields.items()}))


NAMED = likely(
    name=st.sampled_from(["a", "b", "tmp", "x", "PDPOOL_ROLE", "SGLANG_PLUGINS"]),
    mountPath=st.sampled_from(["/tmp", "/x"]),
)
CONTAINER = likely(
    name=st.just("engine"),
    args=st.lists(st.sampled_from(["--a", "--b=1", "--enable-dp-attention", "--load-balance-method"]), max_size=2),
    env=st.lists(NAMED, max_size=2),
    ports=st.lists(NAMED, max_size=2),
    volumeMounts=st.lists(NAMED, max_size=2),
    lifecycle=likely(postStart=ANYTHING),
    securityContext=likely(runAsUser=ANYTHING),
    image=ANYTHING,
    resources=likely(limits=likely(**{"rdma/ib": SCALARS, "nvidia.com/gpu": SCALARS}), requests=ANYTHING),
)
SPEC = likely(
    containers=st.lists(CONTAINER, max_size=2),
    initContainers=st.lists(NAMED, max_size=2),
    volumes=st.lists(NAMED, max_size=2),
    securityContext=likely(fsGroup=ANYTHING),
    nodeSelector=likely(a=SCALARS),
)
LABELS = likely(a=st.just("b"), c=st.just("d")) | st.dictionaries(st.sampled_from(["pdpool.dev/role"]), SCALARS)
TEMPLATE = st.fixed_dictionaries({}, optional={"metadata": likely(labels=LABELS, annotations=LABELS), "spec": SPEC})


RDMA = {"mode": "Required", "resource": "rdma/ib", "nodeSelector": {"a": "b"}, "networks": ["n"]}
POOLS: tuple[dict[str, Any], ...] = (
    {},
    {"engine": {"type": "SGLang"}, "parallelism": {"data": 2}, "rdma": {**RDMA, "memlock": "Capability"}},
)


def build(template: dict[str, Any], spec: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    try:
        return instance_stateful_set(make_pool(template=template, **spec), 0, SETTINGS), ""
    except TemplateInvalid as refused:
        return None, str(refused)


@settings(max_examples=500, derandomize=True, deadline=None)
@given(TEMPLATE, st.sampled_from(POOLS))
def test_any_template_is_merged_or_refused_by_field(template: dict[str, Any], spec: dict[str, Any]) -> None:
    before = copy.deepcopy(template)
    built, refusal = build(template, spec)
    assert template == before
    if built is None:
        assert refusal.startswith("spec.template")
        return
    json.dumps(built)
    pod = built["spec"]["template"]
    assert pod["spec"]["containers"][0]["name"] == names.ENGINE_CONTAINER
    assert built["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][3] == "drain"

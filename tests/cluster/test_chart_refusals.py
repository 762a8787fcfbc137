"""Bad input: what the API server rejects and with which message, and what the operator reports of the rest."""

import copy
import json
import os
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from dev.shell import CommandError, wait_for
from tests.cluster.stack import CRDS, KINDS, MADE, POOLS, Object, Stack, audited, namespace, now, pool, service

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]

BAD = "stack-bad"
LOOK_S = 20.0
"""Time in seconds over which the operator's calls about an object are counted."""
MOST_LOOKS = 10
"""Limit for the backed-off rate of retries and of the kubelet's changes of a pod. Without back-off, there are hundreds.
"""

# Path below spec, bad value, part of the message that says what would be right.
POOL_FIELDS = [
    ("replicas", -1, "greater than or equal to 0"),
    ("replicas", 257, "less than or equal to 256"),
    ("replicas", "two", "must be of type integer"),
    ("engine.type", "Imaginary", 'supported values: "Reference"'),
    ("engine", "Reference", "must be of type object"),
    ("engine.startupTimeoutSeconds", 9, "greater than or equal to 10"),
    ("model.path", "smollm2", "must be an absolute path"),
    ("model.path", "/models/with space", "must be an absolute path"),
    ("model.path", "//", "must be an absolute path"),
    ("model.path", "/models/..", "whose last part begins with a letter or digit"),
    ("model.path", "", "at least 1"),
    ("model.path", "/" + "x" * 512, "512"),
    ("model.servedName", "-x", "must begin with a letter or digit"),
    ("model.servedName", "org//model", "with a letter or digit after each / and :"),
    ("model.servedName", "", "at least 1"),
    ("model.servedName", "x" * 129, "128"),
    ("model", "tiny", "must be of type object"),
    ("transfer.backend", "Carrier", 'supported values: "NIXL", "Mooncake", "Local"'),
    ("transfer.connector", "Own", 'supported values: "Pdpool", "Native"'),
    ("transfer", 1, "must be of type object"),
    ("parallelism", 2, "must be of type object"),
    ("parallelism.tensor", 0, "greater than or equal to 1"),
    ("parallelism.pipeline", 65, "less than or equal to 64"),
    ("parallelism.data", "two", "must be of type integer"),
    ("rdma", "on", "must be of type object"),
    ("rdma.mode", "Maybe", 'supported values: "Required", "Preferred", "Off"'),
    ("rdma.resource", 1, "must be of type string"),
    ("rdma.count", 0, "greater than or equal to 1"),
    ("rdma.networks", "fast", "must be of type array"),
    ("rdma.nodeSelector", "gpu", "must be of type object"),
    ("rdma.memlock", "All", 'supported values: "NodeLimit", "Capability"'),
    ("rollout", "fast", "must be of type object"),
    ("rollout.surge", "Sometimes", 'supported values: "Auto", "Never"'),
    ("drainTimeoutSeconds", -1, "greater than or equal to 0"),
    ("drainTimeoutSeconds", 3601, "less than or equal to 3600"),
    ("drainTimeoutSeconds", 1.5, "must be of type integer"),
    ("template", "pod", "must be of type object"),
]
SERVICE_FIELDS = [
    ("prefill", None, "Required value"),
    ("decode", None, "Required value"),
    ("prefill", {}, "exactly one of poolRef and selector"),
    ("decode", {}, "exactly one of poolRef and selector"),
    ("prefill.poolRef", "chat", "must be of type object"),
    ("decode.poolRef", "chat", "must be of type object"),
    ("prefill.selector", "app=engine", "must be of type object"),
    ("decode.selector", "app=engine", "must be of type object"),
    ("prefill.engine", "Imaginary", 'supported values: "Reference", "SGLang"'),
    ("decode.engine", "Imaginary", 'supported values: "Reference", "SGLang"'),
    ("prefill.port", 0, "greater than or equal to 1"),
    ("decode.port", 65536, "less than or equal to 65535"),
    ("prefill.connector", "Own", 'supported values: "Pdpool", "Native"'),
    ("decode.connector", "Own", 'supported values: "Pdpool", "Native"'),
    ("prefill.poolRef.name", "", "at least 1"),
    ("prefill.poolRef.name", "A B", "must be names that a pool can have"),
    ("decode.poolRef.name", "a.b", "must be names that a pool can have"),
    ("prefill.poolRef.name", "x" * 41, "40"),
    ("decode.poolRef.name", "", "at least 1"),
    ("decode.poolRef.name", 7, "must be of type string"),
    ("router", "on", "must be of type object"),
    ("router.enabled", "yes", "must be of type boolean"),
    ("router.replicas", 0, "greater than or equal to 1"),
    ("router.replicas", 17, "less than or equal to 16"),
    ("router.port", 0, "greater than or equal to 1"),
    ("router.port", 65536, "less than or equal to 65535"),
    ("router.image", "", "at least 1"),
    ("router.imagePullSecrets", "mine", "must be of type array"),
    ("router.policy", "Random", "must be of type object"),
    ("router.policy.prefill", "Best", 'supported values: "RoundRobin", "Random", "CacheAware"'),
    ("router.policy.decode", "Best", 'supported values: "RoundRobin", "Random", "CacheAware"'),
    ("router.args", "--verbose", "must be of type array"),
    ("router.resources", 1, "must be of type object"),
    ("router.template", "pod", "must be of type object"),
    ("router.service", "NodePort", "must be of type object"),
    ("router.service.type", "ExternalName", 'supported values: "ClusterIP", "NodePort", "LoadBalancer"'),
    ("router.service.annotations", "x", "must be of type object"),
    ("repair", "on", "must be of type object"),
    ("repair.mode", "Always", 'supported values: "Off", "Observe", "Enforce"'),
    ("repair.restartsPerHour", 33, "less than or equal to 32"),
    ("stuckAfterSeconds", 4, "greater than or equal to 5"),
    ("stuckAfterSeconds", 3601, "less than or equal to 3600"),
]
OPERATION_FIELDS = [
    ("type", "Reboot", 'supported values: "Drain", "Restart", "Purge"'),
    ("instance", "chat", "must be the name of an instance or of its pod"),
    ("deadlineSeconds", 0, "greater than or equal to 1"),
    ("deadlineSeconds", 86401, "less than or equal to 86400"),
    ("olderThanSeconds", 86401, "less than or equal to 86400"),
    ("node", "GPU_17", "node must be the name of a node"),
]
CASES = [
    *((kind, *row) for kind in ("PrefillPool", "DecodePool") for row in POOL_FIELDS),
    *(("DisaggregatedService", *row) for row in SERVICE_FIELDS),
    *(("PoolOperation", *row) for row in OPERATION_FIELDS),
]


def good(kind: str) -> Object:
    if kind == "PoolOperation":
        spec = {"type": "Restart", "instance": "chat-decode-0"}
        return {"apiVersion": "pdpool.dev/v1alpha1", "kind": kind, "metadata": {"name": "restart"}, "spec": spec}
    return service() if kind == "DisaggregatedService" else pool(kind, 1)


def with_value(body: Object, path: str, value: object) -> Object:
    """Return the object with the field below spec set, or removed if the value is None."""
    body = copy.deepcopy(body)
    *parents, last = path.split(".")
    place = body["spec"]
    for name in parents:
        place = place.setdefault(name, {})
    if value is None:
        del place[last]
    else:
        place[last] = value
    return body


def refusal(stack: Stack, body: Object) -> str:
    """Return the API server's refusal of the object, empty if it accepts it. Nothing is stored."""
    flags = ("--dry-run=server", "--validate=strict", "-f", "-")
    try:
        stack.kubectl("create", "-n", POOLS, *flags, stdin=json.dumps(body))
    except CommandError as error:
        return str(error).partition("ended with")[2]
    return ""


def fields(schema: Object, path: str = "") -> Iterator[str]:
    """Yield every typed field of a schema, by its path."""
    for name, below in schema.get("properties", {}).items():
        yield f"{path}{name}"
        yield from fields(below, f"{path}{name}.")


def test_every_typed_field_has_a_case(stack: Stack):
    for crd in stack.get("crd", *CRDS)["items"]:
        kind = crd["spec"]["names"]["kind"]
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        assert set(fields(schema)) == {path for one, path, _, _ in CASES if one == kind}, kind


@pytest.mark.parametrize("kind", ["PrefillPool", "DecodePool", "DisaggregatedService", "PoolOperation"])
def test_good_objects_are_taken(stack: Stack, kind):
    body = good(kind)
    body["metadata"]["name"] = "taken"
    assert refusal(stack, body) == ""


@pytest.mark.parametrize(("kind", "path", "value", "right"), CASES)
def test_a_bad_value_is_refused_with_its_field_and_what_would_be_right(stack: Stack, kind, path, value, right):
    words = refusal(stack, with_value(good(kind), path, value))
    assert f"spec.{path}" in words
    assert right in words


@pytest.mark.parametrize("kind", ["PrefillPool", "DecodePool", "DisaggregatedService"])
@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("x" * 41, "metadata.name must be at most 40 characters"),
        ("chat.v1", "metadata.name must begin with a lower-case letter"),
        ("1chat", "metadata.name must begin with a lower-case letter"),
    ],
)
def test_a_bad_name_is_refused(stack: Stack, kind, name, right):
    body = good(kind)
    body["metadata"]["name"] = name
    assert right in refusal(stack, body)


@pytest.mark.parametrize("kind", ["PrefillPool", "DecodePool", "DisaggregatedService"])
def test_a_misspelt_field_is_refused(stack: Stack, kind):
    body = good(kind)
    body["spec"]["replica"] = 1
    assert 'unknown field "spec.replica"' in refusal(stack, body)


@pytest.fixture
def bad(serving: Stack) -> Iterator[Stack]:
    """A namespace for objects that cannot become Ready, beside a working service."""
    serving.apply(namespace(BAD))
    try:
        yield serving
    finally:
        serving.kubectl("delete", KINDS, "--all", "-n", BAD)

        def left() -> str | None:
            pods = serving.look("pod", labels=MADE, within=BAD)["items"]
            return ", ".join(pod["metadata"]["name"] for pod in pods) or None

        wait_for(f"the pods in {BAD} to be gone", left, deadline_s=90)
        serving.kubectl("delete", "namespace", BAD, "--timeout=60s", timeout_s=70)


def with_engine(name: str, **engine: object) -> Object:
    template = {"spec": {"containers": [{"name": "engine", **engine}]}}
    return pool("DecodePool", 1, name, template=template)


def test_what_cannot_come_up_says_why_in_a_condition_and_is_not_tried_without_a_pause(bad: Stack):
    image = "127.0.0.1:5001/no-such-engine:1"
    secret = [{"secretRef": {"name": "no-such-secret"}}]
    bad.apply(
        with_engine("template", resources={"limits": {"cpu": "-1"}}),
        with_engine("flag", args=["--port=1"]),
        with_engine("image", image=image),
        with_engine("secret", envFrom=secret),
        service("lonely"),
        within=BAD,
    )
    # The messages of the API server and of the merge, both with the path of the field.
    told = bad.until("dpool", "Ready", name="template", within=BAD, status="False", reason="TemplateInvalid")
    assert "spec.template.spec.containers[0].resources.limits[cpu]" in told["message"]
    assert "must be greater than or equal to 0" in told["message"]
    told = bad.until("dpool", "Ready", name="flag", within=BAD, status="False", reason="TemplateInvalid")
    assert "spec.template.spec.containers[engine].args" in told["message"]
    assert "--port=1" in told["message"]
    told = bad.until("dpool", "Ready", name="image", within=BAD, status="False", reason="ImagePullFailed")
    assert image in told["message"]
    told = bad.until("dpool", "Ready", name="secret", within=BAD, status="False", reason="MissingSecret")
    assert "no-such-secret" in told["message"]
    told = bad.until("pdsvc", "Ready", name="lonely", within=BAD, status="False", reason="PoolNotFound")
    assert "PrefillPool chat and DecodePool chat" in told["message"]

    began = now()
    time.sleep(LOOK_S)  # the time over which calls are counted
    looks: Counter[tuple[str, str]] = Counter()
    for event in audited(bad):
        reference = event.get("objectRef", {})
        if event["requestReceivedTimestamp"] >= began and reference.get("namespace") == BAD:
            one = (reference.get("resource", ""), reference.get("name", ""))
            # Reads come from a cache. A retry shows as the dry run of a template that was refused.
            looks[one] += event["verb"] in {"get", "patch"} and one[0] != "events"
    assert max(looks.values()) <= MOST_LOOKS, looks
    assert looks.total() > 0, "the operator does not retry: it would not notice a fix"

    # After the fix, it becomes Ready.
    bad.apply(pool("DecodePool", 1, "template"), within=BAD)
    bad.kubectl("create", "secret", "generic", "no-such-secret", "-n", BAD, "--from-literal=A=b")
    for name in ("template", "secret"):
        bad.until("dpool", "Ready", name=name, within=BAD, deadline_s=150, status="True")

"""The installed chart serves: the right tokens over the hand-off, `helm test`, and no leak of secrets."""

import base64
import json
import os
import secrets

import pytest

from dev.shell import wait_for
from tests.cluster.stack import MADE, OURS, POOLS, RELEASE, ROUTER_PORT, SYSTEM, Stack, ask, condition, refused_with
from tests.cluster.stack_traffic import generate

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]


def test_a_service_gets_ready_and_answers_with_the_tokens_of_a_unified_engine(serving: Stack, expected):
    serving.kubectl("wait", "-n", POOLS, "--for=condition=Ready", "pdsvc/chat", "--timeout=30s")
    labels = serving.get("namespace", POOLS)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert [len(serving.pods(role)) for role in ("prefill", "decode", "router")] == [1, 2, 1]
    url = serving.router_url()
    body = {"model": "tiny", "prompt": "to be or not", "max_tokens": 4, "temperature": 0}
    assert ask(f"{url}/v1/completions", body)["usage"]["completion_tokens"] == 4
    assert {prompt: generate(url, prompt) for prompt in expected} == expected


def test_helm_test_asks_for_one_completion(serving: Stack):
    assert "model tiny answered" in serving.helm("test", RELEASE, "--logs", "--timeout", "90s")


def test_engines_and_routers_have_no_kubernetes_token(serving: Stack):
    for pod in serving.pods("prefill", "decode", "router"):
        sources = [s for volume in pod["spec"]["volumes"] for s in volume.get("projected", {}).get("sources", [])]
        assert not any("serviceAccountToken" in source for source in sources), pod["metadata"]["name"]
        mounts = [mount["mountPath"] for c in pod["spec"]["containers"] for mount in c["volumeMounts"]]
        assert not any(path.startswith("/var/run/secrets") for path in mounts), pod["metadata"]["name"]


def test_a_router_that_lost_its_label_is_put_back_into_its_service(serving: Stack):
    name = serving.pods("router")[0]["metadata"]["name"]
    serving.kubectl("label", "pod", "-n", POOLS, name, "pdpool.dev/reachable-")

    def unmet() -> str | None:
        (router,) = serving.pods("router")
        label = router["metadata"]["labels"].get("pdpool.dev/reachable")
        return None if label == "true" else f"the label is {label}"

    wait_for(f"{name} to have its label again", unmet, deadline_s=30)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/workers", None),
        ("POST", "/workers", {"url": "http://127.0.0.1:9", "worker_type": "decode"}),
        ("DELETE", "/workers/x", None),
        ("POST", "/flush_cache", {}),
        ("GET", "/get_loads", None),
    ],
)
def test_control_endpoints_of_routers_need_the_key(serving: Stack, method, path, body):
    (router,) = serving.pods("router")
    url = f"http://{router['status']['podIP']}:{ROUTER_PORT}{path}"
    assert refused_with(url, body, method=method) in (401, 403)
    assert refused_with(url, body, method=method, key="0" * 64) in (401, 403)
    if method == "GET":
        assert refused_with(url, method=method, key=serving.router_key()) == 200


def test_logs_events_and_status_tell_neither_keys_nor_prompts(serving: Stack):
    marker = f"zanzibar-{secrets.token_hex(8)}"
    url = serving.router_url()
    body = {"model": "tiny", "prompt": marker, "max_tokens": 2, "temperature": 0}
    ask(f"{url}/v1/completions", body)
    # A refused request is as secret as an answered one.
    assert refused_with(f"{url}/v1/completions", body | {"max_tokens": -1}) in (400, 422)
    seed = serving.get("secret", f"{RELEASE}-seed", within=SYSTEM)["data"]["seed"]
    hidden = (serving.router_key(), seed, base64.b64decode(seed).decode("latin-1"), marker)
    told = {"operator": serving.operator_log()}
    for pod in serving.pods("prefill", "decode", "router"):
        name = pod["metadata"]["name"]
        told[name] = serving.kubectl("logs", "-n", POOLS, name, "--tail=-1")
    for namespace in (POOLS, SYSTEM):
        told[f"events in {namespace}"] = json.dumps(serving.get("events", within=namespace))
    told["status"] = json.dumps(serving.get("ppool,dpool,pdsvc"))
    told["worker list"] = json.dumps(serving.get("configmaps", "-l", MADE))
    assert told["operator"]
    assert "chat" in told[f"events in {POOLS}"]
    assert [place for place, text in told.items() if any(secret in text for secret in hidden)] == []


def test_pods_of_pools_and_operator_keep_to_the_restricted_profile(serving: Stack):
    namespaces = serving.get("namespaces", "-l", OURS)["items"]
    enforced = {
        ns["metadata"]["name"]: ns["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] for ns in namespaces
    }
    assert enforced == {SYSTEM: "restricted", POOLS: "restricted"}
    operator = serving.get("pods", "-l", "app.kubernetes.io/component=operator", within=SYSTEM)["items"]
    for pod in [*operator, *serving.pods("prefill", "decode", "router")]:
        assert condition(pod, "Ready")["status"] == "True"
        assert all(c["securityContext"]["readOnlyRootFilesystem"] for c in pod["spec"]["containers"])

"""The chart on a real Kubernetes, with real images: installed, tested, upgraded under traffic, uninstalled; and what
the operator really does with the rights that the chart gives it.
"""

import json
import os
import secrets
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.cluster import bringup
from dev.cluster.layout import state_at
from dev.paths import CHECKOUT
from dev.shell import run, wait_for
from dev.tools.build import binary

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(400),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs KUBECONFIG of a cluster: make cluster"),
]

CHART = CHECKOUT / "charts" / "pdpool"
RELEASE = "charttest"
OPERATOR = f"{RELEASE}-pdpool-operator"
KINDS = "prefillpools,decodepools,disaggregatedservices"
POOLS = """
apiVersion: pdpool.dev/v1alpha1
kind: PrefillPool
metadata: {name: chat}
spec: {model: {path: tiny}, drainTimeoutSeconds: 10}
---
apiVersion: pdpool.dev/v1alpha1
kind: DecodePool
metadata: {name: chat}
spec: {model: {path: tiny}, drainTimeoutSeconds: 10}
---
apiVersion: pdpool.dev/v1alpha1
kind: DisaggregatedService
metadata: {name: chat}
spec: {prefill: {poolRef: {name: chat}}, decode: {poolRef: {name: chat}}}
"""


class Cluster:
    """One release of the chart in namespaces of its own, with two pools of the tiny model."""

    def __init__(self) -> None:
        name = f"chart-{secrets.token_hex(3)}"
        self.system, self.pools = f"{name}-system", name

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        return run(binary("kubectl"), *arguments, stdin=stdin, timeout_s=timeout_s)

    def helm(self, *arguments: str, stdin: str | None = None) -> str:
        return run(binary("helm"), *arguments, "--namespace", self.system, stdin=stdin, timeout_s=240)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "-n", self.pools, "-o", "json"))

    def install(self, chart: Path = CHART, **operator: Any) -> None:
        values = {
            "image": {"registry": "localhost", "tag": "dev"},
            "watchNamespaces": [self.pools],
            "operator": operator,
            "test": {"router": {"service": "chat-router", "namespace": self.pools}},
        }
        # The operator's tests may have put the CRDs there before.
        flags = ("--install", "--take-ownership", "--wait", "--timeout", "3m", "--values", "-")
        self.helm("upgrade", RELEASE, str(chart), *flags, stdin=yaml.safe_dump(values))

    def await_ready(self, condition: str = "Ready") -> None:
        self.kubectl(
            *("wait", f"--for=condition={condition}", "pdsvc/chat", "-n", self.pools, "--timeout=150s"), timeout_s=160
        )

    def engine_uids(self) -> dict[str, str]:
        pods = self.get("pods", "-l", "app.kubernetes.io/managed-by=pdpool")["items"]
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}

    def ask(self) -> str:
        address = self.get("service", "chat-router")["spec"]["clusterIP"]
        return complete(f"http://{address}:8000")

    def set_up(self) -> None:
        for name in (self.system, self.pools):
            self.kubectl("create", "namespace", name)
            self.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        self.install()
        self.kubectl("apply", "-n", self.pools, "-f", "-", stdin=POOLS)
        self.await_ready()

    def tear_down(self) -> None:
        self.kubectl("delete", KINDS, "--all", "-n", self.pools, "--ignore-not-found")
        self.helm("uninstall", RELEASE, "--ignore-not-found", "--wait")
        self.kubectl("delete", "namespace", self.system, self.pools, "--wait=false")


def complete(url: str) -> str:
    body = json.dumps({"model": "tiny", "prompt": "to be or not", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


class Traffic:
    """Asks the router without a pause while the block runs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[str] = []
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(complete(self.url))
            except (OSError, ValueError, LookupError) as error:
                self.errors.append(repr(error))

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(90)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    one = Cluster()
    try:
        one.set_up()
        yield one
    finally:
        one.tear_down()


def test_helm_test_gets_one_completion_through_the_router(cluster: Cluster) -> None:
    assert "model tiny answered" in cluster.helm("test", RELEASE, "--logs", "--timeout", "2m")


def test_engines_and_router_have_no_kubernetes_token(cluster: Cluster) -> None:
    pods = cluster.get("pods", "-l", "app.kubernetes.io/managed-by=pdpool")["items"]
    assert {pod["metadata"]["labels"]["pdpool.dev/role"] for pod in pods} == {"prefill", "decode", "router"}
    for pod in pods:
        assert not any("serviceAccountToken" in json.dumps(volume) for volume in pod["spec"]["volumes"])


def test_upgrade_changes_crds_and_operator_but_restarts_no_engine_under_traffic(
    cluster: Cluster, tmp_path: Path
) -> None:
    chart = tmp_path / "pdpool"
    shutil.copytree(CHART, chart)
    path = chart / "files" / "crds" / "pdpool.dev_prefillpools.yaml"
    crd = yaml.safe_load(path.read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"]["properties"]["newField"] = {"type": "string", "maxLength": 16}
    path.write_text(yaml.safe_dump(crd, sort_keys=False))
    before = cluster.engine_uids()
    address = cluster.get("service", "chat-router")["spec"]["clusterIP"]
    with Traffic(f"http://{address}:8000") as traffic:
        wait_for("the first answer", lambda: None if traffic.answers else "none", deadline_s=30)
        cluster.install(chart, logLevel="debug")
        patch = json.dumps({"spec": {"newField": "kept"}})
        cluster.kubectl("patch", "prefillpool", "chat", "-n", cluster.pools, "--type=merge", "-p", patch)
        assert cluster.get("prefillpool", "chat")["spec"]["newField"] == "kept"
        cluster.await_ready()
        seen = len(traffic.answers)
        wait_for("five more answers", lambda: None if len(traffic.answers) > seen + 5 else "not yet", deadline_s=60)
    assert traffic.errors == []
    assert len(set(traffic.answers)) == 1
    assert cluster.engine_uids() == before


def test_operator_uses_every_verb_that_the_chart_grants_and_misses_none(cluster: Cluster) -> None:
    def patch(kind: str, spec: dict[str, Any]) -> None:
        body = json.dumps({"spec": spec})
        cluster.kubectl("patch", kind, "chat", "-n", cluster.pools, "--type=merge", "-p", body)

    def gone(what: str) -> None:
        def there() -> str | None:
            found = cluster.kubectl("get", what, "-n", cluster.pools, "--ignore-not-found", "-o", "name")
            return found.strip() or None

        wait_for(f"{what} to be gone", there, deadline_s=90)

    # An instance more and less, an instance replaced, a router taken away and brought back.
    cluster.kubectl("scale", "dpool/chat", "-n", cluster.pools, "--replicas=2")
    wait_for(
        "a second decode engine", lambda: None if "chat-decode-1-0" in cluster.engine_uids() else "none", deadline_s=60
    )
    cluster.kubectl("scale", "dpool/chat", "-n", cluster.pools, "--replicas=1")
    gone("statefulset/chat-decode-1")
    old = cluster.engine_uids()["chat-prefill-0-0"]
    patch("ppool", {"drainTimeoutSeconds": 11})
    wait_for(
        "a new prefill engine",
        lambda: "the old one" if cluster.engine_uids().get("chat-prefill-0-0", old) == old else None,
        deadline_s=90,
    )
    patch("pdsvc", {"router": {"enabled": False}})
    for what in ("deployment", "service", "poddisruptionbudget", "configmap"):
        gone(f"{what}/chat-router")
    gone("secret/chat-router-key")
    patch("pdsvc", {"router": {"enabled": True}})
    cluster.await_ready()

    granted, used, refused = granted_verbs(), set(), []
    for verb, code, event in audited(f"system:serviceaccount:{cluster.system}:{OPERATOR}"):
        reference = event["objectRef"]
        resource = "/".join(filter(None, (reference["resource"], reference.get("subresource"))))
        group = reference.get("apiGroup", "")
        used.add((group, resource, verb))
        if verb == "patch" and code == 201:
            # Server-side apply of an object that is not there needs both.
            used.add((group, resource, "create"))
        if code == 403:
            refused.append((event["requestURI"], verb))
    assert refused == []
    assert granted - used == set(), "granted, and never used"
    assert used - granted == set()


def granted_verbs() -> set[tuple[str, str, str]]:
    table = yaml.safe_load((CHART / "files" / "rbac.yaml").read_text())
    return {
        (group, resource, verb)
        for rules in table.values()
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def audited(user: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Verb, status and event of every request of a user on a resource."""
    status = bringup.status(state_at(None))
    if status is None:
        pytest.skip("not the local cluster: it has no audit log that can be read here")
    with Path(status["audit_log"]).open() as lines:
        for line in lines:
            if user not in line:
                continue
            event = json.loads(line)
            whose = event["user"]["username"] == user and event["stage"] != "RequestReceived"
            if whose and event.get("objectRef", {}).get("resource"):
                yield event["verb"], event["responseStatus"]["code"], event


def test_uninstall_leaves_pools_serving_and_the_next_installation_takes_them_over(cluster: Cluster) -> None:
    def key() -> str:
        return str(cluster.get("secret", "chat-router-key")["data"]["key"])

    cluster.await_ready()
    before, key_before = cluster.engine_uids(), key()
    cluster.helm("uninstall", RELEASE, "--wait")
    assert cluster.ask()
    assert cluster.engine_uids() == before
    cluster.install()
    # Ready is older than the new operator; what it writes next shows that it has taken over.
    cluster.kubectl("scale", "dpool/chat", "-n", cluster.pools, "--replicas=2")
    wait_for(
        "the new operator to act",
        lambda: None if "chat-decode-1-0" in cluster.engine_uids() else "no second decode engine",
        deadline_s=60,
    )
    cluster.await_ready()
    assert {name: uid for name, uid in cluster.engine_uids().items() if name in before} == before
    assert key() == key_before
    assert cluster.ask()

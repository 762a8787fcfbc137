"""The local cluster is a real one: pods run on both nodes, reach each other and find Services by name."""

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from dev.cluster import supervise
from dev.cluster.bringup import kubectl, status
from dev.cluster.layout import NODES, State, state_at
from dev.images.build import IMAGES, build
from dev.images.load import load
from dev.paths import CHECKOUT
from dev.shell import Clock, wait_for
from tests.cluster.stack import audit_lines

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

Pods = tuple[str, list[dict]]
ACCOUNT = "echo"

# Answers every request with the name of the pod and the address of the client.
SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{os.uname().nodename} {self.client_address[0]}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
"""
FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"


@pytest.fixture(scope="module")
def state() -> State:
    return state_at(None)


@pytest.fixture(scope="module")
def pods(state: State) -> Iterator[Pods]:
    """A namespace that enforces the restricted profile, with one server on each node and a Service over both."""
    clock = Clock("test")
    # Any image with Python works.
    build("prometheus", clock)
    load("prometheus", state, clock)
    namespace = f"cluster-tool-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    things = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}]
    # An account of its own: a new namespace gets its default account only after some time.
    account = {"name": ACCOUNT, "namespace": namespace}
    things.append({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    things += [_pod(namespace, node.name, IMAGES["prometheus"].tag) for node in NODES]
    things.append(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "echo", "namespace": namespace},
            "spec": {"selector": {"app": "echo"}, "ports": [{"port": 80, "targetPort": 8080}]},
        }
    )
    try:
        kubectl(state, "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": things}))
        kubectl(
            state,
            "-n",
            namespace,
            "wait",
            "--request-timeout=0",
            "--for=condition=Ready",
            "pod",
            "--all",
            "--timeout=90s",
        )
        found = json.loads(kubectl(state, "-n", namespace, "get", "pods", "-o", "json"))["items"]
        yield namespace, found
    finally:
        kubectl(state, "delete", "namespace", namespace, "--wait=false")


def _pod(namespace: str, node: str, image: str) -> dict:
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"echo-{node}", "namespace": namespace, "labels": {"app": "echo"}},
        "spec": {
            "nodeName": node,
            "serviceAccountName": ACCOUNT,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "echo",
                    "image": image,
                    "imagePullPolicy": "Never",
                    "command": ["python3", "-c", SERVER],
                    "securityContext": restricted,
                    "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
                }
            ],
        },
    }


def _fetch(state: State, namespace: str, pod: str, url: str) -> str:
    return kubectl(state, "-n", namespace, "exec", pod, "--", "python3", "-c", FETCH, url).strip()


def test_status_says_ready_and_every_process_runs(state: State) -> None:
    found = status(state)
    assert found is not None
    assert found["reason"] is None
    assert set(found["processes"].values()) == {"RUNNING"}


def test_pods_of_different_nodes_reach_each_other_by_their_own_addresses(state: State, pods: Pods) -> None:
    namespace, found = pods
    for source, target in ((found[0], found[1]), (found[1], found[0])):
        address = target["status"]["podIP"]
        answer = _fetch(state, namespace, source["metadata"]["name"], f"http://{address}:8080/")
        assert answer == f"{target['metadata']['name']} {source['status']['podIP']}"


def test_a_service_spreads_requests_by_name_over_the_pods_of_both_nodes(state: State, pods: Pods) -> None:
    namespace, found = pods
    names = {p["metadata"]["name"] for p in found}
    answering: set[str] = set()
    end = time.monotonic() + 60
    while answering != names and time.monotonic() < end:
        for url in ("http://echo/", f"http://echo.{namespace}.svc.cluster.local/"):
            answering.add(_fetch(state, namespace, found[0]["metadata"]["name"], url).split()[0])
    assert answering == names


def test_a_pod_reaches_the_api_server_through_its_service(state: State, pods: Pods) -> None:
    namespace, found = pods
    script = (
        "import socket, ssl; "
        "c = ssl.create_default_context(cafile='/var/run/secrets/kubernetes.io/serviceaccount/ca.crt'); "
        "name = 'kubernetes.default.svc'; "
        "print(c.wrap_socket(socket.create_connection((name, 443), 5), server_hostname=name).version())"
    )
    answer = kubectl(state, "-n", namespace, "exec", found[0]["metadata"]["name"], "--", "python3", "-c", script)
    assert answer.strip() == "TLSv1.3"


def test_nothing_of_a_pod_leaves_the_machine(state: State, pods: Pods) -> None:
    namespace, found = pods
    # TEST-NET-3: documentation addresses without hosts. The packet must not leave the machine.
    script = (
        "import socket; s = socket.socket(); s.settimeout(1)\n"
        "try: s.connect(('203.0.113.1', 80)); print('connected')\n"
        "except OSError as error: print(type(error).__name__)"
    )
    before = _dropped()
    answer = kubectl(state, "-n", namespace, "exec", found[0]["metadata"]["name"], "--", "python3", "-c", script)
    assert answer.strip() != "connected"
    assert _dropped() > before


def _dropped() -> int:
    listing = subprocess.run(["iptables", "-w", "-nvxL", "PDPOOL-FORWARD"], check=True, capture_output=True, text=True)
    return sum(int(line.split()[0]) for line in listing.stdout.splitlines() if " DROP " in line)


def test_audit_log_names_the_requests_of_this_test(state: State, pods: Pods) -> None:
    namespace, _ = pods
    events = [json.loads(line) for line in audit_lines(state.audit_log) if namespace in line]
    verbs = {e["verb"] for e in events if e.get("objectRef", {}).get("name") == namespace}
    assert "create" in verbs


@pytest.fixture
def two_simulated_nodes(state: State) -> Iterator[None]:
    found = status(state)
    assert found is not None
    before = found["simulated_nodes"]
    _up("--kwok-nodes", "2")
    yield
    _up("--kwok-nodes", str(before))


def test_scheduler_hands_out_the_accelerators_of_simulated_nodes(
    state: State, pods: Pods, two_simulated_nodes: None
) -> None:
    namespace, _ = pods
    # Each takes all eight accelerators of a node. Two fit, the third must wait.
    things = [_accelerated_pod(namespace, f"accelerated-{number}") for number in range(3)]
    kubectl(state, "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": things}))

    def unmet() -> str | None:
        items = json.loads(kubectl(state, "-n", namespace, "get", "pods", "-l", "app=accelerated", "-o", "json"))[
            "items"
        ]
        running = {p["spec"].get("nodeName") for p in items if p["status"]["phase"] == "Running"}
        refused = [c for p in items for c in p["status"].get("conditions", []) if c.get("reason") == "Unschedulable"]
        if running == {"sim-0", "sim-1"} and len(refused) == 1 and "nvidia.com/gpu" in refused[0]["message"]:
            return None
        return f"running on {running}, refused {refused}"

    wait_for("two of three pods are placed", unmet, deadline_s=60)
    kubectl(state, "-n", namespace, "delete", "pods", "-l", "app=accelerated", "--wait=true", "--request-timeout=60s")


def _accelerated_pod(namespace: str, name: str) -> dict:
    pod = _pod(namespace, "", IMAGES["prometheus"].tag)
    pod["metadata"] = {"name": name, "namespace": namespace, "labels": {"app": "accelerated"}}
    del pod["spec"]["nodeName"]
    pod["spec"]["nodeSelector"] = {"type": "kwok"}
    pod["spec"]["tolerations"] = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "8", "rdma/ib": "8"}}
    return pod


def test_up_again_restarts_nothing(state: State) -> None:
    before = _process_ids(state)
    assert all(before.values()), before
    assert "are running already" in _up()
    assert _process_ids(state) == before


def _up(*arguments: str) -> str:
    command = [sys.executable, "-m", "dev.cluster", "up", *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=180, check=True).stdout


def _process_ids(state: State) -> dict[str, int | None]:
    """Return the ids of supervisord and its programs only. Programs run short-lived children, as the proxy does
    iptables.
    """
    return {"supervisord": supervise.process_id(state), **supervise.process_ids(state)}

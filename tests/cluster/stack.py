"""Base of the tests of the whole stack: the chart's release with the real images, on the local cluster.

It also has one service of the tiny model in its own namespace. Pods and Services of the local cluster are reachable
directly.
"""

import contextlib
import itertools
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import ApiClient
from kubernetes.config import new_client_from_config

from dev.paths import CHECKOUT
from dev.shell import CommandError, run, wait_for
from dev.tools.build import binary

CHART = CHECKOUT / "charts" / "pdpool"
RELEASE, OPERATOR = "pdpool", "pdpool-operator"
SYSTEM, POOLS = "stack-system", "stack-pools"
OURS = "pdpool.dev/stack-tests"
"""Label of the namespaces that these tests created, and may therefore remove."""
KINDS = "prefillpools,decodepools,disaggregatedservices,pooloperations"
CRDS = tuple(f"{kind}.pdpool.dev" for kind in KINDS.split(","))
POOL_KINDS = ("PrefillPool", "DecodePool")
PATHS = {
    "pod": ("api/v1", "pods"),
    "event": ("apis/events.k8s.io/v1", "events"),
    "statefulset": ("apis/apps/v1", "statefulsets"),
    "ppool": ("apis/pdpool.dev/v1alpha1", "prefillpools"),
    "dpool": ("apis/pdpool.dev/v1alpha1", "decodepools"),
    "pdsvc": ("apis/pdpool.dev/v1alpha1", "disaggregatedservices"),
}
"""API paths of the kinds that tests read many times a second."""
DRAIN_S = 20
ADMIN_PORT, HTTP_PORT, ROUTER_PORT = 9400, 30000, 8000
MADE = "app.kubernetes.io/managed-by=pdpool"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted", OURS: ""}

Object = dict[str, Any]


def pool(kind: str, replicas: int, name: str = "chat", **spec: Any) -> Object:
    """Return a pool of the tiny model whose instances keep their numbers in an update."""
    spec = {"replicas": replicas, "model": {"path": "tiny"}, "rollout": {"surge": "Never"}, **spec}
    return {"apiVersion": "pdpool.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def service(name: str = "chat", **spec: Any) -> Object:
    """Return a service over the pools `chat`."""
    refs = {side: {"poolRef": {"name": "chat"}} for side in ("prefill", "decode")}
    body = {"apiVersion": "pdpool.dev/v1alpha1", "kind": "DisaggregatedService", "metadata": {"name": name}}
    return body | {"spec": refs | spec}


def namespace(name: str) -> Object:
    """Return a namespace of these tests, under the restricted profile."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}


def now() -> str:
    """Return the time in the format of the audit log."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def ask(url: str, body: Object | None = None, *, method: str = "", key: str = "", timeout_s: float = 60.0) -> Any:
    """Send one HTTP request and return the decoded answer.

    Raises urllib.error.HTTPError for 4xx and 5xx, OSError if there is no answer.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method or None)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def refused_with(url: str, body: Object | None = None, *, method: str = "", key: str = "") -> int:
    """Return the status with which a request is refused; 200 if it is not."""
    try:
        ask(url, body, method=method, key=key)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def condition(body: Object, type_: str) -> Object:
    """Return one condition of an object. Empty if it has none of that type."""
    found = (c for c in body.get("status", {}).get("conditions", []) if c["type"] == type_)
    return next(found, {})


class Stack:
    """The release, and access to the cluster."""

    def __init__(self, cluster: Object) -> None:
        """Store the result of `python -m dev.cluster status --json`."""
        self.audit_log = Path(cluster["audit_log"])
        self.nodes = {node["name"]: node["containerd"] for node in cluster["nodes"]}
        """containerd's socket of each node."""
        self._ctr = Path(cluster["bin"]) / "ctr"
        # The client reads the variable only when it is imported.
        self._api: ApiClient = new_client_from_config(os.environ.get("KUBECONFIG"))  # type: ignore[no-untyped-call]
        self.began = now()
        self.uninstalls: list[tuple[str, str]] = []
        """Start and end of each `helm uninstall`."""

    # ------------------------------------------------------------------ tools

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60.0) -> str:
        return run(binary("kubectl"), *arguments, stdin=stdin, timeout_s=timeout_s)

    def helm(self, *arguments: str, stdin: str | None = None) -> str:
        return run(binary("helm"), *arguments, "--namespace", SYSTEM, stdin=stdin, timeout_s=200)

    def ctr(self, node: str, *arguments: str) -> str:
        return run(self._ctr, "--address", self.nodes[node], "--namespace", "k8s.io", *arguments)

    def get(self, kind: str, *arguments: str, within: str = POOLS) -> Any:
        return json.loads(self.kubectl("get", kind, *arguments, "-n", within, "-o", "json"))

    def versions(self, kind: str, name: str, since: str, *, for_s: int) -> Iterator[Object]:
        """Yield every version of an object of a kind in `PATHS` that follows `since`, as soon as it is there.

        Args:
            kind: Short name.
            name: Of the object in the namespace `POOLS`.
            since: A `resourceVersion`.
            for_s: Duration, in seconds.

        Raises:
            CommandError: the API server answers with an error, for example because `since` is too old.
        """
        group, plural = PATHS[kind]
        fields = {"fieldSelector": f"metadata.name={name}", "watch": "1", "resourceVersion": since}
        query = urllib.parse.urlencode(fields | {"timeoutSeconds": str(for_s)})
        url = f"{self._api.configuration.host}/{group}/namespaces/{POOLS}/{plural}?{query}"
        answer = self._api.call_api("GET", url, _request_timeout=for_s + 5.0)
        with contextlib.closing(answer.response):
            for line in answer.response:
                event = json.loads(line)
                if event.get("type") not in {"ADDED", "MODIFIED", "DELETED"}:
                    raise CommandError(f"watch of {kind} {name}: {event}"[:300])
                yield event["object"]

    def look(self, kind: str, name: str = "", *, labels: str = "", within: str = POOLS, timeout_s: float = 60.0) -> Any:
        """Return the same as `get`, for a kind in `PATHS`, directly from the API server. Each kubectl costs a process.

        Raises:
            CommandError: the API server answers with an error.
        """
        group, plural = PATHS[kind]
        query = urllib.parse.urlencode({"labelSelector": labels} if labels else {})
        path = f"{group}/namespaces/{within}/{plural}{name and '/' + name}?{query}"
        answer = self._api.call_api("GET", f"{self._api.configuration.host}/{path}", _request_timeout=timeout_s)
        body = json.loads(answer.read())  # type: ignore[no-untyped-call]
        if answer.status != 200:
            raise CommandError(f"GET {path}: {answer.status} {body.get('message')}")
        return body

    def apply(self, *objects: Object, within: str = POOLS) -> None:
        text = yaml.safe_dump_all(objects)
        flags = ("--server-side", "--force-conflicts", "--field-manager=stack-tests")
        self.kubectl("apply", "-n", within, *flags, "-f", "-", stdin=text)

    def patch(self, kind: str, spec: Object, name: str = "chat") -> None:
        self.kubectl("patch", kind, name, "-n", POOLS, "--type=merge", "-p", json.dumps({"spec": spec}))

    def until(
        self,
        kind: str,
        type_: str,
        *,
        name: str = "chat",
        within: str = POOLS,
        deadline_s: float = 120.0,
        **wanted: str,
    ) -> Object:
        """Wait until a condition has these fields and belongs to the newest spec. Return it."""
        found: Object = {}

        def unmet() -> str | None:
            body = self.look(kind, name, within=within)
            found.clear()
            found.update(condition(body, type_))
            same = all(found.get(key) == value for key, value in wanted.items())
            return None if same and found.get("observedGeneration") == body["metadata"]["generation"] else str(found)

        words = ", ".join(f"{key} {value}" for key, value in wanted.items())
        wait_for(f"{type_} of {kind}/{name} with {words}", unmet, deadline_s=deadline_s)
        return found

    # ------------------------------------------------------------------ release

    def install(self, chart: Path = CHART, *flags: str, **values: Any) -> None:
        """Install the release, or upgrade it to exactly these values."""
        whole = {
            "image": {"registry": "localhost", "tag": "dev"},
            "test": {"router": {"service": "chat-router", "namespace": POOLS}},
        } | values
        wait = ("--install", "--wait", "--timeout", "2m", "--values", "-")
        self.helm("upgrade", RELEASE, str(chart), *wait, *flags, stdin=yaml.safe_dump(whole))

    def uninstall(self) -> None:
        began = now()
        self.helm("uninstall", RELEASE, "--wait", "--timeout", "2m", "--ignore-not-found")
        wait_for("the operator's pods to be gone", self._operator_pods, deadline_s=60)
        self.uninstalls.append((began, now()))

    def scale_operator(self, replicas: int) -> None:
        """Scale the operator, and return when it has that number of pods."""
        self.kubectl("scale", f"deployment/{OPERATOR}", "-n", SYSTEM, f"--replicas={replicas}")
        if replicas:
            self.kubectl("rollout", "status", f"deployment/{OPERATOR}", "-n", SYSTEM, "--timeout=60s", timeout_s=70)
        else:
            wait_for("the operator's pods to be gone", self._operator_pods, deadline_s=60)

    def operator_log(self) -> str:
        return self.kubectl("logs", "-n", SYSTEM, f"deployment/{OPERATOR}", "--tail=-1")

    def _operator_pods(self) -> str | None:
        pods = self.look("pod", labels="app.kubernetes.io/component=operator", within=SYSTEM)["items"]
        return ", ".join(pod["metadata"]["name"] for pod in pods) or None

    # ------------------------------------------------------------------ the service

    def serve(self, *, prefill: int = 1, decode: int = 2, routers: int = 1) -> None:
        """Give the service these numbers of pods, Ready and idle."""
        pools = [
            pool(kind, n, drainTimeoutSeconds=DRAIN_S) for kind, n in zip(POOL_KINDS, (prefill, decode), strict=True)
        ]
        self.apply(*pools, service(router={"replicas": routers}))
        self.settle()

    def settle(self, deadline_s: float = 150.0) -> None:
        """Wait until both pools and the service are Ready."""
        for kind in ("ppool", "dpool", "pdsvc"):
            self.until(kind, "Ready", deadline_s=deadline_s, status="True")

    def pods(self, *roles: str, within: str = POOLS) -> list[Object]:
        """Return the pods of these roles that do not terminate, by name."""
        found = self.look("pod", labels=f"{MADE},pdpool.dev/role in ({','.join(roles)})", within=within)["items"]
        living = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(living, key=lambda pod: pod["metadata"]["name"])

    def uids(self) -> dict[str, str]:
        """Return the UID of each pod that the operator created."""
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.pods("prefill", "decode", "router")}

    def engine_urls(self) -> set[str]:
        """Return the URLs of the engines that are Ready."""
        ready = [pod for pod in self.pods("prefill", "decode") if condition(pod, "Ready").get("status") == "True"]
        return {f"http://{pod['status']['podIP']}:{HTTP_PORT}" for pod in ready}

    def router_url(self) -> str:
        """Return the base URL of the router's Service."""
        return f"http://{self.get('service', 'chat-router')['spec']['clusterIP']}:{ROUTER_PORT}"

    def router_key(self) -> str:
        template = '-o=go-template={{index .data "router-1.key" | base64decode}}'
        return self.kubectl("get", "secret", "pdpool-keys", "-n", POOLS, template)

    def lists(self, key: str) -> dict[str, set[str]]:
        """Return the URLs in the worker list of each router pod that is Ready, by pod."""
        ready = [pod for pod in self.pods("router") if condition(pod, "Ready").get("status") == "True"]
        return {pod["metadata"]["name"]: listed(pod["status"]["podIP"], key) for pod in ready}

    def until_listed(self, routers: int, deadline_s: float = 90.0) -> None:
        """Wait until this number of routers lists exactly the engines that are Ready."""
        key = self.router_key()

        def unmet() -> str | None:
            lists, engines = self.lists(key), self.engine_urls()
            right = len(lists) == routers and all(urls == engines for urls in lists.values())
            return None if right else f"{lists} beside the engines {engines}"

        wait_for(f"{routers} routers to list the engines that are Ready", unmet, deadline_s=deadline_s)

    def queues_left(self) -> str | None:
        """Return the requests left in the engines' queues, as text; None if all queues are empty."""
        return self._left(held=False)

    def work_left(self) -> str | None:
        """Return the requests left in the engines' queues and their holds, as text; None if there are none."""
        return self._left(held=True)

    def _left(self, *, held: bool) -> str | None:
        left = []
        for pod in self.pods("prefill", "decode"):
            try:
                state = ask(f"http://{pod['status']['podIP']}:{ADMIN_PORT}/v1/state", timeout_s=5)
            except OSError as error:
                left.append(f"{pod['metadata']['name']}: {error}")
                continue
            work = {name: queue["reqs"] for name, queue in state["queues"].items()}
            work |= {"held": state["holds"]} if held else {}
            if any(work.values()):
                left.append(f"{pod['metadata']['name']}: {work}")
        return "; ".join(left) or None

    # ------------------------------------------------------------------ after a failure

    def report(self) -> str:
        """Return the output of the first commands that a person would run."""
        conditions = (
            "-o=jsonpath={range .items[*]}{.metadata.namespace}/{.kind}/{.metadata.name}{'\\n'}"
            "{range .status.conditions[*]}  {.type}={.status} {.reason}: {.message}{'\\n'}{end}{end}"
        )
        looks: tuple[tuple[str, ...], ...] = (
            ("get", "pods", "-A", "-o", "wide"),
            ("get", KINDS, "-A", conditions),
            ("get", "events", "-n", POOLS, "--sort-by=.metadata.creationTimestamp"),
            ("logs", "-n", SYSTEM, f"deployment/{OPERATOR}", "--tail=40"),
        )
        return "\n".join(f"$ kubectl {' '.join(look)}\n{self._tail(look)}" for look in looks)

    def _tail(self, look: tuple[str, ...], lines: int = 40) -> str:
        try:
            found = self.kubectl(*look)
        except CommandError as error:
            found = str(error)
        return "\n".join(found.rstrip().splitlines()[-lines:])


def listed(router_ip: str, key: str) -> set[str]:
    """Return the URLs in the worker list of one router."""
    return {worker["url"] for worker in ask(f"http://{router_ip}:{ROUTER_PORT}/workers", key=key)["workers"]}


def audit_lines(log: Path) -> Iterator[str]:
    """Yield the complete lines of the audit log. Its last line may be incomplete."""
    # A log that has grown too long continues under the same name. Its old part is beside it.
    for file in sorted(log.parent.glob(f"{log.stem}*{log.suffix}")):
        with file.open() as lines:
            yield from itertools.takewhile(lambda line: line.endswith("\n"), lines)


def audited(stack: Stack) -> Iterator[Object]:
    """Yield the API requests of the release's operator in this session."""
    user = f"system:serviceaccount:{SYSTEM}:{OPERATOR}"
    for line in audit_lines(stack.audit_log):
        if user in line:
            event = json.loads(line)
            if event["user"]["username"] == user and event["requestReceivedTimestamp"] >= stack.began:
                yield event

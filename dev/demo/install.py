"""Installs everything, from an empty cluster to Ready pools."""

import json
import time
from typing import Any

import yaml

from dev.demo.engine import DemoEngine
from dev.demo.screen import DemoError, Screen
from dev.demo.target import Images, Target
from dev.paths import CHECKOUT
from dev.prometheus import deploy
from dev.shell import CommandError

SYSTEM, POOLS = "pdpool-system", "llm"
NAMESPACES = (SYSTEM, POOLS, deploy.NAMESPACE)
OURS = "pdpool.dev/demo"
"""Label of the namespaces that the demo created. Only these may be emptied and removed."""
RELEASE = "pdpool"
SERVICE = "chat"
SEEN_S = 45.0
"""Time within which the operator samples the queues of new engines."""
GONE_S = 180.0
RULES_S = 150.0
"""Time within which a changed ConfigMap reaches a running pod, and Prometheus reads it."""

# Short, so that the story does not take minutes: Prometheus scrapes every 3 s here. The chart's defaults suit real
# pools.
WINDOWS = {"noProgress": "12s", "bootstrapQueueStuck": "15s", "instanceUnknown": "30s"}
STUCK_AFTER_S = 20
TAKE = "--take-ownership"
MADE_KINDS = "pods,statefulsets,deployments,services,configmaps,networkpolicies,poddisruptionbudgets"
"""Without Secrets: that of the namespace, with the keys, outlives the pools."""


def namespaces(screen: Screen, target: Target) -> None:
    """Create the namespaces, all under the `restricted` pod security profile.

    Raises:
        DemoError: a namespace exists that no demo created.
    """
    for namespace in target.get("namespaces")["items"]:
        name = namespace["metadata"]["name"]
        if name in NAMESPACES and OURS not in namespace["metadata"]["labels"]:
            raise DemoError(f"namespace {name} exists and no demo created it (no label {OURS}): it stays unchanged")
    screen.say(f"namespaces {', '.join(NAMESPACES)}, each enforcing the restricted pod security profile")
    labels = {"pod-security.kubernetes.io/enforce": "restricted", OURS: ""}
    documents = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}} for name in NAMESPACES
    ]
    target.kubectl(
        *("apply", "--server-side", "--field-manager=pdpool-demo", "-f", "-"), stdin=yaml.safe_dump_all(documents)
    )


def helm_values(images: Images) -> dict[str, Any]:
    """Return the values that the demo sets."""
    return {
        "image": {"registry": images.registry, "tag": images.tag},
        # A rebuilt image may have the same tag. This annotation then makes a new pod.
        "operator": {"podAnnotations": {"pdpool.dev/images": images.fingerprint}},
        "rules": {"configMap": {"namespace": deploy.NAMESPACE}, "windows": WINDOWS},
        "test": {"router": {"service": f"{SERVICE}-router", "namespace": POOLS}},
    }


def operator(screen: Screen, target: Target, images: Images) -> None:
    """Install or upgrade the chart, and wait until the operator is ready."""
    values = yaml.safe_dump(helm_values(images), sort_keys=False)
    _settle_interrupted(screen, target)
    chart = str(CHECKOUT / "charts" / "pdpool")
    flags = ["--namespace", SYSTEM, "--wait", "--timeout", "3m", "--values", "-"]
    if TAKE in target.helm("upgrade", "--help"):
        # CRDs outlive a release, and carry the name of the release that created them (of the cluster tests, for
        # example).
        flags.insert(0, TAKE)
    screen.command(f"helm upgrade --install {RELEASE} charts/pdpool {' '.join(flags)} <<EOF")
    screen.block(values + "EOF")
    with screen.ticking(lambda: "helm waits for the operator to be Ready"):
        target.helm("upgrade", "--install", RELEASE, chart, *flags, stdin=values)
    screen.block(target.kubectl("get", "deployment", "-n", SYSTEM))


def _settle_interrupted(screen: Screen, target: Target) -> None:
    """Remove a release that an interrupted helm left pending, because helm refuses to change it."""
    releases = json.loads(target.helm("list", "--all", "--namespace", SYSTEM, "--output", "json"))
    for release in releases:
        if release["name"] == RELEASE and release["status"].startswith(("pending", "uninstalling")):
            screen.say(f"an interrupted run left the release {release['status']}: removing it (CRDs stay)")
            with screen.ticking(lambda: "helm waits until its objects are deleted"):
                target.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait")


def prometheus(screen: Screen, target: Target, images: Images) -> None:
    """Deploy Prometheus and wait until it has loaded the chart's rules.

    Raises:
        TimeoutError: it still has other rules.
    """
    rules = target.get("configmap", deploy.RULES, "-n", deploy.NAMESPACE)["data"]["pdpool.rules.yaml"]
    alerts = [line.split("alert:")[1].strip() for line in rules.splitlines() if "alert:" in line]
    screen.say(f"Prometheus in namespace {deploy.NAMESPACE}")
    with screen.ticking(lambda: "Prometheus is not Ready yet"):
        deploy.deploy(target.kubectl, images.prometheus, images.product("operator"))

    def unmet() -> str | None:
        try:
            return deploy.not_loaded(deploy.ask(target.kubectl, "rules")["groups"], rules)
        except CommandError as error:
            return str(error)

    screen.wait("Prometheus to show the chart's rules with the windows set above", unmet, RULES_S)
    screen.say(f"rules loaded: {', '.join(alerts)}")


def demo_objects(text: str, engine: DemoEngine, image: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the objects of an example with the demo's changes, and one sentence for each change.

    Args:
        text: The example.
        engine: Its engine.
        image: The engine's image on this cluster.
    """
    documents = [document for document in yaml.safe_load_all(text) if document]
    changes = []
    for document in documents:
        if document["kind"] == "DisaggregatedService":
            document["spec"]["stuckAfterSeconds"] = STUCK_AFTER_S
            changes.append(f"DisaggregatedService: stuckAfterSeconds {STUCK_AFTER_S} (default 30)")
            continue
        container = _engine_container(document)
        if container.get("image", image) != image:
            container["image"] = image
            changes.append(f"{document['kind']}: image {image}")
        if document["kind"] == "DecodePool" and engine.decode_args:
            container.setdefault("args", []).extend(engine.decode_args)
            _with_container(document, container)
            changes.append(
                f"DecodePool: engine started with {' '.join(engine.decode_args)}, so that one can be frozen on request"
            )
    return documents, changes


def _engine_container(pool: dict[str, Any]) -> dict[str, Any]:
    """Return the container `engine` of a pool's template, or a new one that the template does not hold."""
    containers = pool["spec"].get("template", {}).get("spec", {}).get("containers", [])
    return next((container for container in containers if container["name"] == "engine"), {"name": "engine"})


def _with_container(pool: dict[str, Any], engine: dict[str, Any]) -> None:
    """Add a container to a pool's template, unless it is there."""
    spec = pool["spec"].setdefault("template", {}).setdefault("spec", {})
    containers = spec.setdefault("containers", [])
    if engine not in containers:
        containers.append(engine)


def remove_pools(screen: Screen, target: Target) -> None:
    """Remove the demo's pools, if any, and wait until all their objects are gone."""
    kinds = "prefillpools,decodepools,disaggregatedservices"
    if not target.get(kinds, "-n", POOLS)["items"]:
        return
    screen.say("removing the pools of an earlier run")
    target.kubectl("delete", kinds, "--all", "-n", POOLS, "--wait=false")

    def left() -> str | None:
        found = target.get(MADE_KINDS, "-n", POOLS, "-l", "app.kubernetes.io/managed-by=pdpool")["items"]
        names = [f"{one['kind']}/{one['metadata']['name']}" for one in found]
        return f"{', '.join(names)} still there" if names else None

    screen.wait("all their objects to be deleted", left, GONE_S)


def pods_ready(target: Target) -> str:
    """Return as text how many of the pools' pods are Ready, and which are not."""
    try:
        pods = target.get("pods", "-n", POOLS, "-l", "app.kubernetes.io/managed-by=pdpool")["items"]
    except CommandError as error:
        return f"pods cannot be listed: {str(error).splitlines()[-1]}"
    waiting = [pod["metadata"]["name"] for pod in pods if not _is_ready(pod)]
    names = f"; not yet: {', '.join(waiting)}" if waiting else ""
    return f"{len(pods) - len(waiting)} of {len(pods)} pods are Ready{names}"


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def pools(screen: Screen, target: Target, images: Images, engine: DemoEngine) -> float:
    """Apply the engine's example and wait until its service is Ready. Return the seconds between the two."""
    text = (CHECKOUT / "examples" / engine.example).read_text()
    documents, changes = demo_objects(text, engine, images.product(engine.image))
    ready_s = engine.ready_s
    screen.command(f"kubectl apply -n {POOLS} -f examples/{engine.example}")
    for change in changes:
        screen.say(f"for the demo, {change}")
    began = time.monotonic()
    applied = target.kubectl("apply", "-n", POOLS, "-f", "-", stdin=yaml.safe_dump_all(documents))
    screen.block(applied)
    screen.command(f"kubectl wait -n {POOLS} --for=condition=Ready pdsvc/{SERVICE} --timeout={ready_s:.0f}s")
    try:
        with screen.ticking(lambda: pods_ready(target)):
            target.kubectl(
                *("wait", "-n", POOLS, "--for=condition=Ready", f"pdsvc/{SERVICE}", f"--timeout={ready_s:.0f}s"),
                timeout_s=ready_s + 10,
            )
    except CommandError as error:
        raise TimeoutError(f"{SERVICE} did not become Ready within {ready_s:.0f} s: {error}") from error
    seconds = time.monotonic() - began
    healthy = ("wait", "-n", POOLS, "--for=condition=QueuesHealthy", f"pdsvc/{SERVICE}", f"--timeout={SEEN_S:.0f}s")
    with screen.ticking(lambda: "the operator has not sampled all queues yet"):
        target.kubectl(*healthy)
    screen.command(f"kubectl get pd -n {POOLS}")
    screen.block(target.kubectl("get", "pd", "-n", POOLS))
    screen.block(target.kubectl("get", "pods", "-n", POOLS, "-o", "wide"))
    return seconds

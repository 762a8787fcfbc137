"""One size of fleet in a namespace of its own: its account, its pools, and the pods that exist."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dev.cluster.bringup import kubectl
from dev.cluster.layout import State
from dev.paths import CHECKOUT
from dev.shell import CommandError, wait_for
from dev.tools.build import binary

MADE_BY = "pdpool.dev/instance"
TEMPLATE = {
    "spec": {
        "nodeSelector": {"type": "kwok"},
        "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
    }
}


@dataclass(frozen=True)
class Size:
    """Number of pools, and of instances in each. Half of the pools are of each role, and each pair has a service."""

    pools: int
    instances: int

    @property
    def pods(self) -> int:
        """Number of pods that the pools ask for."""
        return self.pools * self.instances

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read `POOLSxINSTANCES`.

        Raises:
            ValueError: the text has another form, or the number of pools is odd.
        """
        pools, _, instances = text.partition("x")
        if not (pools.isdecimal() and instances.isdecimal()) or int(pools) % 2 or not int(pools) or not int(instances):
            raise ValueError(f"{text!r} is no size; it must be POOLSxINSTANCES with an even number of pools: 10x10")
        return cls(int(pools), int(instances))

    def __str__(self) -> str:
        return f"{self.pools}x{self.instances}"


@dataclass
class Fleet:
    """The namespace of one size. `folder` receives the operator's kubeconfig and seed."""

    state: State
    size: Size
    folder: Path
    namespace: str = field(default_factory=lambda: f"bench-{secrets.token_hex(4)}")
    pods: dict[str, float] = field(default_factory=dict)
    """When the first event of each pod arrived, by name."""
    _watch: subprocess.Popen[str] | None = None

    def set_up(self) -> None:
        """Create namespace and account with the rights that the chart grants, and watch pods."""
        ns = self.namespace
        rules = yaml.safe_load((CHECKOUT / "charts/pdpool/files/rbac.yaml").read_text())
        meta = {"name": "operator", "namespace": ns}
        group = "rbac.authorization.k8s.io"
        binding = {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "operator"},
            "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": ns}],
        }
        crds = sorted((CHECKOUT / "crds").glob("*.yaml"))
        for crd in crds:
            kubectl(self.state, "apply", "--server-side", "--force-conflicts", "-f", crd)
        self._apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ns}},
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
            {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": rules["pools"] + rules["own"]},
            binding,
        )
        token = kubectl(self.state, "create", "token", "operator", "-n", ns, "--duration=2h").strip()
        whole = yaml.safe_load(self.state.kubeconfig.read_text())
        whole["users"] = [{"name": user["name"], "user": {"token": token}} for user in whole["users"]]
        (self.folder / "kubeconfig").write_text(yaml.safe_dump(whole))
        (self.folder / "seed").write_bytes(base64.b64encode(secrets.token_bytes(48)))
        self._watch_pods()

    def apply(self) -> float:
        """Apply all pools and services with one command. Return the seconds that it took."""
        started = time.monotonic()
        self._apply(*(body for number in range(self.size.pools // 2) for body in self._pair(number)))
        return time.monotonic() - started

    def grow(self, number: int) -> None:
        """Add one instance to prefill pool `number`."""
        patch = json.dumps({"spec": {"replicas": self.size.instances + 1}})
        kubectl(self.state, "patch", "prefillpool", f"chat-{number}", "-n", self.namespace, "--type=merge", "-p", patch)

    def remove_pools(self, within_s: float) -> None:
        """Delete services and pools while the operator runs, and wait until their pods are gone.

        Raises:
            TimeoutError: pods are left.
        """
        for kind in ("disaggregatedservices", "prefillpools", "decodepools"):
            kubectl(self.state, "delete", kind, "--all", "-n", self.namespace, "--wait=false")
        wait_for("all pods are gone", self._pods_left, deadline_s=within_s, interval_s=2.0)

    def tear_down(self) -> None:
        """Remove the namespace with all in it. Finalizers of pods go, because no operator is left to remove them."""
        if self._watch is not None:
            self._watch.terminate()
            self._watch.wait(10)
        for name in kubectl(self.state, "get", "pods", "-n", self.namespace, "-o", "name").split():
            free = '{"metadata": {"finalizers": null}}'
            with contextlib.suppress(CommandError):  # it is gone
                kubectl(self.state, "patch", name, "-n", self.namespace, "--type=merge", "-p", free)
        kubectl(self.state, "delete", "namespace", self.namespace, "--wait=false", "--ignore-not-found")
        wait_for("the namespace is gone", self._namespace_left, deadline_s=180, interval_s=2.0)

    def _pods_left(self) -> str | None:
        left = len(kubectl(self.state, "get", "pods", "-n", self.namespace, "-o", "name").split())
        return f"{left} pods are left" if left else None

    def _namespace_left(self) -> str | None:
        found = kubectl(self.state, "get", "namespace", self.namespace, "--ignore-not-found", "-o", "name")
        return "it still ends" if found.strip() else None

    def _apply(self, *bodies: dict[str, Any]) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})
        kubectl(self.state, "create", "-f", "-", stdin=text)

    def _pair(self, number: int) -> list[dict[str, Any]]:
        meta = {"name": f"chat-{number}", "namespace": self.namespace}
        spec = {"model": {"path": "tiny"}, "replicas": self.size.instances, "template": TEMPLATE}
        version = "pdpool.dev/v1alpha1"
        pools = [
            {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}
            for kind in ("PrefillPool", "DecodePool")
        ]
        refs: dict[str, Any] = {side: {"poolRef": {"name": meta["name"]}} for side in ("prefill", "decode")}
        refs["router"] = {"enabled": False}
        service = {"apiVersion": version, "kind": "DisaggregatedService", "metadata": meta, "spec": refs}
        return [*pools, service]

    def _watch_pods(self) -> None:
        command = [
            *(str(binary("kubectl")), f"--kubeconfig={self.state.kubeconfig}", "get", "pods", "-n", self.namespace),
            *("-l", MADE_BY, "--watch", "-o", "name"),
        ]
        self._watch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._note_pods, args=(self._watch,), daemon=True).start()

    def _note_pods(self, watch: subprocess.Popen[str]) -> None:
        assert watch.stdout is not None
        for line in watch.stdout:
            self.pods.setdefault(line.strip(), time.monotonic())

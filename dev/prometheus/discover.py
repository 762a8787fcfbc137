"""Kubernetes discovery for Debian's Prometheus, whose build lacks it.

A side container lists pdpool's pods. It writes a target file with the `__meta_kubernetes_pod_*` labels of Prometheus'
own discovery. It also makes Prometheus read its rule files again after the kubelet has changed them, because Prometheus
does not watch them.

Runs as `python discover.py FILE RULES URL` in a pod, from a ConfigMap: only with the standard library. RULES is the
folder of the rule files, URL that of Prometheus.
"""

import json
import re
import signal
import ssl
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc"
SELECTORS = ("app.kubernetes.io/name=pdpool", "app.kubernetes.io/managed-by=pdpool")
INTERVAL_S = 2.0
TIMEOUT_S = 5.0


def targets(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one target group for each declared container port of each running pod, ordered by address."""
    groups = []
    for pod in pods:
        address = pod.get("status", {}).get("podIP")
        if not address or pod["status"].get("phase") != "Running":
            continue
        host = f"[{address}]" if ":" in address else address
        labels = {
            "__meta_kubernetes_namespace": pod["metadata"]["namespace"],
            "__meta_kubernetes_pod_name": pod["metadata"]["name"],
        }
        for name, value in pod["metadata"].get("labels", {}).items():
            labels["__meta_kubernetes_pod_label_" + re.sub(r"[^A-Za-z0-9_]", "_", name)] = value
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", []):
                named = labels | {"__meta_kubernetes_pod_container_port_name": port.get("name", "")}
                groups.append({"targets": [f"{host}:{port['containerPort']}"], "labels": named})
    return sorted(groups, key=lambda group: str(group["targets"]))


def list_pods(context: ssl.SSLContext) -> list[dict[str, Any]]:
    """Ask the API server for the pods of all `SELECTORS`."""
    # The kubelet renews the token, so it is read each time.
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    pods = []
    for selector in SELECTORS:
        query = urllib.parse.urlencode({"labelSelector": selector, "resourceVersion": "0"})
        request = urllib.request.Request(f"{API}/api/v1/pods?{query}", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            pods += json.load(answer)["items"]
    return pods


def write(path: Path, text: str) -> None:
    """Write the file so that a reader sees the old or the new text, never a part."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


class Reloader:
    """Makes Prometheus at `url` load every new content of the rule files in `folder`, including the first."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._request = urllib.request.Request(f"{url}/-/reload", method="POST")
        self._told: dict[str, bytes] | None = None

    def look(self) -> None:
        """Reload Prometheus if the files differ from those of the last reload.

        Raises:
            OSError: Prometheus did not reload. The next call tries again.
        """
        found = {file.name: file.read_bytes() for file in sorted(self._folder.glob("*.yaml"))}
        if found == self._told:
            return
        with urllib.request.urlopen(self._request, timeout=TIMEOUT_S):
            self._told = found


def main(path: Path, reloader: Reloader) -> None:
    """Keep the target file and the rules up to date. While the API server does not answer, the last targets stay."""
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    written = ""
    while True:
        try:
            reloader.look()
        except OSError as error:
            print(f"discover: rules not loaded: {error}", file=sys.stderr, flush=True)
        try:
            text = json.dumps(targets(list_pods(context)), indent=1)
        except OSError as error:
            print(f"discover: {API}: {error}", file=sys.stderr, flush=True)
        else:
            if text != written:
                write(path, text)
                written = text
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    # The kernel gives process 1 of a container no default action for SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    main(Path(sys.argv[1]), Reloader(Path(sys.argv[2]), sys.argv[3]))

"""The cluster that the demo runs on: the local one, or the one that the current kubeconfig context names."""

import contextlib
import hashlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev.demo.screen import DemoError, Screen
from dev.images import store
from dev.images.build import IMAGES
from dev.paths import CHECKOUT
from dev.shell import run
from dev.tools.build import BuildError, binary

FORWARD_S = 15.0
ASK_S = 15.0
STOP_S = 5.0
DEMO_IMAGES = ("operator", "engine", "router", "prometheus")


@dataclass(frozen=True)
class Images:
    """Where the images are: `registry`/pdpool-operator:`tag` and so on, and Prometheus'."""

    registry: str
    tag: str
    prometheus: str
    fingerprint: str
    """Changes whenever an image does, although the tag may not."""

    def product(self, name: str) -> str:
        """Full name of the image of operator, engine or router."""
        return f"{self.registry}/pdpool-{name}:{self.tag}"


class Target(ABC):
    """A cluster with kubectl and helm for it."""

    def __init__(self, screen: Screen, env: Mapping[str, str], kubectl: Path, helm: Path) -> None:
        self.screen = screen
        self._env = dict(env)
        self._kubectl = kubectl
        self._helm = helm

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60.0) -> str:
        """Run kubectl and return its output.

        Raises:
            CommandError: it failed or took longer than `timeout_s`.
        """
        return run(self._kubectl, *arguments, stdin=stdin, env=self._env, timeout_s=timeout_s)

    def helm(self, *arguments: str, stdin: str | None = None, timeout_s: float = 300.0) -> str:
        """Run helm and return its output.

        Raises:
            CommandError: it failed or took longer than `timeout_s`.
        """
        return run(self._helm, *arguments, stdin=stdin, env=self._env, timeout_s=timeout_s)

    def get(self, *arguments: str) -> Any:  # noqa: ANN401 -- the shape depends on what is asked for
        """Return what `kubectl get … -o json` prints.

        Raises:
            CommandError: kubectl failed.
        """
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def ask_pod(self, namespace: str, pod: str, port: int, path: str, body: bytes | None = None) -> Any:  # noqa: ANN401
        """Return the JSON that a pod answers to a GET, or to a POST of `body`.

        Not through the API server's proxy: a NetworkPolicy, where one is enforced, keeps that out of engines.

        Raises:
            CommandError: kubectl failed.
            DemoError: the pod cannot be reached, or it refused.
        """
        with self.reach(namespace, "pod", pod, port) as url:
            try:
                with urllib.request.urlopen(url + path, body, timeout=ASK_S) as answer:
                    return json.load(answer)
            except (OSError, ValueError) as error:
                raise DemoError(f"{pod}, port {port}, did not answer {path} as it should: {error}") from error

    up: str
    """The command that tells the story on this cluster, or goes on with it."""
    down: str
    """The command that removes what the story has made."""

    @property
    @abstractmethod
    def hint(self) -> str:
        """What to type before kubectl so that it speaks with this cluster; empty when nothing is needed."""

    @abstractmethod
    def start(self) -> None:
        """See that the cluster is there."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the cluster if it is ours."""

    @abstractmethod
    def bring_images(self) -> Images:
        """Build the images and bring them to where the nodes find them."""

    @abstractmethod
    def reach(self, namespace: str, kind: str, name: str, port: int) -> contextlib.AbstractContextManager[str]:
        """Give a base URL for a port of a `service` or `pod` (the kind), for as long as the block runs."""

    def _build(self) -> str:
        stream_module("dev.images", "build", *DEMO_IMAGES)
        digest = hashlib.sha256()
        for name in DEMO_IMAGES:
            tag = IMAGES[name].tag
            digest.update(store.buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", tag).encode())
        return digest.hexdigest()[:12]


class LocalCluster(Target):
    """The cluster of `make cluster`. This machine is its node, so that pods and Services are reached directly."""

    up, down = "make demo", "make demo-down"

    def __init__(self, screen: Screen) -> None:
        # Neither kubectl nor helm need be built yet, and the kubeconfig may not be written: both come with `start`.
        self._config = module_output("dev.cluster", "kubeconfig").strip()
        tools = Path(self._config).parent / "bin"
        super().__init__(screen, {"KUBECONFIG": self._config}, tools / "kubectl", tools / "helm")

    @property
    def hint(self) -> str:
        return f'export KUBECONFIG={self._config} PATH="{self._kubectl.parent}:$PATH"'

    def start(self) -> None:
        self.screen.command("make cluster")
        stream_module("dev.cluster", "up")

    def stop(self) -> None:
        stream_module("dev.cluster", "down")

    def bring_images(self) -> Images:
        self.screen.command("make images")
        fingerprint = self._build()
        stream_module("dev.images", "load", "--built", *DEMO_IMAGES)
        return Images("localhost", "dev", IMAGES["prometheus"].tag, fingerprint)

    @contextlib.contextmanager
    def reach(self, namespace: str, kind: str, name: str, port: int) -> Iterator[str]:
        found = self.get(kind, name, "-n", namespace)
        address = found["spec"]["clusterIP"] if kind == "service" else found["status"]["podIP"]
        yield f"http://{address}:{port}"


class CurrentContext(Target):
    """The cluster of the current kubeconfig context; images go through a registry that the user names."""

    down = "make demo-down CLUSTER=current"

    def __init__(self, screen: Screen, registry: str) -> None:
        super().__init__(screen, {}, _tool("kubectl"), _tool("helm"))
        self._registry = registry.rstrip("/")
        self.up = f"make demo CLUSTER=current REGISTRY={self._registry}"

    @property
    def hint(self) -> str:
        return ""

    def start(self) -> None:
        context = self.kubectl("config", "current-context").strip()
        self.screen.say(f"kubeconfig context: {context} (namespaces pdpool-system, llm and monitoring are used)")
        self.screen.command("kubectl get nodes")
        self.screen.block(self.kubectl("get", "nodes"))

    def stop(self) -> None:
        """Leave it running: it is not ours."""

    def bring_images(self) -> Images:
        fingerprint = self._build()
        # A tag of its own for each state of the code: nodes keep what they once pulled under a name.
        tag = f"demo-{fingerprint}"
        self.screen.say(f"pushing to {self._registry}, tag {tag}")
        stream_module("dev.images", "push", "--registry", self._registry, "--tag", tag, *DEMO_IMAGES)
        return Images(self._registry, tag, f"{self._registry}/prometheus:{tag}", fingerprint)

    @contextlib.contextmanager
    def reach(self, namespace: str, kind: str, name: str, port: int) -> Iterator[str]:
        command = [str(self._kubectl), "port-forward", "-n", namespace, f"{kind}/{name}", f":{port}"]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                yield f"http://127.0.0.1:{_forwarded_port(process)}"
            finally:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _forwarded_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    assert process.stderr is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = process.stdout.readline() if selector.select(FORWARD_S) else ""
    # Forwarding from 127.0.0.1:40123 -> 8000
    if not line.startswith("Forwarding from"):
        process.kill()
        raise DemoError(f"kubectl port-forward said {line!r} {process.stderr.read()!r}")
    return int(line.split(" -> ")[0].rsplit(":", 1)[1])


def _tool(name: str) -> Path:
    if found := shutil.which(name):
        return Path(found)
    try:
        return binary(name)
    except BuildError as error:
        raise DemoError(f"{name} is neither on the PATH nor built: {error}") from error


def stream_module(module: str, *arguments: str) -> None:
    """Run `python -m module …` of this checkout, its output going to the screen as it comes.

    Raises:
        DemoError: it ended with another code than 0; its output said why.
    """
    began = time.monotonic()
    code = subprocess.run(_module(module, arguments), cwd=CHECKOUT, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        words = " ".join((module, *arguments))
        raise DemoError(f"`python -m {words}` ended with {code} after {time.monotonic() - began:.0f} s, see above")


def module_output(module: str, *arguments: str) -> str:
    """Run `python -m module …` of this checkout and return its output.

    Raises:
        CommandError: it failed.
    """
    return run(*_module(module, arguments), env={"PYTHONPATH": str(CHECKOUT)})


def _module(module: str, arguments: tuple[str, ...]) -> list[str]:
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    return [sys.executable, "-m", module, *arguments]


def target(cluster: str, registry: str | None, screen: Screen) -> Target:
    """Return the cluster by its name on the command line.

    Raises:
        DemoError: the current context is wanted, but tools are missing.
    """
    if cluster == "local":
        return LocalCluster(screen)
    return CurrentContext(screen, registry or "")

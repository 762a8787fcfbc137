"""The cluster of the demo: the local one, or that of the current kubeconfig context."""

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


@dataclass(frozen=True)
class Images:
    """Names of the images: `registry`/pdpool-operator:`tag` and so on, and Prometheus."""

    registry: str
    tag: str
    prometheus: str
    fingerprint: str
    """Changes with every image, even if the tag stays."""

    def product(self, name: str) -> str:
        """Full name of the image of operator, router or an engine."""
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
        """Return the output of `kubectl get … -o json`, parsed.

        Raises:
            CommandError: kubectl failed.
        """
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def ask_pod(self, namespace: str, pod: str, port: int, path: str, body: bytes | None = None) -> Any:  # noqa: ANN401
        """Send a GET, or a POST of `body`, to a pod. Return its JSON answer.

        It does not use the API server's proxy, because an enforced NetworkPolicy keeps that out of engines.

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
    """The command that runs or continues the story on this cluster."""
    down: str
    """The command that removes what the story created."""

    @property
    @abstractmethod
    def hint(self) -> str:
        """Shell command that makes kubectl use this cluster. Empty if none is needed."""

    @abstractmethod
    def start(self) -> None:
        """Make sure that the cluster runs."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the cluster if the demo owns it."""

    @abstractmethod
    def bring_images(self, *names: str) -> Images:
        """Build the images of `dev.images` with these names and make them available to the nodes."""

    @abstractmethod
    def reach(self, namespace: str, kind: str, name: str, port: int) -> contextlib.AbstractContextManager[str]:
        """Yield a base URL for a port of a `service` or `pod` (the kind) while the block runs."""

    def _build(self, names: tuple[str, ...]) -> str:
        stream_module("dev.images", "build", *names)
        digest = hashlib.sha256()
        for name in names:
            tag = IMAGES[name].tag
            digest.update(store.buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", tag).encode())
        return digest.hexdigest()[:12]


class LocalCluster(Target):
    """The cluster of `make cluster`. This machine is its node, so pods and Services are reachable directly."""

    down = "make demo-down"

    def __init__(self, screen: Screen, make: str) -> None:
        self.up = make
        # kubectl, helm and the kubeconfig may not exist before `start`.
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

    def bring_images(self, *names: str) -> Images:
        self.screen.command(f"python -m dev.images load {' '.join(names)}")
        fingerprint = self._build(names)
        stream_module("dev.images", "load", "--built", *names)
        return Images("localhost", "dev", IMAGES["prometheus"].tag, fingerprint)

    @contextlib.contextmanager
    def reach(self, namespace: str, kind: str, name: str, port: int) -> Iterator[str]:
        found = self.get(kind, name, "-n", namespace)
        address = found["spec"]["clusterIP"] if kind == "service" else found["status"]["podIP"]
        yield f"http://{address}:{port}"


class CurrentContext(Target):
    """The cluster of the current kubeconfig context. Images go through a registry that the user names."""

    down = "make demo-down CLUSTER=current"

    def __init__(self, screen: Screen, registry: str, make: str) -> None:
        super().__init__(screen, {}, _tool("kubectl"), _tool("helm"))
        self._registry = registry.rstrip("/")
        self.up = f"{make} CLUSTER=current REGISTRY={self._registry}"

    @property
    def hint(self) -> str:
        return ""

    def start(self) -> None:
        context = self.kubectl("config", "current-context").strip()
        self.screen.say(f"kubeconfig context: {context} (namespaces pdpool-system, llm and monitoring are used)")
        self.screen.command("kubectl get nodes")
        self.screen.block(self.kubectl("get", "nodes"))

    def stop(self) -> None:
        """Do nothing: the demo does not own this cluster."""

    def bring_images(self, *names: str) -> Images:
        fingerprint = self._build(names)
        # Each state of the code has its own tag, because nodes keep an image that they once pulled under a name.
        tag = f"demo-{fingerprint}"
        self.screen.say(f"pushing to {self._registry}, tag {tag}")
        stream_module("dev.images", "push", "--registry", self._registry, "--tag", tag, *names)
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
    """Run `python -m module …` of this checkout and show its output as it arrives.

    Raises:
        DemoError: its exit code was not 0. Its output says why.
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


def target(cluster: str, registry: str | None, screen: Screen, make: str) -> Target:
    """Return the cluster with this name on the command line.

    Args:
        cluster, registry: Of the command line.
        screen: Shows what is run.
        make: The `make` command of this story, without the cluster's variables.

    Raises:
        DemoError: the current context is selected, but tools are missing.
    """
    if cluster == "local":
        return LocalCluster(screen, make)
    return CurrentContext(screen, registry or "", make)

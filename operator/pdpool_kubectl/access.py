"""Which cluster and namespace a command is about, chosen as kubectl chooses them."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from kubernetes.aio.config import ConfigException, list_kube_config_contexts
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.api_transport import connect

IN_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
USER_AGENT = "kubectl-pdpool"
UNUSABLE = (ConfigException, OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError)
"""What the client's reader of kubeconfigs raises. It expects that a file has the right shape."""


class AccessError(Exception):
    """The kubeconfig cannot be read, or lacks the context."""


@dataclass(frozen=True, slots=True)
class Access:
    """The options that every command has."""

    kubeconfig: str | None = None
    """Path of the kubeconfig. `None` means KUBECONFIG, else ~/.kube/config, else the service account of the pod."""
    context: str | None = None
    """`None` means the current context."""
    namespace: str | None = None
    """`None` means the namespace of the context."""
    all_namespaces: bool = False

    def scope(self) -> str | None:
        """Return the namespace to read, or None for all.

        Raises:
            AccessError: the kubeconfig cannot be read, or lacks the context.
        """
        if self.all_namespaces:
            return None
        if self.namespace:
            return self.namespace
        if self._in_pod():
            return IN_POD_NAMESPACE.read_text("utf-8").strip() if IN_POD_NAMESPACE.exists() else "default"
        return self._chosen().get("namespace") or "default"

    def _chosen(self) -> dict[str, str]:
        """Return the context: its cluster, user and namespace."""
        try:
            contexts, current = list_kube_config_contexts(self.kubeconfig)  # type: ignore[no-untyped-call]
        except UNUSABLE as error:
            raise self._unusable(error) from error
        chosen = next((c for c in contexts if c["name"] == self.context), None) if self.context else current
        if chosen is None:
            known = ", ".join(sorted(c["name"] for c in contexts))
            raise AccessError(f"--context {self.context}: the kubeconfig has no such context, but {known}")
        return dict(chosen["context"])

    def _unusable(self, error: Exception) -> AccessError:
        file = f" {self.kubeconfig}" if self.kubeconfig else ""
        return AccessError(f"the kubeconfig{file} cannot be used: {' '.join(str(error).split())}")

    def _in_pod(self) -> bool:
        chosen = self.kubeconfig or self.context or os.environ.get("KUBECONFIG")
        return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and not chosen

    def flags(self, namespace: str) -> str:
        """Return the options that a printed command needs to be about the same cluster."""
        context = f" --context {self.context}" if self.context else ""
        kubeconfig = f" --kubeconfig {self.kubeconfig}" if self.kubeconfig else ""
        return f"-n {namespace}{context}{kubeconfig}"

    def nothing(self) -> str:
        """Return the words for a namespace without services and pools. Its name may be misspelt."""
        scope = self.scope()
        return f"no services or pools in {f'the namespace {scope}' if scope else 'any namespace'}"

    @asynccontextmanager
    async def api(self) -> AsyncIterator[Api]:
        """Open a client.

        Raises:
            AccessError: the kubeconfig cannot be read, or lacks the context.
        """
        if not self._in_pod():
            self._chosen()  # its error names the contexts that there are
        try:
            client = await connect(self.kubeconfig, self.context)
        except UNUSABLE as error:
            raise self._unusable(error) from error
        api = Api(client, user_agent=USER_AGENT)
        try:
            yield api
        finally:
            await api.close()

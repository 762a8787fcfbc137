"""Inputs of the builders besides the user's object."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..api.key_epochs import FIRST_EPOCH
from .common import container_security_context, pod_security_context
from .network_policy import NetworkPeers


@dataclass(frozen=True, slots=True)
class PodDefaults:
    """What every engine and router pod gets unless its template says otherwise."""

    image_pull_policy: str = "IfNotPresent"
    """Of containers whose image the template does not name."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets in the namespaces of the pods."""
    pod_security_context: Mapping[str, Any] = field(default_factory=pod_security_context)
    container_security_context: Mapping[str, Any] = field(default_factory=container_security_context)

    def pull_secrets(self) -> dict[str, Any]:
        """The field `imagePullSecrets` of a pod's spec. Empty without secrets."""
        found = [{"name": name} for name in self.image_pull_secrets]
        return {"imagePullSecrets": found} if found else {}


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Images from the operator's environment (`PDPOOL_ENGINE_IMAGE`, `PDPOOL_ROUTER_IMAGE`), keys and defaults."""

    engine_image: str
    """Image for engines of type Reference whose template names none."""
    router_image: str
    keys: Mapping[str, str] = field(default_factory=dict)
    """Content of the namespace's Secret `pdpool-keys`: one file for each key of each epoch."""
    key_epoch: int = FIRST_EPOCH
    """Epoch of the keys that all pods should have in the end."""
    peers: NetworkPeers | None = None
    """Who may connect to engines and routers. `None`: these get no NetworkPolicies."""
    pods: PodDefaults = field(default_factory=PodDefaults)

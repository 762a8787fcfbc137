"""Settings that the operator reads from its environment."""

import json
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from ..api.key_epochs import FIRST_EPOCH
from ..build.network_policy import NetworkPeers
from ..build.settings import PodDefaults

MIN_SEED_BYTES = 32
MAX_EPOCH = 64

M = TypeVar("M", bound=BaseModel)
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

VARIABLES: Mapping[str, str] = {
    "PDPOOL_NAMESPACE": "Namespace of the Lease. Required.",
    "PDPOOL_LEASE": "Name of the Lease. Required.",
    "PDPOOL_ENGINE_IMAGE": "Image of pools of type Reference whose template names none. Required.",
    "PDPOOL_ROUTER_IMAGE": "Image of routers. Required.",
    "PDPOOL_ROUTER_SEED_FILE": f"File with the seed of all keys, {MIN_SEED_BYTES} bytes or more. Required.",
    "PDPOOL_KEY_EPOCH": f"Epoch of all keys, {FIRST_EPOCH} to {MAX_EPOCH}. Default: {FIRST_EPOCH}.",
    "PDPOOL_WATCH_NAMESPACES": "Namespaces to serve, separated by commas. Default: all.",
    "PDPOOL_POD_DEFAULTS": "Defaults of engine and router pods, as JSON (the chart's workloads).",
    "PDPOOL_NETWORK_PEERS": "Peers in NetworkPolicies, as JSON. Default: no policies are created.",
    "PDPOOL_LISTEN": "ADDRESS:PORT of /healthz, /readyz and /metrics. Default: 0.0.0.0:8080.",
    "PDPOOL_LOG_LEVEL": f"{', '.join(LEVELS)}. Default: INFO.",
}
"""What `load` reads, for `--help`."""


class ConfigInvalidError(ValueError):
    """An environment variable is missing or wrong. The message names it."""


@dataclass(frozen=True)
class Config:
    """The operator's settings, read once at start."""

    namespace: str
    """The operator's own namespace, which has its Lease."""
    lease: str
    """Name of the Lease. Operators of one installation share it; each installation has its own."""
    watch_namespaces: tuple[str, ...]
    """Namespaces to serve. Empty means all."""
    engine_image: str
    router_image: str
    seeds: Mapping[int, bytes]
    """Master keys, by the first epoch that uses each. All keys are derived from them."""
    log_level: str
    identity: str
    """Name of this process in the Lease and in events. Each start has a new one."""
    key_epoch: int = FIRST_EPOCH
    """Epoch of the keys that all pods should have in the end."""
    pods: PodDefaults = field(default_factory=PodDefaults)
    """What every engine and router pod gets unless its template says otherwise."""
    peers: NetworkPeers | None = None
    """Who may connect to engines and routers. `None`: these get no NetworkPolicies."""
    host: str = "0.0.0.0"  # noqa: S104 - kubelet and Prometheus come from outside the pod
    port: int = 8080


def load(env: Mapping[str, str] = os.environ) -> Config:
    """Read the environment; raises ConfigInvalidError."""
    level = env.get("PDPOOL_LOG_LEVEL", "INFO").upper()
    if level not in LEVELS:
        raise ConfigInvalidError(f"PDPOOL_LOG_LEVEL is {level!r}; it must be one of {', '.join(LEVELS)}")
    names = (name.strip() for name in env.get("PDPOOL_WATCH_NAMESPACES", "").split(","))
    host, _, port = env.get("PDPOOL_LISTEN", "0.0.0.0:8080").rpartition(":")
    if not port.isdecimal():
        raise ConfigInvalidError(f"PDPOOL_LISTEN is {env['PDPOOL_LISTEN']!r}; it must be ADDRESS:PORT")
    return Config(
        namespace=_required(env, "PDPOOL_NAMESPACE"),
        lease=_required(env, "PDPOOL_LEASE"),
        watch_namespaces=tuple(name for name in names if name),
        engine_image=_required(env, "PDPOOL_ENGINE_IMAGE"),
        router_image=_required(env, "PDPOOL_ROUTER_IMAGE"),
        seeds=_seeds(Path(_required(env, "PDPOOL_ROUTER_SEED_FILE"))),
        key_epoch=_epoch(env.get("PDPOOL_KEY_EPOCH", "") or str(FIRST_EPOCH)),
        peers=_peers(env.get("PDPOOL_NETWORK_PEERS", "")),
        pods=_pod_defaults(env.get("PDPOOL_POD_DEFAULTS", "") or "{}"),
        log_level=level,
        identity=f"{socket.gethostname()}_{uuid.uuid4().hex[:12]}",
        host=host,
        port=int(port),
    )


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise ConfigInvalidError(f"{name} is not set; --help says what belongs there")
    return value


def _epoch(text: str) -> int:
    if not text.isdecimal() or not FIRST_EPOCH <= int(text) <= MAX_EPOCH:
        raise ConfigInvalidError(f"PDPOOL_KEY_EPOCH is {text!r}; it must be {FIRST_EPOCH}..{MAX_EPOCH}")
    return int(text)


class _PodDefaults(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)

    image_pull_policy: Annotated[str, Field(pattern="^(Always|IfNotPresent|Never)$")] | None = None
    image_pull_secrets: tuple[str, ...] = ()
    pod_security_context: dict[str, Any] | None = None
    container_security_context: dict[str, Any] | None = None


def _pod_defaults(text: str) -> PodDefaults:
    """Read the defaults of pods. Absent fields keep pdpool's values."""
    given = _json("PDPOOL_POD_DEFAULTS", text, _PodDefaults)
    return PodDefaults(**given.model_dump(exclude_none=True))


class _Peers(BaseModel):
    model_config = ConfigDict(extra="forbid")

    watchers: tuple[dict[str, Any], ...] = ()
    clients: tuple[dict[str, Any], ...] = ()


def _peers(text: str) -> NetworkPeers | None:
    """Read the peers of engines. Without text there are no policies."""
    given = _json("PDPOOL_NETWORK_PEERS", text, _Peers) if text else None
    return NetworkPeers(given.watchers, given.clients) if given else None


def _json(name: str, text: str, model: type[M]) -> M:
    try:
        return model.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigInvalidError(f"{name}: {where}: {first['msg']} (got {first['input']!r:.80})") from None
    except ValueError as error:
        raise ConfigInvalidError(f"{name} is not JSON: {error}") from None


def _seeds(file: Path) -> Mapping[int, bytes]:
    """Read the first seed from `file`, and the seed that epoch N begins with from `file-N`, if there is one."""
    later = {epoch: file.with_name(f"{file.name}-{epoch}") for epoch in range(FIRST_EPOCH + 1, MAX_EPOCH + 1)}
    return {FIRST_EPOCH: _seed(file)} | {epoch: _seed(one) for epoch, one in later.items() if one.exists()}


def _seed(file: Path) -> bytes:
    try:
        seed = file.read_bytes().strip()
    except OSError as error:
        raise ConfigInvalidError(f"PDPOOL_ROUTER_SEED_FILE {file} cannot be read: {error.strerror}") from error
    if len(seed) < MIN_SEED_BYTES:
        raise ConfigInvalidError(
            f"PDPOOL_ROUTER_SEED_FILE {file} holds {len(seed)} bytes; it must hold at least {MIN_SEED_BYTES}"
        )
    return seed

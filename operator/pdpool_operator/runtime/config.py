"""Settings that the operator reads from its environment."""

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MIN_SEED_BYTES = 32
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


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
    seed: bytes
    """Master key. The keys of the routers' control endpoints are derived from it."""
    log_level: str
    identity: str
    """Name of this process in the Lease and in events. Each start has a new one."""
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
        seed=_seed(_required(env, "PDPOOL_ROUTER_SEED_FILE")),
        log_level=level,
        identity=f"{socket.gethostname()}_{uuid.uuid4().hex[:12]}",
        host=host,
        port=int(port),
    )


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise ConfigInvalidError(f"{name} is not set")
    return value


def _seed(file: str) -> bytes:
    try:
        seed = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigInvalidError(f"PDPOOL_ROUTER_SEED_FILE {file} cannot be read: {error.strerror}") from error
    if len(seed) < MIN_SEED_BYTES:
        raise ConfigInvalidError(
            f"PDPOOL_ROUTER_SEED_FILE {file} holds {len(seed)} bytes; it must hold at least {MIN_SEED_BYTES}"
        )
    return seed

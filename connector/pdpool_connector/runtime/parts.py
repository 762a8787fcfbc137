"""What a connector is composed of; tests give their own."""

import secrets
from typing import Literal, NamedTuple

from pdpool_connector.backends import open_backend
from pdpool_connector.backends.base import TransferBackend
from pdpool_connector.layout.process import ProcessName, this_process
from pdpool_connector.runtime.config import ConnectorConfig


class Identity(NamedTuple):
    """The name of one life of one connector, 32 hex characters, and where its process runs."""

    incarnation: str
    process: ProcessName


class Parts(NamedTuple):
    """Parts of a connector. `backend` moves the pages."""

    backend: TransferBackend
    identity: Identity


def make_parts(
    role: Literal["prefill", "decode"],
    config: ConnectorConfig,
    backend: TransferBackend | None = None,
    identity: Identity | None = None,
) -> Parts:
    """The parts that are given, and the usual ones for those that are not."""
    identity = identity or new_identity(config.pod_uid)
    if backend is None:
        backend = open_backend(
            config.backend,
            identity.incarnation,
            target=role == "decode",
            host=config.advertise_host,
            timeouts=config.timeouts,
        )
    return Parts(backend, identity)


def new_identity(pod_uid: str) -> Identity:
    """A random incarnation in this process. `pod_uid`: of the Kubernetes pod, "" outside one."""
    return Identity(secrets.token_hex(16), this_process(pod_uid))

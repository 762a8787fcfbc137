"""What one connector is to its peers."""

import secrets
from typing import NamedTuple

from pdpool_connector.layout.process import ProcessName, this_process


class Identity(NamedTuple):
    """The name of one life of one connector, 32 hex characters, and where its process runs."""

    incarnation: str
    process: ProcessName


def new_identity(pod_uid: str) -> Identity:
    """A random incarnation in this process. `pod_uid`: of the Kubernetes pod, "" outside one."""
    return Identity(secrets.token_hex(16), this_process(pod_uid))

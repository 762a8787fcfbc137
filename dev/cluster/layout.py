"""Names, addresses and paths of the local cluster. A machine has one cluster at most, as its addresses are fixed."""

import os
from dataclasses import dataclass
from pathlib import Path

from dev.paths import cache_dir

# Addresses on the loopback interface, so no port is reachable from outside this machine.
NODE_NETWORK = "10.200.0.0/24"
POD_NETWORK = "10.201.0.0/16"
SERVICE_NETWORK = "10.202.0.0/16"
SIMULATED_POD_NETWORK = "10.203.0.1/16"

API_ADDRESS = "10.200.0.1"
API_PORT = 6443
API_SERVICE = "10.202.0.1"
DNS_SERVICE = "10.202.0.10"
DNS_DOMAIN = "cluster.local"
ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
REGISTRY = "127.0.0.1:5001"

# Environment variable of every process of the cluster. It identifies the processes after a crash.
MARKER = "PDPOOL_CLUSTER_STATE"

# Unix socket paths are limited to 107 bytes. The longest path below the state folder takes 45.
LONGEST_STATE_PATH = 60


@dataclass(frozen=True)
class Node:
    """A node with a real kubelet. `number` (1, 2) determines its addresses."""

    number: int

    @property
    def name(self) -> str:
        """Name of the Kubernetes node."""
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        """InternalIP of the node, an address on the loopback interface."""
        return f"10.200.0.{self.number}"

    @property
    def pod_network(self) -> str:
        """Subnet of the node's pods."""
        return f"10.201.{self.number}.0/24"

    @property
    def bridge(self) -> str:
        """Linux bridge of the node's pods."""
        return f"pdpool{self.number}"

    @property
    def cgroup(self) -> str:
        """Root cgroup of the node's pods. With a shared one, each kubelet would kill the other's pods as orphans."""
        return f"pdpool-{self.name}"

    @property
    def network_name(self) -> str:
        """Name of the node's CNI network."""
        return f"pdpool-{self.name}"


NODES = (Node(1), Node(2))


@dataclass(frozen=True)
class State:
    """Files of the cluster, all below `root`."""

    root: Path

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the cluster administrator."""
        return self.root / "kubeconfig"

    @property
    def pki(self) -> Path:
        """Keys and certificates."""
        return self.root / "pki"

    @property
    def config(self) -> Path:
        """Generated configuration of the components."""
        return self.root / "config"

    @property
    def logs(self) -> Path:
        """One log file per process."""
        return self.root / "logs"

    @property
    def audit_log(self) -> Path:
        """Audit log of the API server, one JSON object per line."""
        return self.root / "audit.log"

    @property
    def bin(self) -> Path:
        """Links to the binaries of the cluster, including kubectl and helm."""
        return self.root / "bin"

    @property
    def summary(self) -> Path:
        """JSON description of the cluster for other programs."""
        return self.root / "cluster.json"

    def node(self, node: Node) -> Path:
        """Folder of one node: container runtime, kubelet, pod logs."""
        return self.root / node.name

    def containerd_socket(self, node: Node) -> Path:
        """Socket of the node's container runtime."""
        return self.node(node) / "containerd.sock"


def state_at(root: Path | None) -> State:
    """Return the state below `root`. The default is below the cache, so every checkout finds the same cluster.

    Raises:
        ValueError: the path is too long for the sockets below it.
    """
    chosen = (root or cache_dir() / "cluster").resolve()
    if len(os.fsencode(chosen)) > LONGEST_STATE_PATH:
        raise ValueError(
            f"--state-dir {chosen}: longer than {LONGEST_STATE_PATH} bytes; unix sockets below it need a shorter one"
        )
    return State(chosen)

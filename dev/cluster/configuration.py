"""The configuration files of the cluster's processes."""

import json
from pathlib import Path
from typing import Any

import yaml

from dev import packages
from dev.cluster import layout
from dev.cluster.layout import NODES, Node, State
from dev.paths import cache_dir
from dev.shell import write_text


def write_configuration(state: State) -> None:
    """Write the configuration files that the commands of `components.programs` name."""
    write_text(state.config / "audit-policy.yaml", yaml.safe_dump(_audit_policy()))
    write_text(state.config / "proxy.yaml", yaml.safe_dump(_proxy_configuration(state)))
    write_text(state.config / "registry.yaml", yaml.safe_dump(_registry_configuration()))
    # For pods with dnsPolicy Default (CoreDNS itself). It has no name server, because none is outside.
    write_text(state.config / "resolv.conf", f"search {layout.DNS_DOMAIN}\n")
    for node in NODES:
        write_text(state.config / f"kubelet-{node.number}.yaml", yaml.safe_dump(_kubelet_configuration(state, node)))
        write_text(state.config / f"containerd-{node.number}.toml", _containerd_configuration(state, node))
        write_text(_network_folder(state, node) / "10-pdpool.conflist", json.dumps(_network(state, node), indent=2))


def _audit_policy() -> dict[str, Any]:
    # RequestReceived is omitted: each request is logged again when it is answered.
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata"}],
    }


def _registry_configuration() -> dict[str, Any]:
    # In the cache, not in the state folder: pushed layers remain for the next cluster.
    folder = cache_dir() / "images/registry"
    return {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "http": {"addr": layout.REGISTRY},
        "storage": {"filesystem": {"rootdirectory": str(folder)}, "cache": {"blobdescriptor": "inmemory"}},
    }


def _proxy_configuration(state: State) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(state.pki / "proxy.kubeconfig")},
        # Both nodes share the host's network, so one proxy serves both.
        "hostnameOverride": NODES[0].name,
        "mode": "iptables",
        "clusterCIDR": layout.POD_NETWORK,
        "healthzBindAddress": f"{layout.API_ADDRESS}:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "nodePortAddresses": [layout.NODE_NETWORK],
        # The host's connection tracking stays as it is.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        "iptables": {"localhostNodePorts": False, "minSyncPeriod": "100ms"},
    }


def _kubelet_configuration(state: State, node: Node) -> dict[str, Any]:
    folder = state.node(node)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "healthzBindAddress": node.address,
        "readOnlyPort": 0,
        "tlsCertFile": str(state.pki / f"{node.name}.crt"),
        "tlsPrivateKeyFile": str(state.pki / f"{node.name}.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(state.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{state.containerd_socket(node)}",
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "resolvConf": str(state.config / "resolv.conf"),
        "clusterDNS": [layout.DNS_SERVICE],
        "clusterDomain": layout.DNS_DOMAIN,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        # dev.cluster.host sets the kernel parameters and restores them. The kubelet only checks them.
        "protectKernelDefaults": True,
        "makeIPTablesUtilChains": False,
        "oomScoreAdj": 0,
        # Development disks are often almost full, which must not evict pods.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "4s",
    }


def _containerd_configuration(state: State, node: Node) -> str:
    folder = state.node(node)
    return f"""\
version = 2
root = "{folder}/containerd"
state = "{folder}/run"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.tracing",
]
[grpc]
address = "{state.containerd_socket(node)}"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:1"
# Without CAP_SYS_RESOURCE a sandbox cannot lower its score: it then keeps the one it inherits.
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{packages.program("bridge").parent}"
conf_dir = "{_network_folder(state, node)}"
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{folder}/registries"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{packages.program("runc")}"
Root = "{folder}/runc"
"""


def _network_folder(state: State, node: Node) -> Path:
    return state.node(node) / "networks"


def _network(state: State, node: Node) -> dict[str, Any]:
    return {
        "cniVersion": "0.4.0",
        "name": node.network_name,
        "plugins": [
            {
                "type": "bridge",
                "bridge": node.bridge,
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(state.node(node) / "addresses"),
                    "ranges": [[{"subnet": node.pod_network}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }

"""The processes of the cluster: command lines and the configuration files they read."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dev import packages
from dev.cluster import layout
from dev.cluster.layout import API_ADDRESS, NODES, Node, State
from dev.paths import cache_dir
from dev.tools.build import binary

AUDIT_MEGABYTES = 500


@dataclass(frozen=True)
class Program:
    """One supervised process.

    Attributes:
        name: unique name, also of its log file.
        command: program and arguments.
        stop_s: time it gets to end after SIGTERM.
    """

    name: str
    command: list[str]
    stop_s: int = 5


def programs(state: State, simulated_nodes: int) -> list[Program]:
    """Return every process of the cluster, in the order they are started."""
    result = [_etcd(state), _api_server(state), _controller_manager(state), _scheduler(state), _registry(state)]
    for node in NODES:
        result += [_containerd(state, node), _kubelet(state, node)]
    result.append(_proxy(state))
    if simulated_nodes:
        result.append(_kwok(state))
    return result


def environment() -> dict[str, str]:
    """Return variables that every process gets, the same whichever shell started the cluster."""
    # containerd looks for its shim and runc there, the kubelet and kube-proxy for mount and iptables.
    unpacked = (str(packages.program(name).parent) for name in ("containerd", "runc"))
    system = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
    # The registry would otherwise look for a tracing collector.
    return {"PATH": ":".join((*unpacked, *system)), "OTEL_TRACES_EXPORTER": "none"}


def write_configuration(state: State) -> None:
    """Write the configuration files that the commands of `programs` name."""
    write_text(state.config / "audit-policy.yaml", yaml.safe_dump(_audit_policy()))
    write_text(state.config / "proxy.yaml", yaml.safe_dump(_proxy_configuration(state)))
    write_text(state.config / "registry.yaml", yaml.safe_dump(_registry_configuration()))
    # Pods with dnsPolicy Default (CoreDNS itself) get this one: there is nothing outside to ask.
    write_text(state.config / "resolv.conf", f"search {layout.DNS_DOMAIN}\n")
    for node in NODES:
        write_text(state.config / f"kubelet-{node.number}.yaml", yaml.safe_dump(_kubelet_configuration(state, node)))
        write_text(state.config / f"containerd-{node.number}.toml", _containerd_configuration(state, node))
        write_text(_network_folder(state, node) / "10-pdpool.conflist", json.dumps(_network(state, node), indent=2))


def write_text(path: Path, text: str) -> None:
    """Write a file so that readers see the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.rename(path)


def _etcd(state: State) -> Program:
    client, peer = f"https://{API_ADDRESS}:{layout.ETCD_PORT}", f"https://{API_ADDRESS}:{layout.ETCD_PEER_PORT}"
    pki = state.pki
    tls = [
        flag
        for prefix in ("", "peer-")
        for flag in (
            f"--{prefix}cert-file={pki}/etcd.crt",
            f"--{prefix}key-file={pki}/etcd.key",
            f"--{prefix}trusted-ca-file={pki}/etcd-ca.crt",
            f"--{prefix}client-cert-auth",
        )
    ]
    return Program(
        "etcd",
        [
            str(binary("etcd")),
            f"--data-dir={state.root}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            *tls,
            # A development cluster: losing the last seconds with the machine is no loss.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
    )


def _api_server(state: State) -> Program:
    pki = state.pki
    return Program(
        "kube-apiserver",
        [
            str(binary("kube-apiserver")),
            f"--advertise-address={API_ADDRESS}",
            f"--bind-address={API_ADDRESS}",
            f"--secure-port={layout.API_PORT}",
            f"--etcd-servers=https://{API_ADDRESS}:{layout.ETCD_PORT}",
            f"--etcd-cafile={pki}/etcd-ca.crt",
            f"--etcd-certfile={pki}/etcd-client.crt",
            f"--etcd-keyfile={pki}/etcd-client.key",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--cert-dir={pki}",
            f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
            f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-cluster-ip-range={layout.SERVICE_NETWORK}",
            f"--service-account-issuer=https://kubernetes.default.svc.{layout.DNS_DOMAIN}",
            f"--service-account-key-file={pki}/service-account.pub",
            f"--service-account-signing-key-file={pki}/service-account.key",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--audit-policy-file={state.config}/audit-policy.yaml",
            f"--audit-log-path={state.audit_log}",
            f"--audit-log-maxsize={AUDIT_MEGABYTES}",
            "--audit-log-maxbackup=1",
        ],
        stop_s=10,
    )


def _controller_manager(state: State) -> Program:
    kubeconfig = state.pki / "controller-manager.kubeconfig"
    return Program(
        "kube-controller-manager",
        [
            str(binary("kube-controller-manager")),
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--root-ca-file={state.pki}/ca.crt",
            f"--service-account-private-key-file={state.pki}/service-account.key",
            f"--cert-dir={state.pki}",
            "--bind-address=127.0.0.1",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
        ],
    )


def _scheduler(state: State) -> Program:
    kubeconfig = state.pki / "scheduler.kubeconfig"
    return Program(
        "kube-scheduler",
        [
            str(binary("kube-scheduler")),
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--cert-dir={state.pki}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
        ],
    )


def _registry(state: State) -> Program:
    return Program("registry", [str(binary("registry")), "serve", f"{state.config}/registry.yaml"])


def _containerd(state: State, node: Node) -> Program:
    command = [str(packages.program("containerd")), "--config", f"{state.config}/containerd-{node.number}.toml"]
    return Program(f"containerd-{node.number}", command)


def _kubelet(state: State, node: Node) -> Program:
    return Program(
        f"kubelet-{node.number}",
        [
            str(binary("kubelet")),
            f"--config={state.config}/kubelet-{node.number}.yaml",
            f"--kubeconfig={state.pki}/{node.name}.kubeconfig",
            f"--root-dir={state.node(node)}/kubelet",
            f"--cert-dir={state.node(node)}/kubelet/pki",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
            f"--node-labels=pdpool.dev/node={node.number}",
        ],
    )


def _proxy(state: State) -> Program:
    return Program("kube-proxy", [str(binary("kube-proxy")), f"--config={state.config}/proxy.yaml"])


def _kwok(state: State) -> Program:
    return Program(
        "kwok",
        [
            str(binary("kwok")),
            f"--kubeconfig={state.pki}/kwok.kubeconfig",
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            f"--cidr={layout.SIMULATED_POD_NETWORK}",
            f"--node-ip={API_ADDRESS}",
            "--node-port=10247",
            "--node-lease-duration-seconds=40",
        ],
    )


def _audit_policy() -> dict[str, Any]:
    # RequestReceived is left out: the same request is written again when it is answered.
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata"}],
    }


def _registry_configuration() -> dict[str, Any]:
    # In the cache, not the state: layers pushed once are there for the next cluster too.
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
        "healthzBindAddress": f"{API_ADDRESS}:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "nodePortAddresses": [layout.NODE_NETWORK],
        # The host's connection tracking is left as it is.
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
        # dev.cluster.host sets the kernel parameters and restores them; the kubelet only checks.
        "protectKernelDefaults": True,
        "makeIPTablesUtilChains": False,
        "oomScoreAdj": 0,
        # Development disks are full more often than nodes should be evicted for.
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

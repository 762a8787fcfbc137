"""The processes of the cluster and their command lines."""

from dataclasses import dataclass
from pathlib import Path

from dev import packages
from dev.cluster import layout
from dev.cluster.layout import API_ADDRESS, NODES, Node, State
from dev.tools.build import binary

AUDIT_MEGABYTES = 500


@dataclass(frozen=True)
class Program:
    """One supervised process.

    Attributes:
        name: unique name, also of its log file.
        command: program and arguments.
        reads: configuration files. A change of one restarts the process.
        stop_s: seconds to end after SIGTERM.
    """

    name: str
    command: list[str]
    reads: tuple[Path, ...] = ()
    stop_s: int = 5


def programs(state: State, simulated_nodes: int) -> list[Program]:
    """Return every process of the cluster, in start order."""
    result = [_etcd(state), _api_server(state), _controller_manager(state), _scheduler(state), _registry(state)]
    for node in NODES:
        result += [_containerd(state, node), _kubelet(state, node)]
    result.append(_proxy(state))
    if simulated_nodes:
        result.append(_kwok(state))
    return result


def environment() -> dict[str, str]:
    """Return the environment of every process. It does not depend on the shell that started the cluster."""
    # containerd searches this path for its shim and runc, the kubelet and kube-proxy for mount and iptables.
    unpacked = (str(packages.program(name).parent) for name in ("containerd", "runc"))
    system = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
    # Otherwise the registry looks for a tracing collector.
    return {"PATH": ":".join((*unpacked, *system)), "OTEL_TRACES_EXPORTER": "none"}


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
            # In a development cluster, the loss of the last seconds at a machine crash does no harm.
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
        reads=(state.config / "audit-policy.yaml",),
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
    configuration = state.config / "registry.yaml"
    return Program("registry", [str(binary("registry")), "serve", str(configuration)], reads=(configuration,))


def _containerd(state: State, node: Node) -> Program:
    configuration = state.config / f"containerd-{node.number}.toml"
    command = [str(packages.program("containerd")), "--config", str(configuration)]
    return Program(f"containerd-{node.number}", command, reads=(configuration,))


def _kubelet(state: State, node: Node) -> Program:
    configuration = state.config / f"kubelet-{node.number}.yaml"
    return Program(
        f"kubelet-{node.number}",
        [
            str(binary("kubelet")),
            f"--config={configuration}",
            f"--kubeconfig={state.pki}/{node.name}.kubeconfig",
            f"--root-dir={state.node(node)}/kubelet",
            f"--cert-dir={state.node(node)}/kubelet/pki",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
            f"--node-labels=pdpool.dev/node={node.number}",
        ],
        reads=(configuration,),
    )


def _proxy(state: State) -> Program:
    configuration = state.config / "proxy.yaml"
    return Program("kube-proxy", [str(binary("kube-proxy")), f"--config={configuration}"], reads=(configuration,))


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

"""The Go modules to build: the binaries of each, and the version strings to link in."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent
KUBERNETES_VERSION = "v1.34.4"
HELM_VERSION = "v3.19.0"


@dataclass(frozen=True)
class Module:
    """One folder with a go.mod.

    Attributes:
        name: folder under `dev/tools`.
        binaries: file name of each binary -> Go package it is built from.
        variables: Go string variables that the linker sets, so that programs report their version.
    """

    name: str
    binaries: dict[str, str]
    variables: dict[str, str]

    @property
    def folder(self) -> Path:
        """Folder that holds go.mod."""
        return ROOT / self.name


def _kubernetes() -> Module:
    commands = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
    # Without these, a kubelet registers as v0.0.0, which version-skew checks refuse.
    values = {"gitVersion": KUBERNETES_VERSION, "gitMajor": major, "gitMinor": minor, "gitTreeState": "archive"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return Module(
        name="kubernetes",
        binaries={command: f"k8s.io/kubernetes/cmd/{command}" for command in commands},
        variables={f"{package}.{key}": value for package in packages for key, value in values.items()},
    )


def _helm() -> Module:
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
    variables = {"helm.sh/helm/v3/internal/version.version": HELM_VERSION}
    # Without a cluster, `helm template` and `helm lint` check charts against this version.
    for package in ("helm.sh/helm/v3/pkg/chartutil", "helm.sh/helm/v3/pkg/lint/rules"):
        variables |= {f"{package}.k8sVersionMajor": major, f"{package}.k8sVersionMinor": minor}
    return Module(name="helm", binaries={"helm": "helm.sh/helm/v3/cmd/helm"}, variables=variables)


# Kubernetes last: it takes longest, so an error in another module shows sooner.
MODULES = (
    Module("pause", {"pause": "."}, {}),
    Module("registry", {"registry": "."}, {}),
    Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}, {}),
    _helm(),
    Module("kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"}, {"sigs.k8s.io/kwok/pkg/consts.Version": "v0.7.0"}),
    Module("coredns", {"coredns": "github.com/coredns/coredns"}, {}),
    _kubernetes(),
)

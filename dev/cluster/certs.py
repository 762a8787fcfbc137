"""Certificate authorities, certificates and kubeconfigs of the cluster, created with the openssl command."""

import base64
from dataclasses import dataclass
from pathlib import Path

import yaml

from dev.cluster.layout import API_ADDRESS, API_PORT, API_SERVICE, DNS_DOMAIN, NODES, State
from dev.shell import run

DAYS = "3650"
CLIENT = "clientAuth"
SERVER = "serverAuth"


@dataclass(frozen=True)
class Certificate:
    """Content of one certificate.

    Attributes:
        name: file name without ending.
        subject: in openssl's form. O is the Kubernetes group, CN the user.
        usages: extended key usages.
        alternatives: subject alternative names, likewise.
        authority: file name of the signing authority.
    """

    name: str
    subject: str
    usages: tuple[str, ...] = (CLIENT,)
    alternatives: tuple[str, ...] = ()
    authority: str = "ca"


def certificates() -> list[Certificate]:
    """Return every certificate of the cluster. Each component has its own user, as in any real cluster."""
    api_names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DNS_DOMAIN}")
    api = (*(f"DNS:{n}" for n in api_names), f"IP:{API_ADDRESS}", f"IP:{API_SERVICE}", "IP:127.0.0.1")
    members = [
        Certificate("etcd", "/CN=etcd", (SERVER, CLIENT), (f"IP:{API_ADDRESS}",), authority="etcd-ca"),
        Certificate("etcd-client", "/CN=kube-apiserver", authority="etcd-ca"),
        Certificate("apiserver", "/CN=kube-apiserver", (SERVER,), api),
        Certificate("apiserver-kubelet-client", "/CN=kube-apiserver-kubelet-client"),
        Certificate("admin", "/O=system:masters/CN=admin"),
        Certificate("controller-manager", "/CN=system:kube-controller-manager"),
        Certificate("scheduler", "/CN=system:kube-scheduler"),
        Certificate("proxy", "/CN=system:kube-proxy"),
        Certificate("kwok", "/O=system:masters/CN=kwok"),
    ]
    for node in NODES:
        subject = f"/O=system:nodes/CN=system:node:{node.name}"
        members.append(Certificate(node.name, subject, (SERVER, CLIENT), (f"IP:{node.address}", f"DNS:{node.name}")))
    return members


def write_pki(state: State) -> None:
    """Write keys, certificates and kubeconfigs that do not exist yet.

    Raises:
        CommandError: openssl failed.
    """
    state.pki.mkdir(parents=True, exist_ok=True, mode=0o700)
    _authority(state.pki, "ca")
    _authority(state.pki, "etcd-ca")
    _service_account_key(state.pki)
    for certificate in certificates():
        _sign(state.pki, certificate)
    for user in ("admin", "controller-manager", "scheduler", "proxy", "kwok", *(n.name for n in NODES)):
        target = state.kubeconfig if user == "admin" else state.pki / f"{user}.kubeconfig"
        _private_text(target, _kubeconfig(state.pki, user))


def _authority(folder: Path, name: str) -> None:
    extensions = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign"]
    _request(folder, name, f"/CN=pdpool {name}", extensions, signer=None)


def _sign(folder: Path, certificate: Certificate) -> None:
    extensions = [
        "basicConstraints=critical,CA:FALSE",
        "keyUsage=critical,digitalSignature",
        f"extendedKeyUsage={','.join(certificate.usages)}",
    ]
    if certificate.alternatives:
        extensions.append(f"subjectAltName={','.join(certificate.alternatives)}")
    _request(folder, certificate.name, certificate.subject, extensions, signer=certificate.authority)


def _request(folder: Path, name: str, subject: str, extensions: list[str], signer: str | None) -> None:
    final = folder / f"{name}.crt"
    if final.exists():
        return
    # The certificate gets its final name last. After a crash in between, it is missing, and both files are made again.
    partial = folder / f"{name}.crt.partial"
    command: list[str | Path] = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-noenc", "-days", DAYS, "-subj", subject, "-keyout", folder / f"{name}.key", "-out", partial]
    # Without this configuration, the system's default would add extensions a second time.
    command += ["-config", _openssl_config(folder)]
    for extension in extensions:
        command += ["-addext", extension]
    if signer:
        command += ["-CA", folder / f"{signer}.crt", "-CAkey", folder / f"{signer}.key"]
    run(*command)
    (folder / f"{name}.key").chmod(0o600)
    partial.rename(final)


def _openssl_config(folder: Path) -> Path:
    path = folder / "openssl.cnf"
    path.write_text("[req]\ndistinguished_name = dn\n[dn]\n")
    return path


def _service_account_key(folder: Path) -> None:
    public = folder / "service-account.pub"
    if public.exists():
        return
    key, partial = folder / "service-account.key", folder / "service-account.pub.partial"
    run("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key)
    run("openssl", "pkey", "-in", key, "-pubout", "-out", partial)
    key.chmod(0o600)
    partial.rename(public)


def _kubeconfig(folder: Path, user: str) -> str:
    def encoded(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    cluster = {"server": f"https://{API_ADDRESS}:{API_PORT}", "certificate-authority-data": encoded("ca.crt")}
    credentials = {
        "client-certificate-data": encoded(f"{user}.crt"),
        "client-key-data": encoded(f"{user}.key"),
    }
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "pdpool",
            "clusters": [{"name": "pdpool", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "pdpool", "context": {"cluster": "pdpool", "user": user}}],
        },
        sort_keys=False,
    )


def _private_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.touch(mode=0o600)
    partial.write_text(text)
    partial.rename(path)

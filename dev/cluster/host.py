"""Changes to the machine itself (kernel parameters, loopback addresses, forwarding). They are printed, recorded,
undone.
"""

import json
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dev.cluster import cgroups, layout
from dev.cluster.layout import NODES, State
from dev.shell import run, write_text

# A reboot removes this file together with the changes that it records.
RECORD = Path("/run/pdpool-cluster.json")
CHAIN = "PDPOOL-FORWARD"
# Created by kubelets, runtimes and network plugins. They are removed at the end if they did not exist before.
FOLDERS = (
    "/run/containerd",
    "/var/lib/cni",
    "/var/lib/kubelet",
    "/var/log/containers",
)
MODULES = ("overlay", "br_netfilter")
# Kernel parameters: first those that pods need to reach each other, then those that a kubelet requires.
KERNEL_PARAMETERS = {
    "net.ipv4.ip_forward": "1",
    "net.bridge.bridge-nf-call-iptables": "1",
    "vm.overcommit_memory": "1",
    "vm.panic_on_oom": "0",
    "kernel.panic": "10",
    "kernel.panic_on_oops": "1",
    "kernel.keys.root_maxkeys": "1000000",
    "kernel.keys.root_maxbytes": "25000000",
}
# Two runtimes and two kubelets watch many files. A larger value of the machine stays.
LEAST_PARAMETERS = {"fs.inotify.max_user_instances": 1024}


@dataclass
class Record:
    """Changes since this boot, with the values before.

    Attributes:
        boot: Id of the boot.
        state: State folder of the cluster.
        parameters: Kernel parameter -> value before.
        folders: Folders that did not exist before.
        controllers: Cgroup controllers enabled below the root.
    """

    boot: str
    state: str
    parameters: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    controllers: list[str] = field(default_factory=list)


def read_record() -> Record | None:
    """Return the record of this boot's changes, None if nothing was changed."""
    try:
        record = Record(**json.loads(RECORD.read_text()))
    except FileNotFoundError:
        return None
    return record if record.boot == _boot() else None


def own_record(state: State) -> Record | None:
    """Return the record of this boot's changes, None if nothing was changed.

    Raises:
        RuntimeError: the changes belong to a cluster with another state folder.
    """
    record = read_record()
    if record and record.state != str(state.root):
        raise RuntimeError(
            f"this machine's cluster has its state in {record.state}; end it with `--state-dir {record.state} down`"
        )
    return record


def prepare(state: State) -> None:
    """Make the missing changes. Print each one before it is made.

    Raises:
        RuntimeError: another cluster uses this machine.
        CommandError: a change was refused.
    """
    record = own_record(state)
    if record is None:
        _refuse_foreign_cluster()
        missing = [folder for folder in FOLDERS if not Path(folder).exists()]
        record = Record(_boot(), str(state.root), folders=missing)
        _save(record)
    for module in MODULES:
        if not Path(f"/sys/module/{module}").exists() and _has_module(module):
            _announce(f"load kernel module {module}")
            run("modprobe", module)
    for name, value in _wanted_parameters().items():
        _announce(f"sysctl {name}: {_parameter(name).read_text().strip()} -> {value}")
        record.parameters.setdefault(name, _parameter(name).read_text().strip())
        _save(record)
        _parameter(name).write_text(value)
    if controllers := cgroups.missing_controllers():
        _announce(f"cgroup controllers for groups below the root: {', '.join(controllers)}")
        record.controllers += controllers
        _save(record)
        cgroups.switch_controllers(controllers, "+")
    present = run("ip", "-o", "-4", "address", "show", "dev", "lo")
    for node in NODES:
        if f" {node.address}/32 " not in present:
            _announce(f"address {node.address}/32 on lo ({node.name})")
            run("ip", "address", "add", f"{node.address}/32", "dev", "lo")
    for rule in _missing_rules():
        _announce(f"iptables {' '.join(rule)}")
        run("iptables", "-w", *rule)


def restore() -> list[str]:
    """Undo every change and return the list. The cluster's processes must have ended.

    Raises:
        CommandError: a change cannot be undone.
    """
    undone = []
    for bridge in (node.bridge for node in NODES):
        if Path(f"/sys/class/net/{bridge}").exists():
            run("ip", "link", "delete", bridge)
            undone.append(f"bridge {bridge}")
    present = run("ip", "-o", "-4", "address", "show", "dev", "lo")
    for node in NODES:
        if f" {node.address}/32 " in present:
            run("ip", "address", "delete", f"{node.address}/32", "dev", "lo")
            undone.append(f"address {node.address}")
    if _succeeds("iptables", "-w", "-C", "FORWARD", "-j", CHAIN):
        run("iptables", "-w", "-D", "FORWARD", "-j", CHAIN)
    if _succeeds("iptables", "-w", "-S", CHAIN):
        run("iptables", "-w", "-F", CHAIN)
        run("iptables", "-w", "-X", CHAIN)
        undone.append(f"iptables chain {CHAIN}")
    record = read_record()
    for name, value in (record.parameters if record else {}).items():
        _parameter(name).write_text(value)
        undone.append(f"sysctl {name} = {value}")
    if record and record.controllers:
        cgroups.switch_controllers(record.controllers, "-")
        undone.append(f"cgroup controllers {', '.join(record.controllers)}")
    RECORD.unlink(missing_ok=True)
    return undone


def _wanted_parameters() -> dict[str, str]:
    exact = {n: v for n, v in KERNEL_PARAMETERS.items() if _parameter(n).read_text().strip() != v}
    least = {n: str(v) for n, v in LEAST_PARAMETERS.items() if int(_parameter(n).read_text()) < v}
    return exact | least


def _missing_rules() -> list[list[str]]:
    """Return forwarding rules that are missing.

    Pods may reach each other and the nodes, but nothing outside the machine. The chain is last in FORWARD, so
    kube-proxy can refuse connections to Services without endpoints before this chain drops them.
    """
    pods = layout.POD_NETWORK
    if not _succeeds("iptables", "-w", "-S", CHAIN):
        missing = [["-N", CHAIN]]
        present = ""
    else:
        missing = []
        present = run("iptables", "-w", "-S", CHAIN)
    for rule in (["-s", pods, "-d", pods, "-j", "ACCEPT"], ["-s", pods, "-j", "DROP"]):
        if f"-A {CHAIN} {' '.join(rule)}\n" not in present:
            missing.append(["-A", CHAIN, *rule])
    if not _succeeds("iptables", "-w", "-C", "FORWARD", "-j", CHAIN):
        missing.append(["-A", "FORWARD", "-j", CHAIN])
    return missing


def _refuse_foreign_cluster() -> None:
    if _succeeds("iptables", "-w", "-t", "nat", "-S", "KUBE-SERVICES"):
        raise RuntimeError(
            "iptables has a chain KUBE-SERVICES: another Kubernetes node seems to run on this machine, "
            "and two would conflict. If it is left over, remove it with `kube-proxy --cleanup`."
        )


def _announce(text: str) -> None:
    print(f"  host: {text}", flush=True)


def _parameter(name: str) -> Path:
    path = Path("/proc/sys") / name.replace(".", "/")
    if not path.exists():
        raise RuntimeError(f"the kernel has no parameter {name}; a module may be missing ({', '.join(MODULES)})")
    return path


def _has_module(name: str) -> bool:
    return _succeeds("modprobe", "--dry-run", "--quiet", name)


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _save(record: Record) -> None:
    write_text(RECORD, json.dumps(asdict(record), indent=2))

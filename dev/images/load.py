"""Brings built images to the local cluster's nodes or to a registry. Moves only missing layers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dev import packages
from dev.cluster.layout import NODES, REGISTRY, Node, State
from dev.images import store
from dev.images.build import IMAGES
from dev.shell import Clock, exclusively, run

TRANSFER_S = 600.0


def load(name: str, state: State, clock: Clock) -> None:
    """Load one image into both nodes' container runtime under its local name. Does nothing if it is already there.

    Raises:
        CommandError: the image was not built, or the cluster is not up.
    """
    with exclusively(store.folder() / ".load.lock", "bringing images into the nodes"):
        _load(name, state, clock)


def _load(name: str, state: State, clock: Clock) -> None:
    image = IMAGES[name]
    started = clock.elapsed_s
    reference = f"{REGISTRY}/{name}:local"
    with clock.ticking(lambda: f"pushing {image.tag} to {REGISTRY}"):
        digest = push(name, reference)
    stale = [node for node in NODES if _digest_on(state, node, image.tag) != digest]
    with (
        clock.ticking(lambda: f"{', '.join(node.name for node in stale)}: pulling {image.tag}"),
        ThreadPoolExecutor() as both,
    ):
        # Results are read so that a failure on either node raises.
        list(both.map(lambda node: _pull(state, node, reference, image.tag), stale))
    where = f"into {', '.join(node.name for node in stale)}" if stale else "is on every node already"
    clock.say(f"{image.tag} {where} ({clock.elapsed_s - started:.1f} s)")


def _pull(state: State, node: Node, reference: str, tag: str) -> None:
    _ctr(state, node, "pull", "--plain-http", reference)
    _ctr(state, node, "tag", "--force", reference, tag)
    _ctr(state, node, "remove", reference)


def push(name: str, reference: str) -> str:
    """Push one built image to a registry and return its digest there.

    Args:
        name: key of `IMAGES`.
        reference: registry/repository:tag. A registry on this machine's loopback is used without TLS. Its layers are
            compressed for speed, because no network is involved.
    """
    host = reference.split("/")[0].split(":")[0]
    local = host in {"localhost", "127.0.0.1"}
    digest_file = store.folder() / f"{name}.digest"
    options = ["--tls-verify=false", "--compression-format=zstd", "--compression-level=1"] if local else []
    options += ["--quiet", "--format=oci", f"--digestfile={digest_file}"]
    store.buildah("push", *options, IMAGES[name].tag, f"docker://{reference}")
    return digest_file.read_text().strip()


def _digest_on(state: State, node: Node, tag: str) -> str | None:
    for line in _ctr(state, node, "ls", f"name=={tag}").splitlines()[1:]:
        words = line.split()
        if words[0] == tag:
            return words[2]
    return None


def _ctr(state: State, node: Node, *arguments: str | Path) -> str:
    socket = state.containerd_socket(node)
    return run(packages.program("ctr"), "-a", socket, "-n", "k8s.io", "images", *arguments, timeout_s=TRANSFER_S)

"""`python -m dev.run_operator`: run the operator of this checkout against the current kubeconfig.

It has the Lease, health and metrics of an operator in a pod. With the chart's name of the Lease, only one of the two
leads.
"""

import asyncio
import base64
import os
import secrets
import sys
from pathlib import Path

import click
from kubernetes.aio.config import ConfigException
from pdpool_operator.runtime.api import Api
from pdpool_operator.runtime.api_errors import ApiError, NotFoundError, UnavailableError
from pdpool_operator.runtime.api_transport import connect
from pdpool_operator.runtime.resources import DECODE_POOLS, OPERATIONS, PREFILL_POOLS, SECRETS, SERVICES_PD

from dev.paths import CHECKOUT, cache_dir
from dev.shell import write_text

INSTALL_CRDS = "kubectl apply --server-side -f crds"
SEED_SECRET = "pdpool-seed"
SEED_BYTES = 48
CHECK_TIMEOUT_S = 10.0


class NotRunnableError(Exception):
    """The operator would not work. The message says what to do."""


async def check(namespace: str) -> dict[str, bytes]:
    """Check that the cluster answers and serves the kinds. Return the chart's seeds, none without the chart.

    Raises:
        NotRunnableError: there is no kubeconfig, no answer, a kind is not served, or a right is missing.
    """
    try:
        client = await connect(os.environ.get("KUBECONFIG"))
    except (ConfigException, OSError) as error:
        raise NotRunnableError(
            f"no usable kubeconfig: {error}; set KUBECONFIG, for example "
            "KUBECONFIG=$(.venv/bin/python -m dev.cluster kubeconfig)"
        ) from error
    try:
        return await _look(Api(client, timeout_s=CHECK_TIMEOUT_S), namespace)
    except UnavailableError as error:
        raise NotRunnableError(f"the cluster does not answer: {error}; is KUBECONFIG the right one?") from error
    except ApiError as error:
        raise NotRunnableError(f"the cluster refuses what the operator needs: {error}") from error
    finally:
        await client.close()  # type: ignore[no-untyped-call]


async def _look(api: Api, namespace: str) -> dict[str, bytes]:
    for resource in (PREFILL_POOLS, DECODE_POOLS, SERVICES_PD, OPERATIONS):
        try:
            async for _ in api.list(resource, namespace):
                break
        except NotFoundError as error:
            raise NotRunnableError(f"the CRD of {resource.kind} is not installed; run {INSTALL_CRDS}") from error
    secret = await api.get(SECRETS, namespace, SEED_SECRET)
    return {name: base64.b64decode(value) for name, value in ((secret or {}).get("data") or {}).items()}


def keep_seeds(folder: Path, given: dict[str, bytes]) -> None:
    """Write the chart's seeds for the operator to read. Without the chart, create a seed once, for its owner only."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    if given:
        for old in folder.glob("seed*"):
            old.unlink()
        for name, seed in given.items():
            (folder / name).write_bytes(seed)
    elif not (folder / "seed").exists():
        write_text(folder / "seed", base64.b64encode(secrets.token_bytes(SEED_BYTES)).decode())


def environment(folder: Path, *, namespace: str, lease: str, listen: str, watch: str, tag: str) -> dict[str, str]:
    """Return the operator's variables, as the chart sets them in a pod. Set ones keep their value."""
    ours = {
        "PDPOOL_NAMESPACE": namespace,
        "PDPOOL_LEASE": lease,
        "PDPOOL_LISTEN": listen,
        "PDPOOL_WATCH_NAMESPACES": watch,
        "PDPOOL_ENGINE_IMAGE": f"localhost/pdpool-engine:{tag}",
        "PDPOOL_ROUTER_IMAGE": f"localhost/pdpool-router:{tag}",
        "PDPOOL_ROUTER_SEED_FILE": str(folder / "seed"),
        "PYTHONPATH": f"{CHECKOUT / 'operator'}:{CHECKOUT / 'connector'}",
    }
    return ours | dict(os.environ) | {"PDPOOL_ROUTER_SEED_FILE": ours["PDPOOL_ROUTER_SEED_FILE"]}


@click.command(help=__doc__)
@click.option("--namespace", default="default", show_default=True, help="Namespace of the Lease.")
@click.option("--lease", default="pdpool-operator", show_default=True, help="Name of the Lease.")
@click.option("--listen", default="127.0.0.1:8080", show_default=True, help="ADDRESS:PORT of health and metrics.")
@click.option("--watch", default="", help="Namespaces to serve, separated by commas. Default: all.")
@click.option("--tag", default="dev", show_default=True, help="Tag of the images on the nodes.")
def main(namespace: str, lease: str, listen: str, watch: str, tag: str) -> None:
    """Check the cluster, then become the operator: signals reach it directly."""
    try:
        seeds = asyncio.run(check(namespace))
    except NotRunnableError as error:
        sys.exit(f"run_operator: {error}")
    folder = cache_dir() / "run-operator" / f"{namespace}.{lease}"
    keep_seeds(folder, seeds)
    print(f"run_operator: Lease {namespace}/{lease}, http://{listen}/metrics; Ctrl-C stops it", flush=True)
    env = environment(folder, namespace=namespace, lease=lease, listen=listen, watch=watch, tag=tag)
    os.execve(sys.executable, [sys.executable, "-m", "pdpool_operator"], env)


if __name__ == "__main__":
    main()

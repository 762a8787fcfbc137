"""What engines have in common that other projects build: they get the connector by variables, and devices by limits."""

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

from ..api import names
from ..api.names import Role
from ..api.pools import Pool
from .base import Directory, Instance, Refusal, agent_drain

CONTROL_PORT = 9100
"""Not the reference engine's 8999: data-parallel ranks have bootstrap ports 8998, 8999, ..."""
HOME = "/home/pdpool"
GPUS = ("nvidia.com/gpu", "amd.com/gpu")
DIRECTORIES = (Directory("home", HOME), Directory("shm", "/dev/shm", in_memory=True))  # noqa: S108 -- an emptyDir


def connector_variables(instance: Instance) -> dict[str, str]:
    """Variables that `ConnectorConfig.from_env` reads. Each further rank adds its number to the ports."""
    pool, keys = instance.pool, instance.keys
    variables = {
        "PDPOOL_TRANSFER_BACKEND": pool.spec.transfer.backend.lower(),
        "PDPOOL_CONTROL_PORT": str(CONTROL_PORT),
        "PDPOOL_ADMIN_PORT": str(names.ADMIN_PORT),
        "PDPOOL_ADMIN_SOCKET": names.ADMIN_SOCKET,
        "PDPOOL_FLIGHT_DIR": names.FLIGHT_DIRECTORY,
    }
    if pool.role is Role.PREFILL:
        variables["PDPOOL_BOOTSTRAP_PORT"] = str(names.BOOTSTRAP_PORT)
    if keys is not None:
        variables["PDPOOL_OPERATOR_KEY"] = f"{names.KEYS_DIRECTORY}/{names.operator_file(keys.newest)}"
        variables["PDPOOL_CURVE_KEYS"] = f"{names.KEYS_DIRECTORY}/{names.curve_file(keys)}"
    return variables


def numbered(name: str, first: int, count: int) -> dict[str, int]:
    """Return successive ports by name: `name`, `name-1`, ..."""
    return {name if number == 0 else f"{name}-{number}": first + number for number in range(count)}


def template_args(pool: Pool) -> list[Any]:
    """Return the arguments of the user's template, whose shape is not checked yet."""
    spec = pool.spec.template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for container in containers if isinstance(containers, list) else ():
        if isinstance(container, dict) and container.get("name") == names.ENGINE_CONTAINER:
            args = container.get("args")
            return args if isinstance(args, list) else []
    return []


def shared_flags(pool: Pool, flags: Collection[str]) -> Mapping[str, str]:
    """Return which of these flags the template sets. The value of one that is `auto` is known to the engine only."""
    found: dict[str, str] = {}
    for arg, after in pairwise([*map(str, template_args(pool)), ""]):
        flag, separator, value = arg.partition("=")
        if flag in flags:
            found[flag] = value if separator else after
    return {flag: value for flag, value in found.items() if value != "auto"}


def drain_command(pool: Pool, ranks: int) -> list[str]:
    """Return the command that drains all ranks. The further ones have their number behind the socket's name."""
    further = [f"{names.ADMIN_SOCKET}.{number}" for number in range(1, ranks)]
    return agent_drain("python3", pool, names.ADMIN_SOCKET, *further)


def too_few_gpus(container: Mapping[str, Any], ranks: int) -> Iterator[Refusal]:
    """Return the limits of devices that are below the number of ranks."""
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, dict) else None
    for resource in GPUS:
        given = limits.get(resource) if isinstance(limits, dict) else None
        if given is not None and str(given).isdecimal() and int(given) < ranks:
            yield Refusal(
                f"resources.limits[{resource}]", given, f"spec.parallelism makes {ranks} ranks, one for each device"
            )
